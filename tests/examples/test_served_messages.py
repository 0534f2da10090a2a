"""`/v1/messages`, Anthropic's chat API: texts, tools, streams and token counts."""

import json
import urllib.request

import pytest
from served.asking.prompts import read_chat
from served.messages.reading import read_message_body

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]

PATH = "/v1/messages"
CLOCK = {
    "name": "clock",
    "description": "Tells the time.",
    "input_schema": {
        "type": "object",
        "properties": {"zone": {"enum": ["a", "b"]}},
        "required": ["zone"],
    },
}
BODY = {
    "model": "pydoc",
    "max_tokens": 8,
    "temperature": 0,
    "messages": [{"role": "user", "content": "The with"}],
}


@pytest.fixture
def say(post):
    """Function that posts a body to the server."""

    def ask(path=PATH, **fields):
        return post(json.dumps({**BODY, **fields}).encode(), path)

    return ask


@pytest.fixture
def stream(address):
    """Function that returns the events of a stream."""

    def ask(**fields):
        body = json.dumps({**BODY, **fields, "stream": True}).encode()
        with urllib.request.urlopen(f"{address}{PATH}", data=body) as reply:
            parts = reply.read().decode().strip().split("\n\n")
        events = []
        for part in parts:
            kind, data = part.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert kind == f"event: {events[-1]['type']}"
        return events

    return ask


def test_a_text_equals_the_chat_completion(say, continued):
    expected = continued("The with", max_new_tokens=8)
    status, reply = say()
    assert status == 200
    assert reply["content"] == [{"type": "text", "text": expected.text}]
    reported = {"type": "message", "role": "assistant", "model": "pydoc"}
    reported |= {"stop_reason": "max_tokens", "stop_sequence": None}
    assert {name: reply[name] for name in reported} == reported
    usage = reply["usage"]
    assert usage["output_tokens"] == 8
    count = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert say(f"{PATH}/count_tokens") == (200, {"input_tokens": count})


def test_message_streams_equal_whole_messages(say, stream):
    _, whole = say(max_tokens=40)
    events = stream(max_tokens=40)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_delta") > 1
    parts = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(parts) == whole["content"][0]["text"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]
    delta = events[-2]
    assert delta["delta"]["stop_reason"] == whole["stop_reason"]
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "clock"}])
def test_tool_calls_are_content_blocks(say, stream, choice):
    single = {**choice, "disable_parallel_tool_use": True}
    fields = dict(max_tokens=60, tools=[CLOCK], tool_choice=single)
    status, whole = say(**fields)
    assert status == 200, whole
    (call,) = whole["content"]
    assert call["type"] == "tool_use" and call["name"] == "clock"
    assert call["input"]["zone"] in ("a", "b") and whole["stop_reason"] == "tool_use"
    events = stream(**fields)
    begun = [e for e in events if e["type"] == "content_block_start"]
    assert begun[0]["content_block"]["input"] == {}
    parts = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert {part["type"] for part in parts} == {"input_json_delta"}
    given = json.loads("".join(part["partial_json"] for part in parts))
    assert given == call["input"]
    # The call and its result are accepted as input.
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "noon"}
    history = [
        *BODY["messages"],
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    status, again = say(messages=history, tools=[CLOCK])
    assert status == 200 and again["content"]


def test_a_truncated_call_is_returned(say):
    fields = dict(tools=[CLOCK], tool_choice={"type": "any"})
    for most in range(6, 30, 4):
        status, reply = say(max_tokens=most, **fields)
        assert status == 200 and reply["content"]
        assert reply["stop_reason"] == "max_tokens"


def test_a_stop_sequence_is_reported(say, continued, stream):
    text = continued("The with", max_new_tokens=8).text
    stop = text[4:7]
    status, reply = say(stop_sequences=["never", stop])
    assert status == 200 and reply["content"][0]["text"] == text.partition(stop)[0]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)
    delta = stream(stop_sequences=["never", stop])[-2]["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_the_context_limits_a_message(say):
    """Every client sends `max_tokens`, often far above the context."""
    status, reply = say(max_tokens=32_000)
    assert status == 200, reply
    assert reply["stop_reason"] in ("model_context_window_exceeded", "end_turn")
    long = [{"role": "user", "content": "The " * 300}]
    status, reply = say(messages=long)
    assert status == 400 and reply["error"]["type"] == "invalid_request_error"
    assert "the context is 96" in reply["error"]["message"]
    status, reply = say(f"{PATH}/count_tokens", messages=long)
    assert status == 200 and reply["input_tokens"] > 96


def test_cached_tokens_are_reported_separately(say):
    body = dict(messages=[{"role": "user", "content": "Cached: " * 10}], max_tokens=1)
    first, second = (say(**body)[1]["usage"] for _ in range(2))
    total = first["input_tokens"] + first["cache_read_input_tokens"]
    assert second["cache_read_input_tokens"] >= 16
    assert second["input_tokens"] + second["cache_read_input_tokens"] == total


def test_blocks_become_messages(served):
    body = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1;"},
            {
                "type": "text",
                "text": "Be brief.",
                "cache_control": {"type": "ephemeral"},
            },
            {"type": "text", "text": "Be kind."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"p": 1}},
                    {"type": "tool_use", "id": "2", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "c"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "d"}],
                    },
                    {"type": "text", "text": "e"},
                ],
            },
        ],
    }
    messages = read_message_body(body)["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief.\nBe kind."}
    roles = [message["role"] for message in messages[1:]]
    assert roles == ["user", "assistant", "tool", "tool", "user"]
    reply = messages[2]
    assert reply["content"] == "b" and reply["reasoning_content"] == "hm"
    calls = [call["function"]["arguments"] for call in reply["tool_calls"]]
    assert calls == ['{"p": 1}', "{}"]
    assert [message["content"] for message in messages[3:]] == ["c", "d", "e"]
    assert read_chat(served, read_message_body(body))


def test_message_fields_map_to_chat_fields():
    schema = {"type": "object", "properties": {}}
    body = {
        **BODY,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u" * 300},
        "output_config": {
            "effort": "low",
            "format": {"type": "json_schema", "schema": schema},
        },
        "tool_choice": {"type": "none"},
        "tools": [{**CLOCK, "cache_control": {"type": "ephemeral"}}],
    }
    fields = read_message_body(body)
    assert fields["chat_template_kwargs"] == {"enable_thinking": True}
    assert fields["reasoning_effort"] == "low" and len(fields["user"]) == 64
    assert fields["response_format"]["json_schema"] == {"schema": schema}
    assert fields["tool_choice"] == "none"
    assert fields["tools"][0]["function"]["parameters"] == CLOCK["input_schema"]


HOSTED = {"type": "web_search_20250305", "name": "web_search"}


def test_unsupported_tools_are_dropped_with_a_warning(say):
    status, reply = say(tools=[HOSTED, CLOCK], max_tokens=4)
    assert status == 200
    assert any("web_search_20250305" in reported for reported in reply["warnings"])


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens must be from 1"),
        ({"messages": []}, "a list of at least one message"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "user, assistant or system"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [3]}]}, "an object with a type"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "end with a user"),
        ({"system": 3}, "system must be a string"),
        ({"frobnicate": 1}, "not a field"),
        ({"container": "a"}, "container is not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"thinking": True}, "thinking must be an object"),
        ({"thinking": {"type": "enabled", "x": 1}}, "thinking.x is not supported"),
        ({"tools": "a"}, "tools must be a list"),
        ({"tools": [HOSTED], "tool_choice": {"type": "any"}}, "are not supported"),
        ({"tool_choice": "auto"}, "of type auto, any, tool or none"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "'x'"),
        ({"output_config": {"x": 1}}, "output_config.x is not supported"),
        ({"stop_sequences": [3]}, "stop must be"),
        ({"metadata": {"user_id": 3}}, "with a user_id"),
    ],
)
def test_errors_use_the_names_of_the_messages_api(say, fields, words):
    status, reply = say(**fields)
    assert status == 400 and reply["type"] == "error", reply
    assert reply["error"]["type"] == "invalid_request_error"
    assert words in reply["error"]["message"]


def test_another_model_is_not_found(say):
    status, reply = say(model="claude")
    assert status == 404 and reply["error"]["type"] == "not_found_error"


def test_a_failed_message_stream_ends_with_the_error(stream, served, monkeypatch):
    submit = served.engine.submit

    def submit_and_cancel(ask):
        number = submit(ask)
        served.engine.cancel(number)
        return number

    monkeypatch.setattr(served.engine, "submit", submit_and_cancel)
    last = stream()[-1]
    assert last["type"] == "error" and "shutting down" in last["error"]["message"]
