"""Checks before the endpoints: request ids, origins, lengths, proxies."""

import functools
import http.client
import json
import socket
import threading
import time

import pytest
from served.api import make_app
from served.replying import answers
from support.serving.http_server import start_server

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]

BODY = json.dumps({"prompt": "The with", "max_tokens": 12, "stream": True}).encode()


@pytest.fixture
def ask(address):
    """Function that sends a request and returns status, headers and body."""
    host, port = address.removeprefix("http://").split(":")

    def send(method="GET", path="/health", body=None, port=port, **headers):
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        reply = connection.getresponse()
        found = reply.status, dict(reply.getheaders()), reply.read()
        connection.close()
        return found

    return send


def test_every_response_has_a_request_id(ask):
    own = [ask()[1]["x-request-id"] for _ in range(2)]
    assert len({*own}) == 2 and all(len(name) == 32 for name in own)
    assert ask(x_request_id="mine-1")[1]["x-request-id"] == "mine-1"
    for path in ("/nothing", "/v1/completions"):
        assert ask(path=path, x_request_id="mine-2")[1]["x-request-id"] == "mine-2"
    for odd in ("", "a" * 129, "a b", "é"):
        assert ask(x_request_id=odd)[1]["x-request-id"] != odd


def test_a_stream_passes_proxies(ask):
    status, headers, body = ask("POST", "/v1/completions", BODY)
    assert status == 200 and body.endswith(b"data: [DONE]\n\n")
    assert headers["x-accel-buffering"] == "no"
    assert headers["cache-control"] == "no-cache"


def test_silent_streams_send_comments(ask, monkeypatch, served):
    monkeypatch.setattr(answers, "SILENT_SECONDS", 0.05)
    submit, runner = served.engine.submit, served.engine._runner

    def submit_late(request):
        """Block the engine before submitting."""
        wait = functools.partial(runner.exclusively, lambda: time.sleep(0.5))
        threading.Thread(target=wait).start()
        time.sleep(0.05)
        return submit(request)

    monkeypatch.setattr(served.engine, "submit", submit_late)
    _, _, body = ask("POST", "/v1/completions", BODY)
    pieces = [piece for piece in body.split(b"\n\n") if piece]
    assert pieces[0] == b": nothing yet"
    assert all(piece.startswith((b": nothing yet", b"data: ")) for piece in pieces)
    texts = [json.loads(p[6:]) for p in pieces if p.startswith(b"data: {")]
    assert texts[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/v1/completions/", "/health/", "/v1/models//"])
def test_no_redirect_to_a_client_host(ask, path):
    status, headers, _ = ask(path=path, Host="evil.example")
    assert status in (404, 405) and "location" not in headers


def test_a_body_of_two_lengths_is_refused(address):
    host, port = address.removeprefix("http://").split(":")
    sent = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
    sent += b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(sent + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        received = b""
        while part := connection.recv(4096):  # until it is closed
            received += part
    assert received.startswith(b"HTTP/1.1 400") and b"not both" in received
    assert received.count(b"HTTP/1.1") == 1


def test_allowed_origins_pass_cors(served, ask):
    preflight = {
        "Origin": "https://a.org",
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization, content-type",
    }
    path = "/v1/chat/completions"
    status, headers, _ = ask("OPTIONS", path, **preflight)
    assert "access-control-allow-origin" not in headers
    app = make_app(served, api_key="secret", allowed_origins=["https://a.org"])
    app.router.lifespan_context = _nothing
    server, thread, address = start_server(app)
    try:
        port = address.rpartition(":")[2]
        status, headers, _ = ask("OPTIONS", path, port=port, **preflight)
        assert status == 200
        assert headers["access-control-allow-origin"] == "https://a.org"
        assert "POST" in headers["access-control-allow-methods"]
        preflight["Origin"] = "https://b.org"
        status, headers, _ = ask("OPTIONS", path, port=port, **preflight)
        assert status == 400 and "access-control-allow-origin" not in headers
        # Refusals are readable across origins, too.
        status, headers, _ = ask(path="/v1/models", port=port, Origin="https://a.org")
        assert status == 401
        assert headers["access-control-allow-origin"] == "https://a.org"
    finally:
        server.should_exit = True
        thread.join()


class _nothing:
    """A lifespan that does nothing, as the engine is already running."""

    def __init__(self, _):
        pass

    async def __aenter__(self):
        return None

    async def __aexit__(self, *_):
        return None
