"""`serve_http.py` with the OpenAI client: concurrency, lost clients, errors."""

import argparse
import asyncio
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest
import uvicorn
from served import loading, renewing
from support.paths import EXAMPLES

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]


def test_completions_with_the_openai_client(client, continued):
    options = dict(model="pydoc", max_tokens=12, temperature=0)
    whole = client.completions.create(prompt=["The with", "Every"], **options)
    expected = [continued(p, max_new_tokens=12) for p in ("The with", "Every")]
    assert [choice.text for choice in whole.choices] == [e.text for e in expected]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert {choice.finish_reason for choice in whole.choices} <= {"length", "stop"}
    count = sum(len(each.tokens) for each in expected)
    assert whole.usage.completion_tokens == count and whole.usage.prompt_tokens > 2

    pieces = client.completions.create(
        prompt="The with",
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    pieces = list(pieces)
    assert "".join(p.choices[0].text for p in pieces[:-1]) == expected[0].text
    reasons = [piece.choices[0].finish_reason for piece in pieces[:-1]]
    assert reasons[-1] and not any(reasons[:-1])
    assert pieces[-1].usage.completion_tokens == len(expected[0].tokens)

    stop = expected[0].text[3:6]
    stopped = client.completions.create(prompt="The with", stop=stop, **options)
    assert stopped.choices[0].text == expected[0].text.partition(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"
    several = client.completions.create(
        model="pydoc", prompt="The", n=3, max_tokens=8, temperature=1.2, seed=5
    )
    again = client.completions.create(
        model="pydoc", prompt="The", n=3, max_tokens=8, temperature=1.2, seed=5
    )
    texts = [choice.text for choice in several.choices]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) > 1
    assert client.models.list().data[0].id == "pydoc"


def test_chats_with_the_openai_client(client, continued):
    options = dict(model="pydoc", max_completion_tokens=9, temperature=0)
    messages = [
        {"role": "system", "content": "The "},
        {"role": "user", "content": [{"type": "text", "text": "with"}]},
    ]
    whole = client.chat.completions.create(messages=messages, **options)
    expected = continued("The with", max_new_tokens=9).text
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].message.role == "assistant"
    pieces = client.chat.completions.create(messages=messages, stream=True, **options)
    assert "".join(p.choices[0].delta.content for p in pieces) == expected


def test_sixty_concurrent_clients_some_of_which_disconnect(served, address, continued):
    """Each gets its solo completion; disconnecting clients change nothing."""
    prompts = [f"The {i % 7} import" for i in range(60)]

    async def ask(client, i):
        options = dict(model="pydoc", max_tokens=4 + i % 9, temperature=0)
        if i % 3 == 0:
            reply = await client.completions.create(prompt=prompts[i], **options)
            return reply.choices[0].text
        text = ""
        pieces = await client.completions.create(
            prompt=prompts[i], stream=True, **options
        )
        async for piece in pieces:
            text += piece.choices[0].text
            if i % 3 == 1:
                await pieces.close()  # disconnects while streaming
                return None
        return text

    async def leave(client, i):
        """Disconnect while waiting for the whole response."""
        options = dict(model="pydoc", max_tokens=24, temperature=0)
        task = asyncio.ensure_future(
            client.completions.create(prompt=prompts[i], **options)
        )
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def main():
        options = dict(base_url=f"{address}/v1", api_key="none", max_retries=0)
        async with openai.AsyncOpenAI(**options) as client:
            asking = [ask(client, i) for i in range(60)]
            return await asyncio.gather(*asking, *(leave(client, i) for i in range(8)))

    found = asyncio.run(main())[:60]
    decode = served.tokenizer.decode
    alone = {p: continued(p, max_new_tokens=12) for p in set(prompts)}
    assert all(each.text == decode(each.tokens) for each in alone.values())
    for i in range(60):
        if i % 3 != 1:
            # Greedy, so that a shorter completion is a prefix of a longer one.
            assert found[i] == decode(alone[prompts[i]].tokens[: 4 + i % 9]), i
    assert served.engine.stats().cancelled > 0


def test_oversized_and_malformed_requests_are_refused(served, address, client, post):
    before = served.engine.stats().finished
    for body, status, words in [
        (b"", 400, "Expecting value"),
        (b"\xff\xfe{", 400, ""),
        (b"[" * 100_000, 400, ""),
        (b"[1]", 400, "must be an object"),
        (b"{}", 400, "prompt must be a string"),
        (b'{"prompt": ["", 5]}', 400, "only lists of integer token ids"),
        (b'{"prompt": [1, -5]}', 400, "numbered from 0"),
        (b'{"prompt": [99999999]}', 400, "the model has"),
        (b'{"prompt": [123456789012345678901]}', 400, "numbered from 0"),
        (b'{"prompt": "a", "n": 99}', 400, "n must be from 1 to 16"),
        (b'{"prompt": "a", "n": true}', 400, "n must be a number"),
        (b'{"prompt": "a", "temperature": "hot"}', 400, "temperature must be"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature must be"),
        (b'{"prompt": "a", "max_tokens": 0}', 400, "from 1 to"),
        (b'{"prompt": "a", "stop": [""]}', 400, "stop must be"),
        (b'{"prompt": "a", "seed": 1.5}', 400, "seed must be"),
        (json.dumps({"prompt": "a " * 200}).encode(), 400, "the context is 96"),
        (json.dumps({"prompt": ["a"] * 2049}).encode(), 400, "at most 2048 prompts"),
        (b'{"prompt": "' + b"a" * 2**20 + b'"}', 413, "more than 1048576 bytes"),
    ]:
        found = post(body)
        assert found[0] == status, body[:60]
        assert words in found[1]["error"]["message"], found
    chat = "/v1/chat/completions"
    for body, words in [
        (b'{"messages": []}', "list of at least one message"),
        (b'{"messages": [3]}', "role and content"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "content must be"),
        # The error does not reveal the model's path.
        (
            b'{"messages": [{"role": "alien", "content": "a"}]}',
            "the chat template of the model: unknown role",
        ),
    ]:
        status, answer = post(body, chat)
        assert status == 400 and words in answer["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="which leaves 96") as caught:
        client.completions.create(model="pydoc", prompt="a", max_tokens=97)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="pydoc", input="a")
    assert served.engine.stats().finished == before
    # A client disconnects within a request.
    host, port = address.removeprefix("http://").split(":")
    for sent in (
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{",
        b"\0",
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
    reply = client.completions.create(model="pydoc", prompt="The", max_tokens=2)
    assert reply.usage.completion_tokens == 2


def test_a_full_queue_returns_retry_after(post, address):
    """Requests that can never fit are refused permanently, others temporarily."""
    body = json.dumps({"prompt": ["The"] * 32, "n": 4, "max_tokens": 8}).encode()
    status, answer = post(body)
    assert status == 400 and "limit of 100 waiting" in answer["error"]["message"]
    body = json.dumps({"prompt": ["The"] * 32, "n": 3, "max_tokens": 8}).encode()
    statuses, seconds = [], []

    def ask():
        request = urllib.request.Request(f"{address}/v1/completions", data=body)
        try:
            with urllib.request.urlopen(request) as reply:
                statuses.append(reply.status)
        except urllib.error.HTTPError as error:
            with error:
                statuses.append(error.code)
                seconds.append(int(error.headers["Retry-After"]))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 429 in statuses and set(statuses) <= {200, 429}
    assert (
        len(seconds) == statuses.count(429) and 1 <= min(seconds) <= max(seconds) <= 60
    )


def test_prometheus_metrics_are_served(served, address):
    with urllib.request.urlopen(f"{address}/metrics") as reply:
        text = reply.read().decode()
    count = served.engine.stats().generated_tokens
    assert f"jkv_generated_tokens_total {float(count)}" in text


def test_the_script_forwards_its_options(served, monkeypatch, capsys):
    passed = {}

    def load(_, **changes):
        passed.update(changes)
        return served

    def run(server):
        passed.update(host=server.config.host, port=server.config.port)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(renewing, "renew_on_signal", lambda *_: None)
    words = "--port 81 --shares alice=2 bob=0.5"
    monkeypatch.setattr(sys, "argv", ["serve_http.py", *words.split()])
    runpy.run_path(str(EXAMPLES / "serve_http.py"), run_name="__main__")
    expected = dict(host="127.0.0.1", port=81, max_waiting=256, max_grammars=8)
    expected |= dict(max_rules=0, tool_tags=("<tool_call>", "</tool_call>"))
    expected |= dict(shares={"alice": 2.0, "bob": 0.5}, checks=False)
    assert passed == expected
    assert "3 programs are ready" in capsys.readouterr().out


def test_a_signal_reloads_the_weights(served, client, capsys):
    """While requests run; an invalid folder changes nothing."""
    before = signal.getsignal(signal.SIGUSR1)
    options = argparse.Namespace(model=served.folder, scan_layers=True)
    version = served.engine.stats().version
    fields = dict(model="pydoc", prompt="The with", max_tokens=8, temperature=0)
    text = client.completions.create(**fields).choices[0].text
    try:
        renewing.renew_on_signal(served, options)
        for folder, message in [
            (served.folder, f"the weights are of version {version + 1}"),
            (served.folder / "nowhere", "the weights are what they were"),
        ]:
            options.model, answer = folder, ""
            os.kill(os.getpid(), signal.SIGUSR1)
            end = time.monotonic() + 60
            while message not in answer:
                assert time.monotonic() < end, answer
                time.sleep(0.01)
                answer += "".join(capsys.readouterr())
        assert served.engine.stats().version == version + 1
        assert client.completions.create(**fields).choices[0].text == text
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_timed_out_request_is_truncated(client):
    fields = dict(model="pydoc", prompt="The with", max_tokens=60)
    fields["extra_body"] = {"ignore_eos": True, "timeout": 0.001}
    tries = openai.OpenAI(base_url=client.base_url, api_key="none")
    with pytest.raises(openai.InternalServerError, match="timeout") as caught:
        tries.completions.create(**fields)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline")
    with pytest.raises(openai.APIError, match="timeout"):
        list(client.completions.create(stream=True, **fields))
    fields["extra_body"] = {"timeout": 60.0}
    assert client.completions.create(**fields).choices[0].finish_reason
