"""`serve_http.py --roll`: completions longer than the context, and dropped tokens."""

import json
import urllib.request

import pytest

import jkv

pytestmark = pytest.mark.one_end
SIZES = "--context 32 --max-running 2 --rows 8 --scan-layers --roll 16"


@pytest.fixture(scope="module")
def rolling(tmp_path_factory):
    for name in ("tokenizers", "starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    from served.api import make_app
    from support.serving.http_server import load_served, start_server

    served = load_served(tmp_path_factory.mktemp("models") / "pydoc", SIZES)
    server, thread, address = start_server(make_app(served))
    yield served, address
    server.should_exit = True
    thread.join()


def complete(address, prompt, num_new):
    body = {"prompt": prompt, "max_tokens": num_new, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


@pytest.mark.further
def test_a_completion_exceeds_the_context(rolling):
    served, address = rolling
    prompt = "The with statement"
    whole = complete(address, prompt, 60)
    usage = whole["usage"]
    assert whole["choices"][0]["finish_reason"] == "length"
    assert usage["completion_tokens"] == 60
    excess = usage["total_tokens"] - 1 - 32
    assert usage["dropped_tokens"] == -(-excess // 16) * 16 > 0
    # A prompt longer than the context rolls in the same way.
    ids = served.tokenizer.encode(prompt).ids
    (first,) = served.engine.generate([ids], max_new_tokens=40)
    (rest,) = served.engine.generate([ids + list(first.tokens)], max_new_tokens=20)
    text = served.tokenizer.decode([*first.tokens, *rest.tokens])
    assert text == whole["choices"][0]["text"]
    short = complete(address, prompt, 4)["usage"]
    assert short["dropped_tokens"] == 0
    jkv.check(served.engine.cache)
