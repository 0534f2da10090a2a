"""`/v1/responses` with the real client: texts, calls and streams, nothing stored."""

import json
import typing

import pydantic
import pytest
from openai.types.responses import response_create_params
from served.asking import fields
from served.asking.prompts import read_chat
from served.responses import reading

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


def test_texts_are_those_of_a_chat(client, continued):
    expected = continued("The with", max_new_tokens=8)
    asked = [
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
    for each in asked:
        found = client.responses.create(max_output_tokens=8, **each, **GREEDY)
        assert found.output_text == expected.text
        assert found.status == "incomplete"
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.usage.output_tokens == 8
        assert found.usage.total_tokens == found.usage.input_tokens + 8
        assert (found.max_output_tokens, found.store) == (8, False)
    assert found.output[0].role == "assistant" and found.id.startswith("resp_")


def test_streams_tell_what_whole_responses_tell(client):
    asked = dict(input="The with", max_output_tokens=80, **GREEDY)
    whole = client.responses.create(**asked)
    kinds, text = [], ""
    with client.responses.stream(**asked) as stream:
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
        event.sequence_number for event in client.responses.create(stream=True, **asked)
    ]
    assert numbers == list(range(len(numbers)))


def test_the_real_client_parses_answers_into_its_types(client):
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
    told = found.output[0].content[0].logprobs
    assert "".join(each.token for each in told) == found.output_text
    assert [len(each.top_logprobs) for each in told] == [2] * 6


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "clock"}])
def test_calls_are_items(client, choice):
    asked = dict(input="The with", tools=[CLOCK], tool_choice=choice, seed=1)
    asked |= {"max_output_tokens": 60, "model": "pydoc", "parallel_tool_calls": False}
    seed = {"extra_body": {"seed": asked.pop("seed")}}
    whole = client.responses.create(**asked, **seed)
    (call,) = whole.output
    assert (call.type, call.name, call.status) == (
        "function_call",
        "clock",
        "completed",
    )
    assert json.loads(call.arguments)["zone"] in ("a", "b")
    events = list(client.responses.create(stream=True, **asked, **seed))
    pieces = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(e.delta for e in pieces) == call.arguments
    assert events[-1].response.output[0].arguments == call.arguments
    # The call, and what came of it, are taken again.
    history = [
        {"role": "user", "content": "The with"},
        *[item.model_dump(exclude_none=True) for item in whole.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    again = client.responses.create(input=history, max_output_tokens=2, **GREEDY)
    assert again.output_text


def test_items_become_messages(served, tmp_path):
    """A call belongs to what was said before it, thoughts to what follows."""
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
    said = chat["messages"][1]
    assert [each["id"] for each in said["tool_calls"]] == ["1", "2"]
    assert said["reasoning_content"] == "hm"
    template = (
        "{% for m in messages %}{{ m.content or '' }}{{ m.reasoning_content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    other = served._replace(folder=tmp_path, longest_token=100)
    (tokens,) = read_chat(other, chat)
    assert served.tokenizer.decode(tokens) == "abhmffcf"


def test_every_field_of_the_real_client_is_served_or_refused():
    params = response_create_params.ResponseCreateParamsBase
    names = set(typing.get_type_hints(params))
    assert names <= reading.SERVED | set(reading.REFUSED)
    assert not reading.SERVED & set(reading.REFUSED)
    # What is refused of chats is not handed on to them.
    both = reading.SERVED & set(fields.REFUSED) - fields.SERVED_OF_CHATS
    assert not both, both


@pytest.mark.parametrize(
    "body, param, words",
    [
        ({}, "input", "a text or a list"),
        ({"input": [3]}, "input", "an object"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input", "not served"),
        ({"input": [{"role": "user", "content": 3}]}, "input", "content must be"),
        ({"input": "a", "previous_response_id": "1"}, "previous_response_id", "stored"),
        ({"input": "a", "background": True}, "background", "stored"),
        ({"input": "a", "frobnicate": 1}, "frobnicate", "no field"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "from 1"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools", "type function"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text", "json_schema"),
        ({"input": "a", "include": ["file_search"]}, "include", "include takes"),
        ({"input": "a", "instructions": 1}, "instructions", "must be a text"),
    ],
)
def test_what_is_not_served_is_refused_by_name(post, body, param, words):
    status, said = post(json.dumps(body).encode(), "/v1/responses")
    assert status == 400 and said["error"]["param"] == param, said
    assert words in said["error"]["message"]


def test_what_asks_for_nothing_is_taken(client, continued):
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


def test_a_stream_that_fails_ends_with_what_failed(client, served, monkeypatch):
    """As when the server goes down: the text is cancelled."""
    submit = served.engine.submit

    def submit_and_cancel(ask):
        number = submit(ask)
        served.engine.cancel(number)
        return number

    monkeypatch.setattr(served.engine, "submit", submit_and_cancel)
    *_, last = client.responses.create(input="The with", stream=True, **GREEDY)
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.message == "the server is going down"
