"""Streams end with an event and release their resources; logprobs are complete."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
from served.asking.body import ParsedBody
from served.asking.showing import Shown
from served.endpoints.continuing import _Stream
from served.mistakes import Refused
from served.replying import answers
from served.replying.replies import Reply
from served.responses.writing import ResponseReply

import jkv
from jkv import FinishReason
from jkv.serving import Completion, Event, Request

pytestmark = pytest.mark.one_end


class FakeReply:
    """A reply that raises in one of its methods, except `write_failure`."""

    is_scored = False

    def __init__(self, failing):
        self._failing = failing

    def write(self, name):
        if name == self._failing:
            raise RuntimeError("out of memory")
        return name

    def write_opening(self):
        return self.write("opening")

    def write_piece(self, *_):
        return self.write("piece")

    def write_closing(self):
        return self.write("closing")

    def write_failure(self, error):
        return json.dumps(error)


async def list_pieces(failing):
    event = Event(0, 0, [1], [0.0], "a", FinishReason.STOP)
    found = answers.list_events([(0, event)])
    return [piece async for piece in answers.stream(found, FakeReply(failing))]


@pytest.mark.parametrize("failing", ["opening", "piece", "closing"])
def test_a_stream_that_fails_ends_with_an_error(failing, caplog):
    assert asyncio.run(list_pieces(None)) == ["opening", "piece", "closing"]
    *_, last = asyncio.run(list_pieces(failing))
    error = json.loads(last)["error"]
    assert error["type"] == "server_error" and "RuntimeError" in error["message"]
    assert "out of memory" in caplog.text  # not sent to clients
    assert "out of memory" not in last


def test_an_exception_while_events_are_read_ends_them(caplog):
    """Otherwise a client would receive comments without end."""

    async def fail(_):
        raise RuntimeError("no events")
        yield

    engine = SimpleNamespace(aevents=fail, cancel=lambda _: None)

    async def read():
        return [
            e async for e in answers.read_events(SimpleNamespace(engine=engine), [0], 1)
        ]

    with pytest.raises(Refused, match="RuntimeError") as caught:
        asyncio.run(asyncio.wait_for(read(), 5))
    assert caught.value.status == 500 and "no events" in caplog.text


@pytest.mark.parametrize("ending", ["whole", "failure", "unsent head", "left"])
def test_a_stream_releases_its_resources_however_it_ends(ending):
    released, at_end = [], contextlib.ExitStack()
    at_end.callback(released.append, "variant")

    async def events():
        yield "a"
        if ending == "failure":
            raise RuntimeError("it failed")
        if ending == "left":
            await asyncio.sleep(60)

    async def receive():
        await asyncio.sleep(0.01 if ending == "left" else 60)
        return {"type": "http.disconnect"}

    async def send(_):
        if ending == "unsent head":
            raise OSError("the client has left")

    async def answer():
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        with contextlib.suppress(Exception, ExceptionGroup):
            await _Stream(events(), at_end)(scope, receive, send)

    asyncio.run(asyncio.wait_for(answer(), 5))
    assert released == ["variant"]


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids, **_):
        return bytes(ids).decode(errors="replace")


SERVED = SimpleNamespace(
    name="bytes",
    folder=".",
    tokenizer=Bytes(),
    tool_tags=("<t>", "</t>"),
    scorer=None,
    roll=None,
    spelling=SimpleNamespace(find_bytes=lambda token: bytes([token])),
)
CALL = '<t>{"name": "f", "arguments": {}}</t>'

# The pieces of a completion: their bytes and their text.
PIECES = {
    "a split character": [(b"\xc3", ""), (b"\xa9", "é")],
    "a last character cut off": [(b"a", "a"), (b"\xc3", "\ufffd")],
    "a possible stop string": [(b"a", ""), (b"b", "ab")],
    "a stop token": [(b"a", "a"), (b"!", "")],
    "only a stop token": [(b"!", "")],
    "a possible tag": [(b"<", "<"), (b"x", "x")],
    "a text and a call": [(b"a", "a"), *((c.encode(), c) for c in CALL)],
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("has_calls", [False, True])
@pytest.mark.parametrize("is_response", [False, True])
def test_streams_have_the_logprobs_of_whole_replies(
    name, has_calls, is_response, monkeypatch
):
    monkeypatch.setattr(ParsedBody, "warn", lambda *_: {})
    request = Request((), max_new_tokens=4, sampling=jkv.Sampling())
    tools = SimpleNamespace(language="calls", listed=[]) if has_calls else None
    parsed = ParsedBody([[65]], request, 1, tools, "calls")
    shown = Shown(1, None, 0, True)

    def begin():
        if is_response:
            return ResponseReply({"input": "A"}, SERVED, parsed, shown)
        return Reply(SERVED, parsed, shown, is_chat=True)

    tokens = [list(spelled) for spelled, _ in PIECES[name]]
    events = [
        Event(0, 0, ids, [-1.0 * i], text, FinishReason.RUNNING)
        for i, (ids, (_, text)) in enumerate(zip(tokens, PIECES[name], strict=True))
    ]
    events[-1] = events[-1]._replace(reason=FinishReason.STOP)
    text = "".join(event.text for event in events)
    logprobs = [event.logprobs[0] for event in events]
    completion = Completion(0, 0, sum(tokens, []), logprobs, FinishReason.STOP, text)
    whole = read_logprobs(begin().whole([completion], len(tokens)))
    assert [each["logprob"] for each in whole] == logprobs
    if "stop token" not in name:
        assert "".join(each["token"] for each in whole) == text

    reply, streamed = begin(), []
    for event in events:
        for piece in read_data(reply.write_piece(0, event)):
            streamed += read_logprobs(piece)
    assert [each["logprob"] for each in streamed] == logprobs
    assert "".join(each["token"] for each in streamed) == "".join(
        each["token"] for each in whole
    )
    if is_response:
        (*_, last) = read_data(reply.write_closing())
        assert read_logprobs(last["response"]) == streamed


def read_data(piece):
    """Parse the server-sent events of a piece."""
    lines = [line for line in piece.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def read_logprobs(found):
    """Return the logprobs of a reply, or of a streamed event of its text."""
    if "choices" in found:
        return found["choices"][0]["logprobs"]["content"]
    if "output" in found:
        messages = [each for each in found["output"] if each["type"] == "message"]
        return messages[0]["content"][0]["logprobs"]
    is_delta = found["type"] == "response.output_text.delta"
    return found["logprobs"] if is_delta else []
