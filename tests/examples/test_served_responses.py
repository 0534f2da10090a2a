"""`/v1/responses` with the OpenAI client: texts, calls and streams, without storage."""

import json
import typing

import pydantic
import pytest
from openai.types.responses import response_create_params
from served.asking import fields
from served.asking.prompts import read_chat
from served.responses import reading
from served.responses.offered import read_custom_input, read_offered

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]

GREEDY = {"model": "pydoc", "temperature": 0}
CLOCK = {
    "type": "function",
    "name": "clock",
    "description": "Tells the time.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"zone": {"enum": ["a", "b"]}},
        "required": ["zone"],
    },
}


class Answer(pydantic.BaseModel):
    a: typing.Literal["x", "y"]


def test_responses_equal_chat_completions(client, continued):
    expected = continued("The with", max_new_tokens=8)
    request = [
        {"input": "The with"},
        {"input": [{"role": "user", "content": "with"}], "instructions": "The "},
        {
            "input": [
                {"role": "developer", "content": "The "},
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "with"}],
                },
            ]
        },
    ]
    for each in request:
        found = client.responses.create(max_output_tokens=8, **each, **GREEDY)
        assert found.output_text == expected.text
        assert found.status == "incomplete"
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.usage.output_tokens == 8
        assert found.usage.total_tokens == found.usage.input_tokens + 8
        assert (found.max_output_tokens, found.store) == (8, False)
    assert found.output[0].role == "assistant" and found.id.startswith("resp_")


def test_response_streams_equal_whole_responses(client):
    request = dict(input="The with", max_output_tokens=80, **GREEDY)
    whole = client.responses.create(**request)
    kinds, text = [], ""
    with client.responses.stream(**request) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
                assert event.snapshot == text
    assert text == whole.output_text
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert kinds.count("response.output_text.delta") > 1
    numbers = [
        event.sequence_number
        for event in client.responses.create(stream=True, **request)
    ]
    assert numbers == list(range(len(numbers)))


def test_the_openai_client_parses_answers_into_its_types(client):
    found = client.responses.parse(
        input="The with", max_output_tokens=24, text_format=Answer, model="pydoc"
    )
    assert isinstance(found.output_parsed, Answer) and found.status == "completed"
    found = client.responses.create(
        input="The with",
        max_output_tokens=6,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        **GREEDY,
    )
    reported = found.output[0].content[0].logprobs
    assert "".join(each.token for each in reported) == found.output_text
    assert [len(each.top_logprobs) for each in reported] == [2] * 6


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "clock"}])
def test_tool_calls_are_output_items(client, choice):
    request = dict(input="The with", tools=[CLOCK], tool_choice=choice, seed=1)
    request |= {"max_output_tokens": 60, "model": "pydoc", "parallel_tool_calls": False}
    seed = {"extra_body": {"seed": request.pop("seed")}}
    whole = client.responses.create(**request, **seed)
    (call,) = whole.output
    assert (call.type, call.name, call.status) == (
        "function_call",
        "clock",
        "completed",
    )
    assert json.loads(call.arguments)["zone"] in ("a", "b")
    events = list(client.responses.create(stream=True, **request, **seed))
    pieces = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(e.delta for e in pieces) == call.arguments
    assert events[-1].response.output[0].arguments == call.arguments
    # The call and its result are accepted as input.
    history = [
        {"role": "user", "content": "The with"},
        *[item.model_dump(exclude_none=True) for item in whole.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    again = client.responses.create(input=history, max_output_tokens=2, **GREEDY)
    assert again.output_text


def test_items_become_messages(served, tmp_path):
    """A call belongs to the previous message, reasoning to the next one."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
        call,
    ]
    chat = reading.read_response({"input": items})
    roles = [message["role"] for message in chat["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    reply = chat["messages"][1]
    assert [each["id"] for each in reply["tool_calls"]] == ["1", "2"]
    assert reply["reasoning_content"] == "hm"
    template = (
        "{% for m in messages %}{{ m.content or '' }}{{ m.reasoning_content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    other = served._replace(folder=tmp_path, longest_token=100)
    (tokens,) = read_chat(other, chat)
    assert served.tokenizer.decode(tokens) == "abhmffcf"


def test_every_field_of_the_openai_client_is_served_or_refused():
    params = response_create_params.ResponseCreateParamsBase
    names = set(typing.get_type_hints(params))
    assert names <= reading.SERVED | set(reading.REFUSED)
    assert not reading.SERVED & set(reading.REFUSED)
    # Fields that chats refuse are not forwarded to them.
    both = reading.SERVED & set(fields.REFUSED) - fields.SERVED_OF_CHATS
    assert not both, both


@pytest.mark.parametrize(
    "body, param, words",
    [
        ({}, "input", "a string or a list"),
        ({"input": [3]}, "input", "an object"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input", "not supported"),
        ({"input": [{"type": "hologram", "id": "1"}]}, "input", "'hologram' is not"),
        ({"input": [{"role": "user", "content": 3}]}, "input", "content must be"),
        ({"input": "a", "previous_response_id": "1"}, "previous_response_id", "stored"),
        ({"input": "a", "background": True}, "background", "stored"),
        ({"input": "a", "frobnicate": 1}, "frobnicate", "not a field"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "from 1"),
        (
            {
                "input": "a",
                "tools": [{"type": "web_search"}],
                "tool_choice": "required",
            },
            "tools",
            "'web_search' are not supported",
        ),
        (
            {"input": "a", "tools": [CLOCK], "tool_choice": {"type": "web_search"}},
            "tool_choice",
            "use functions and custom tools",
        ),
        ({"input": "a", "tools": [3]}, "tools", "an object with a type"),
        ({"input": "a", "reasoning": {"depth": 3}}, "reasoning", "reasoning.depth"),
        ({"input": "a", "text": {"style": "x"}}, "text", "text.style is not supported"),
        ({"input": "a", "text": {"verbosity": "x"}}, "text", "low, medium or high"),
        (
            {"input": "a", "text": {"format": {"type": "json_object", "schema": {}}}},
            "text",
            "schema is not supported",
        ),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text", "json_schema"),
        ({"input": "a", "include": ["file_search"]}, "include", "include must list"),
        ({"input": "a", "instructions": 1}, "instructions", "must be a string"),
    ],
)
def test_unsupported_response_fields_are_refused_by_name(post, body, param, words):
    status, reply = post(json.dumps(body).encode(), "/v1/responses")
    assert status == 400 and reply["error"]["param"] == param, reply
    assert words in reply["error"]["message"]


def test_neutral_response_fields_are_accepted(client, continued):
    found = client.responses.create(
        input="The with",
        max_output_tokens=4,
        background=False,
        truncation="disabled",
        store=True,
        metadata={"a": "b"},
        reasoning={"effort": "low"},
        include=["reasoning.encrypted_content"],
        text={"verbosity": "medium"},
        **GREEDY,
    )
    assert found.output_text == continued("The with", max_new_tokens=4).text
    assert found.metadata == {"a": "b"}


def test_reported_values_are_the_used_ones(post):
    body = {"input": "The", "top_p": None, "max_output_tokens": 4}
    body |= {"tools": [{"type": "web_search"}, CLOCK], "truncation": "auto"}
    status, reply = post(json.dumps(body).encode(), "/v1/responses")
    assert status == 200, reply
    used = {"temperature": 1.0, "top_p": 1.0, "max_output_tokens": 4, "tools": [CLOCK]}
    used |= {"truncation": "disabled", "store": False, "tool_choice": "auto"}
    assert {name: reply[name] for name in used} == used
    assert any("web_search" in each for each in reply["warnings"])
    body = {"input": "The", "temperature": 0, "text": {"verbosity": "low"}}
    status, reply = post(json.dumps(body).encode(), "/v1/responses")
    assert reply["temperature"] == 0 and reply["max_output_tokens"] == 64
    assert reply["warnings"] == [
        "text.verbosity has no effect: ask for it in the input"
    ]


def test_input_tokens_are_counted(client, served):
    for request in ({"input": "The with"}, {"input": "The with", "instructions": "Go"}):
        count = client.responses.input_tokens.count(model="pydoc", **request)
        used = client.responses.create(max_output_tokens=1, **request, **GREEDY).usage
        assert count.input_tokens == used.input_tokens > 0
    # Also for a prompt longer than the context.
    long = client.responses.input_tokens.count(model="pydoc", input="The " * 150)
    assert long.input_tokens > served.context


# Items and tools of a coding agent.
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
COMPUTER = {
    "type": "namespace",
    "name": "computer",
    "description": "Tools of a window.",
    "tools": [{**CLOCK, "strict": False}, {**CLOCK, "name": "click"}],
}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_custom_tool_is_called_with_a_string(client, is_streamed):
    request = dict(input="The with", tools=[PATCH], tool_choice="required")
    request |= dict(max_output_tokens=60, model="pydoc", temperature=1.0)
    request |= dict(parallel_tool_calls=False, extra_body={"seed": 2})
    if is_streamed:
        events = list(client.responses.create(stream=True, **request))
        pieces = [
            e for e in events if e.type == "response.custom_tool_call_input.delta"
        ]
        found = events[-1].response
        assert "".join(e.delta for e in pieces) == found.output[0].input
        assert any(e.type == "response.custom_tool_call_input.done" for e in events)
    else:
        found = client.responses.create(**request)
    (call,) = found.output
    assert (call.type, call.name) == ("custom_tool_call", "apply_patch")
    assert isinstance(call.input, str)
    history = [
        {"role": "user", "content": "The with"},
        call.model_dump(exclude_none=True),
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"},
    ]
    again = client.responses.create(input=history, max_output_tokens=2, **GREEDY)
    assert again.output_text


@pytest.mark.parametrize(
    "arguments, text",
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "caf\\u00e9 \\"x', 'caf\u00e9 "x'),
        ('{"inp', ""),
    ],
)
def test_the_input_of_a_custom_tool_may_be_truncated(arguments, text):
    assert read_custom_input(arguments) == text


def test_tools_of_a_namespace_keep_their_names(client):
    """The client receives name and namespace separately."""
    choice = {"type": "function", "name": "click", "namespace": "computer"}
    for tool_choice, tools in ((choice, [CLOCK, COMPUTER]), ("required", [COMPUTER])):
        found = client.responses.create(
            input="The with",
            tools=tools,
            tool_choice=tool_choice,
            max_output_tokens=60,
            parallel_tool_calls=False,
            model="pydoc",
            extra_body={"seed": 1},
        )
        (call,) = found.output
        assert call.name in ("clock", "click")
        assert call.model_dump()["namespace"] == "computer"
        if tool_choice == choice:
            assert call.name == "click"
    offered = read_offered({"tools": [CLOCK, COMPUTER]})
    assert [*offered.origins] == ["clock", "computer.clock", "click"]


def test_items_of_other_tools_are_read_or_skipped():
    shell = {"type": "local_shell_call", "call_id": "s", "status": "completed"}
    shell["action"] = {"type": "exec", "command": ["ls"]}
    items = [
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {}},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        shell,
        {"type": "local_shell_call_output", "call_id": "s", "output": "b"},
        {"type": "custom_tool_call", "call_id": "p", "name": "patch", "input": "c"},
        {
            "type": "custom_tool_call_output",
            "call_id": "p",
            "output": [{"type": "input_text", "text": "d"}],
        },
        {
            "type": "tool_search_output",
            "call_id": "q",
            "status": "completed",
            "execution": "client",
            "tools": [],
        },
        {"type": "compaction", "encrypted_content": "x"},
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "e"}],
        },
    ]
    messages = reading.read_response({"input": items})["messages"]
    roles = [each["role"] for each in messages]
    assert roles == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    (call,) = messages[1]["tool_calls"]
    assert call["id"] == "s" and call["function"]["name"] == "local_shell"
    assert json.loads(call["function"]["arguments"]) == {"action": shell["action"]}
    (call,) = messages[3]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"input": "c"}


def test_a_failed_response_stream_ends_with_the_error(client, served, monkeypatch):
    """The request is cancelled, as in a shutdown."""
    submit = served.engine.submit

    def submit_and_cancel(ask):
        number = submit(ask)
        served.engine.cancel(number)
        return number

    monkeypatch.setattr(served.engine, "submit", submit_and_cancel)
    *_, last = client.responses.create(input="The with", stream=True, **GREEDY)
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.message == "the server is shutting down"
