"""The servers on two processes: equal completions, and a restart with open requests."""

import json
import os
import re
import signal
import threading
import time
import urllib.request

import pytest
from support.paths import EXAMPLES
from support.serving.processes import SECONDS, find_port, start

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.further

SIZES = "--context 64 --max-running 4 --max-new-tokens 24 --blocks 12 --rows 8"
SIZES = [*SIZES.split(), "--scan-layers"]
PAIR = ["--processes", "2", "--devices", "1", "--heartbeat", "10"]
PROMPTS = ["The with statement", "Every class", "For a list", "import os"]
STREAM = dict(stream=True)


def write_prompts(path):
    fields = [{"prompt": each, "max_tokens": 20} for each in PROMPTS * 2]
    fields[1] |= {"n": 2, "temperature": 0.7}
    path.write_text("\n".join(map(json.dumps, fields)))
    return path


def run_batch(prompts, results, *options, death=None):
    """Run `serve_batch.py`; kill a process by its number after the first result."""
    script = EXAMPLES / "serve_batch.py"
    process = start(script, prompts, results, *SIZES, *options)
    watch = threading.Timer(SECONDS, process.kill)
    watch.start()
    lines, pids = [], []
    done = threading.Event()

    def kill():
        while not done.wait(0.05):
            if results.exists() and b"\n" in results.read_bytes() and len(pids) == 2:
                os.kill(pids[death], signal.SIGKILL)
                return

    if death is not None:
        threading.Thread(target=kill).start()
    for line in process.stdout:
        lines.append(line.rstrip())
        if found := re.search(r"process \d has pid (\d+)", line):
            pids.append(int(found[1]))
    process.stdout.close()
    watch.cancel()
    done.set()
    assert process.wait() == 0, lines
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(found) == len({each["line"] for each in found}) == 2 * len(PROMPTS)
    texts = {e["line"]: [c["text"] for c in e["choices"]] for e in found}
    return lines, texts


@pytest.mark.parametrize("death", [0, 1])
def test_a_batch_continues_after_a_process_died(death, tmp_path):
    """Including open requests; no line is lost or repeated."""
    prompts = write_prompts(tmp_path / "prompts")
    options = [*PAIR, "--restarts=1", "--logs", tmp_path / "logs"]
    lines, texts = run_batch(prompts, tmp_path / "pair", *options, death=death)
    assert "launcher: starting again, 1 of 1" in lines
    assert texts == run_batch(prompts, tmp_path / "alone")[1]


def wait_for(address):
    """Wait until the server responds."""
    for _ in range(200):
        try:
            with urllib.request.urlopen(address):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"nothing at {address}")


def serve_requests(options):
    """Start `serve_http.py`, send requests with OpenAI's client, stop it by SIGTERM."""
    openai = pytest.importorskip("openai")
    port = find_port()
    process = start(EXAMPLES / "serve_http.py", *SIZES, "--port", port, *options)
    watch = threading.Timer(SECONDS, process.kill)
    watch.start()
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if "programs are ready" in line:
                break
        address = f"http://127.0.0.1:{port}"
        wait_for(f"{address}/health")
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        (model,) = client.models.list()
        fields = dict(model=model.id, max_tokens=16, temperature=0)
        found = [
            client.completions.create(prompt=each, **fields).choices[0].text
            for each in PROMPTS
        ]
        stream = client.completions.create(prompt=PROMPTS[0], stream=True, **fields)
        found.append("".join(each.choices[0].text for each in stream))
        several = client.completions.create(
            prompt=PROMPTS[1],
            n=2,
            seed=3,
            stop=["e"],
            **fields | {"temperature": 0.8},
        )
        found += [each.text for each in several.choices]
        processor = client.completions.create(
            prompt=PROMPTS[2],
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
            **fields,
        )
        assert processor.choices[0].text in ("yes", "no")
        found.append(processor.choices[0].text)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(prompt=PROMPTS[0], presence_penalty=1.0, **fields)
        return found
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        watch.cancel()
        pids = re.findall(r"has pid (\d+)", "".join(lines) + output)
        assert len(pids) == (2 if options else 0), lines
        for pid in map(int, pids):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_responses_equal_those_of_one_process(tmp_path):
    pair = serve_requests([*PAIR, "--logs", str(tmp_path)])
    assert pair == serve_requests([])


@pytest.mark.parametrize("death", [0, 1])
def test_a_client_is_served_after_a_process_died(death, tmp_path):
    """The client retries; a stream ends with an error, and no request is refused."""
    openai = pytest.importorskip("openai")
    port = find_port()
    options = [*PAIR, "--restarts=1", "--logs", tmp_path, "--port", port]
    process = start(EXAMPLES / "serve_http.py", *SIZES, *options)
    watch = threading.Timer(SECONDS, process.kill)
    watch.start()
    lines, pids, found = [], [], {}

    def read():
        for line in process.stdout:
            lines.append(line.rstrip())
            if started := re.search(r"process \d has pid (\d+)", line):
                pids.append(int(started[1]))

    def ask(name, **changes):
        fields = dict(model="pydoc", max_tokens=20, temperature=0) | changes
        try:
            reply = client.completions.create(prompt=PROMPTS[0], **fields)
            pieces = reply if "stream" in changes else [reply]
            found[name] = "".join(each.choices[0].text for each in pieces)
        except Exception as error:
            found[name] = error

    reader = threading.Thread(target=read)
    reader.start()
    address = f"http://127.0.0.1:{port}"
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    try:
        wait_for(f"{address}/health")
        ask("before")
        # Requests that run until the death, and a client that comes after it.
        long = dict(n=2, extra_body={"ignore_eos": True})
        asking = [
            threading.Thread(target=ask, args=[f"whole {i}"], kwargs=long)
            for i in range(12)
        ]
        asking.append(threading.Thread(target=ask, args=["stream"], kwargs=STREAM))
        for each in asking:
            each.start()
        time.sleep(0.2)
        os.kill(pids[death], signal.SIGKILL)
        ask("after")
        for each in asking:
            each.join()
        assert "launcher: starting again, 1 of 1" in lines
        wholes = {found[f"whole {i}"] for i in range(12)}
        assert len(wholes) == 1 and isinstance(found["after"], str), found
        assert found["after"] == found["before"]
        assert found["stream"] == found["before"] or not isinstance(
            found["stream"], str
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        reader.join()
        process.stdout.close()
        watch.cancel()
    assert len(pids) == 4
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
