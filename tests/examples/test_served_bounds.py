"""An exposed server: slow, endless and unauthenticated requests."""

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import threading
import time
from types import SimpleNamespace

import openai
import pytest
from served import running
from served.api import make_app
from served.asking import prompts
from served.endpoints.connections import Bounds, make_config
from support.serving.http_server import start_server

from jkv.serving import EngineError

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]

QUICK = Bounds(
    head_seconds=1.0,
    head_bytes=4096,
    body_seconds=1.5,
    reading_seconds=1.0,
    closing_seconds=2,
)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
HALF = HEAD + b"Content-Length: 99\r\n\r\n{"


@pytest.fixture
def serving(served):
    """Function that starts servers of one engine, which stop with the test."""
    with contextlib.ExitStack() as stack:

        def start(app=None, bounds=QUICK, **options):
            app = app or make_app(served, bounds=bounds, **options)
            server, thread, address = start_server(app, bounds)
            stack.callback(thread.join, timeout=20)
            stack.callback(setattr, server, "should_exit", True)
            return server, thread, address

        yield start
    served.engine.start()  # a stopped server stops its thread


@contextlib.contextmanager
def connected(address, sent):
    """Open a connection and send bytes."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(sent)
        yield connection


def read_to_end(connection):
    """Return the bytes received until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(2**16):
            found += part
    return found


@pytest.mark.parametrize(
    "sent, expected",
    [
        (b"", b""),  # nothing
        (HEAD, b""),  # part of a head
        (HALF, b"408"),  # part of a body
        (HEAD + b"X: " + b"a" * 5000 + b"\r\n", b"400"),  # an endless header
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n", b"408"),
    ],
)
def test_slow_requests_time_out(serving, sent, expected):
    _, _, address = serving()
    with connected(address, sent) as connection:
        start = time.monotonic()
        assert expected in read_to_end(connection)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "sent, words",
    [
        (b"nothing of the kind\r\n\r\n", "Invalid HTTP request"),
        (HEAD + b"Content-Length: two\r\n\r\n", "Invalid HTTP request"),
        (b"GET / HTTP/1.1\r\n\r\n", "Invalid HTTP request"),  # no Host
        (HEAD + b"X: " + b"a" * 20_000 + b"\r\n\r\n", "the head has more"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", "the head has"),
    ],
)
def test_malformed_requests_are_answered_in_json(serving, sent, words):
    """A head may be too long in any number of packets."""
    _, _, address = serving()
    with connected(address, sent) as connection:
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(words)


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere", "/health"])
def test_an_endless_upload_is_closed(serving, path):
    """A fast upload is closed by its size, after the response was sent."""
    _, _, address = serving()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(address, head.encode()) as connection:
        start, num_sent = time.monotonic(), 0
        chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            while num_sent < 2**30:
                connection.sendall(chunk)
                num_sent += len(chunk)
        assert num_sent < 2**25 and time.monotonic() - start < 10


def test_a_slow_upload_ends_after_its_answer(serving):
    """The time is limited, although the connection is never idle."""
    _, _, address = serving()
    head = b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n"
    with connected(address, head) as connection:
        assert b"404" in connection.recv(2**16)
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - start < 20:
                connection.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() - start < 5


def test_a_client_that_does_not_read_is_dropped(serving):
    async def tell_much(_, __, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            part = {"type": "http.response.body", "body": b"a" * 2**20}
            await send(part | {"more_body": True})

    server, _, address = serving(tell_much)
    with connected(address, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"):
        while not server.server_state.connections:
            time.sleep(0.01)
        start = time.monotonic()
        while server.server_state.connections:
            assert time.monotonic() - start < 10
            time.sleep(0.01)
        assert time.monotonic() - start > 0.9


def test_sigterm_stops_the_server_with_300_partial_requests(served, serving):
    patient = QUICK._replace(head_seconds=60, body_seconds=60)
    server, thread, address = serving(bounds=patient)
    with contextlib.ExitStack() as stack:
        for i in range(300):
            stack.enter_context(connected(address, (HALF, HEAD)[i % 2]))
        # One complete request, which is answered before the shutdown.
        body = b'{"prompt": "The", "max_tokens": 20}'
        whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        last = stack.enter_context(connected(address, whole))
        while not served.engine.stats().running + served.engine.stats().waiting:
            time.sleep(0.001)
        assert len(server.server_state.connections) == 301
        start = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)  # the signal's handler
        assert b"200 OK" in read_to_end(last)
        thread.join(timeout=20)
        assert not thread.is_alive() and time.monotonic() - start < 5


def test_shutdown_ends_slow_replies(serving, monkeypatch):
    async def wait_for_ever(*_):
        await asyncio.sleep(1000)

    monkeypatch.setattr("served.endpoints.continuing.reply_whole", wait_for_ever)
    server, thread, address = serving(bounds=QUICK._replace(closing_seconds=1))
    body = b'{"prompt": "The", "max_tokens": 2}'
    sent = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connected(address, sent) as connection:
        time.sleep(0.3)
        server.handle_exit(signal.SIGTERM, None)
        assert b"the server is shutting down" in read_to_end(connection)
    thread.join(timeout=20)
    assert not thread.is_alive()


def test_long_prompts_do_not_delay_others(post, monkeypatch):
    """Prompts are refused by length; tokenization runs in another thread."""
    start = time.monotonic()
    for _ in range(5):
        status, reply = post(json.dumps({"prompt": "a b " * 250_000}).encode())
        assert status == 400 and "1000000 characters" in reply["error"]["message"]
    assert time.monotonic() - start < 2
    encode = prompts._encode

    def take_long(*arguments, **options):
        time.sleep(1.0)
        return encode(*arguments, **options)

    monkeypatch.setattr(prompts, "_encode", take_long)
    ask = threading.Thread(target=post, args=[b'{"prompt": "a", "max_tokens": 1}'])
    ask.start()
    time.sleep(0.1)
    start = time.monotonic()
    assert post(None, "/health", "GET")[0] == 200
    assert time.monotonic() - start < 0.5 and ask.is_alive()
    ask.join()


def test_without_the_key_only_health_is_served(serving):
    _, _, address = serving(api_key="secret")
    for key in ("none", "secre", "secret2"):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            client.models.list()
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0)
    assert client.models.list().data[0].id == "pydoc"
    host, port = address.removeprefix("http://").split(":")
    for name, value in (
        ("Authorization", "bearer secret"),
        ("authorization", "BEARER secret"),
        ("x-api-key", "secret"),
    ):
        connection = http.client.HTTPConnection(
            *address.removeprefix("http://").split(":")
        )
        connection.request("GET", "/metrics", headers={name: value})
        assert connection.getresponse().status == 200
        connection.close()
    for path, status in [("/health", 200), ("/metrics", 401), ("/nowhere", 401)]:
        connection = http.client.HTTPConnection(host, int(port))
        connection.request("GET", path)
        assert connection.getresponse().status == status
        connection.close()


def test_a_failed_engine_returns_errors(served, serving, monkeypatch):
    def fail(*_, **__):
        raise EngineError("the engine has failed")

    _, _, address = serving()
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    assert client.get("/../health", cast_to=object) == {"status": "ok"}
    monkeypatch.setattr(served.engine, "submit", fail)
    with pytest.raises(openai.InternalServerError, match="has failed") as caught:
        client.completions.create(model="pydoc", prompt="a")
    assert (caught.value.status_code, caught.value.code) == (503, "engine_failed")
    with pytest.raises(openai.InternalServerError, match="has failed"):
        client.get("/../health", cast_to=object)


def test_a_failed_engine_stops_the_server(served):
    """Instead of refusing every request; a supervisor can restart it."""
    engine = SimpleNamespace(has_failed=False)
    server = running.Server(make_config(make_app(served)), engine)
    assert not asyncio.run(server.on_tick(1))
    engine.has_failed = True
    assert asyncio.run(server.on_tick(2))
