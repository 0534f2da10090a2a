"""Fixtures of the tests of examples."""

import functools
import io
import json
import os
import runpy
import sys
import time
import urllib.error
import urllib.request

import pytest
from support.paths import EXAMPLES

import jkv


@pytest.fixture
def scanned_layers(monkeypatch):
    """Run layers in a scan unless a script disables it, which halves compile time.

    Scripts in separate processes run layers one by one, as users do.
    """
    import pretrained

    load = functools.partial(pretrained.load, scan_layers=True)
    monkeypatch.setattr(pretrained, "load", load)


@pytest.fixture
def run_here(monkeypatch, capsys, request):
    """Function that runs a script in this process and returns its `out` and `err`."""

    request.getfixturevalue("scanned_layers")

    def run(script, *arguments, stdin=""):
        given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", given)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr()

    return run


@pytest.fixture
def one_size(monkeypatch):
    """Use one step size in `generate.py`, for a third of the compile time."""
    from generating import command

    engine = functools.partial(command.Engine, row_counts=(16,))
    monkeypatch.setattr(command, "Engine", engine)


@pytest.fixture(autouse=True)
def ending_this_test_alone(monkeypatch):
    """Scripts end by `os._exit` after Ctrl-C; let it end only the test."""
    monkeypatch.setattr(os, "_exit", sys.exit)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The bundled model as the servers load it: 12 blocks, 4 running sequences."""
    pytest.importorskip("tokenizers")
    from support.serving.http_server import load_served

    return load_served(tmp_path_factory.mktemp("models") / "pydoc")


@pytest.fixture(scope="session")
def address(served):
    """The address of a server."""
    for name in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    from served.api import make_app
    from support.serving.http_server import start_server

    server, thread, address = start_server(make_app(served))
    yield address
    server.should_exit = True
    thread.join()


@pytest.fixture
def client(address):
    """The API's own client."""
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture
def nothing_is_left(served):
    """Assert after a test that the engine is idle and every block is free."""
    yield
    end = time.monotonic() + 60
    while not served.engine.is_idle:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert int(jkv.num_free_blocks(served.engine.cache)) == 12
    jkv.check(served.engine.cache)


@pytest.fixture
def continued(served):
    """Function that continues prompts greedily with the engine."""

    def ask(prompt, **options):
        ids = served.tokenizer.encode(prompt).ids
        return served.engine.results(served.engine.submit(ids, **options))[0]

    return ask


@pytest.fixture
def post(address):
    """Function that posts bytes to the server and returns the status and the JSON."""

    def ask(body, path="/v1/completions", method="POST", **headers):
        request = urllib.request.Request(
            f"{address}{path}", data=body, method=method, headers=headers
        )
        try:
            with urllib.request.urlopen(request) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    return ask
