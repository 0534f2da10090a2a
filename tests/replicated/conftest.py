"""A local Ray cluster with replicas of the bundled model."""

import argparse
import asyncio
import json
import os
import shutil
import signal
import time

import pytest
from support.paths import EXAMPLES
from support.serving.replicas import find_replicas

SIZES = "--context 512 --max-running 4 --max-new-tokens 480 --rows 16 --scan-layers"
PORT = 8765


@pytest.fixture(scope="session")
def make_options():
    """Function that creates the command-line options of `serve_ray.py`."""
    from served.loading import add_options

    parser = argparse.ArgumentParser()
    add_options(parser, may_share=False)
    base = dict(max_waiting=64, grammars=0, kept_sequences=16, cpus=0.1, gpus=0.0)

    def make(replicas, weights=None):
        options = parser.parse_args(SIZES.split())
        return argparse.Namespace(
            **vars(options), **base, replicas=replicas, weights=weights
        )

    return make


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A cluster that stops with the tests."""
    import ray
    from ray import serve
    from replicated.application import join_cluster

    programs = str(tmp_path_factory.mktemp("programs"))
    with pytest.MonkeyPatch.context() as patch:
        # Replicas compile the same programs, and share one cache folder.
        patch.setenv("XDG_CACHE_HOME", programs)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        join_cluster()
        yield
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="session")
def deploy(request, make_options):
    """Function that runs replicas; running ones are changed to the given options."""
    from replicated.application import make_application, run

    request.getfixturevalue("cluster")

    def start(replicas, weights=None):
        options = make_options(replicas, weights)
        run(make_application(options), "127.0.0.1", PORT)

    return start


@pytest.fixture(scope="session")
def replicas(deploy):
    """Three replicas behind one address."""
    deploy((3, 3))


@pytest.fixture(scope="session")
def alone(make_options):
    """Function that returns the answers of a single server."""
    from replicated.forwarding import Forwarded, call_app
    from served.api import make_app
    from served.loading import load

    served = load(make_options((1, 1)))
    app = make_app(served)

    async def gather(body):
        request = Forwarded("POST", "/v1/completions", body=json.dumps(body).encode())
        return [message async for message in call_app(app, request)]

    def ask(**body):
        messages = asyncio.run(gather(body))
        return json.loads(b"".join(m.get("body", b"") for m in messages))

    with served.engine:
        ask.stats = served.engine.stats
        yield ask


@pytest.fixture
def url():
    """The URL of the completions endpoint."""
    return f"http://127.0.0.1:{PORT}/v1/completions"


@pytest.fixture
def ask(url):
    """Function that posts to the endpoint and returns the status and the JSON."""
    import httpx

    async def send(client, body):
        reply = await client.post(url, json=body, timeout=300)
        return reply.status_code, reply.json()

    async def send_all(bodies, meanwhile):
        async with httpx.AsyncClient() as client:
            tasks = [asyncio.ensure_future(send(client, body)) for body in bodies]
            if meanwhile is not None:
                await asyncio.to_thread(meanwhile)
            return await asyncio.gather(*tasks)

    return lambda bodies, meanwhile=None: asyncio.run(send_all(bodies, meanwhile))


@pytest.fixture
def find_processes():
    """Function that returns the process ids of the replicas."""
    return find_replicas


@pytest.fixture
def kill(find_processes):
    """Function that kills replicas by SIGKILL and waits for their end."""

    def kill_some(count=1):
        killed = find_processes()[:count]
        for process in killed:
            os.kill(process, signal.SIGKILL)
        while {*killed} & {*find_processes()}:
            time.sleep(0.05)

    return kill_some


@pytest.fixture
def read_numbers():
    """Function that reads the metrics of all replicas, by name and replica."""
    import urllib.request

    from prometheus_client.parser import text_string_to_metric_families

    def read():
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics") as reply:
            text = reply.read().decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if "le" not in sample.labels and "state" not in sample.labels:
                    by_replica = found.setdefault(sample.name, {})
                    by_replica[sample.labels["replica"]] = sample.value
        return found

    return read


@pytest.fixture
def other_weights(tmp_path):
    """A folder of the bundled model with other weights."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "pydoc"
    shutil.copytree(EXAMPLES / "models" / "pydoc", folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.norm.weight"
    tensors[name] = tensors[name] * (1 - 2 * (abs(tensors[name]) > 0.9))
    save_file(tensors, path)
    return folder
