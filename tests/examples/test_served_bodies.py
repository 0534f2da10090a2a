"""Bodies with a value of a wrong type, anywhere in them, are read or refused."""

import json

import pytest
from batching.command import _list_names as list_names
from served.asking.showing import count_chat, read_fields, read_json
from served.mistakes import Refused
from served.replying.kinds import KINDS
from served.responses.reading import read_response

pytestmark = pytest.mark.one_end

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = dict(name="f", description="d", parameters=SCHEMA, strict=True)
FORMAT = dict(type="json_schema", json_schema=dict(name="n", schema=SCHEMA))
TEXT = dict(type="text", text="a")
CALL = dict(id="c", type="function", function=dict(name="f", arguments="{}"))
BODIES = {
    "/v1/completions": dict(
        prompt=["The", "a"],
        stop=["a"],
        stop_token_ids=[5],
        stream=True,
        stream_options=dict(include_usage=True),
        logit_bias={"5": 1},
        bad_words=["x"],
        allowed_token_ids=[5, 6],
        metadata={"a": "b"},
        response_format=FORMAT,
    ),
    "/v1/chat/completions": dict(
        messages=[
            dict(role="user", content=[TEXT], name="n"),
            dict(role="assistant", content=None, tool_calls=[CALL]),
            dict(role="tool", tool_call_id="c", content="x"),
        ],
        tools=[dict(type="function", function=FUNCTION)],
        tool_choice=dict(
            type="allowed_tools",
            allowed_tools=dict(
                mode="auto", tools=[dict(type="function", function=dict(name="f"))]
            ),
        ),
        chat_template_kwargs=dict(enable_thinking=True),
    ),
    "/v1/messages": dict(
        max_tokens=5,
        system=[TEXT],
        messages=[
            dict(role="user", content=[dict(type="search_result", content=[TEXT])]),
            dict(
                role="assistant",
                content=[
                    dict(type="thinking", thinking="t"),
                    dict(type="tool_use", id="c", name="f", input={}),
                ],
            ),
            dict(
                role="user",
                content=[dict(type="tool_result", tool_use_id="c", content=[TEXT])],
            ),
        ],
        tools=[dict(name="f", description="d", input_schema=SCHEMA)],
        tool_choice=dict(type="tool", name="f", disable_parallel_tool_use=True),
        metadata=dict(user_id="u"),
        thinking=dict(type="enabled", budget_tokens=5),
        output_config=dict(
            effort="low", format=dict(type="json_schema", schema=SCHEMA)
        ),
    ),
    "/v1/responses": dict(
        input=[
            dict(role="user", content=[dict(type="input_text", text="a")]),
            dict(type="reasoning", content=[dict(text="t")], summary=[dict(text="s")]),
            dict(
                type="function_call",
                call_id="c",
                name="f",
                arguments="{}",
                namespace="n",
            ),
            dict(type="function_call_output", call_id="c", output=[TEXT]),
            dict(type="custom_tool_call", call_id="d", name="g", input="i"),
            dict(type="local_shell_call", call_id="e", action={}),
        ],
        tools=[
            dict(type="custom", name="g", format=dict(type="text")),
            dict(type="namespace", name="n", tools=[dict(type="function", **FUNCTION)]),
        ],
        tool_choice=dict(type="function", name="f", namespace="n"),
        text=dict(format=dict(type="json_schema", name="n", schema=SCHEMA)),
        reasoning=dict(effort="low"),
        include=["message.output_text.logprobs"],
    ),
}


def list_changed(part, changes=(None, 5, "a", [[]], {"type": []})):
    """Yield copies of a JSON value with one value in it removed or changed."""
    items = list(part.items() if isinstance(part, dict) else enumerate(part))
    for key, value in items:
        rest = dict(items)
        del rest[key]
        nested = value if isinstance(value, dict | list) else {}
        changed = [rest | {key: each} for each in (*changes, *list_changed(nested))]
        for each in (rest, *changed):
            yield (
                each
                if isinstance(part, dict)
                else list(dict(sorted(each.items())).values())
            )


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_value_is_read_or_refused(served, path):
    kind = KINDS[path]

    def read(body):
        fields = read_json(json.dumps(body).encode())
        parsed, shown = read_fields(served, kind.read(fields), is_chat=kind.is_chat)
        kind.reply(served, fields, kind.bound(served, fields, parsed), shown, [])

    read(BODIES[path])
    refused = 0
    for body in list_changed(BODIES[path]):
        try:
            read(body)
        except ValueError as error:
            refused += 1
            assert str(error), body
    assert refused > 50


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_value_in_a_batch_fails_its_line_only(path):
    """The command reads all lines before it loads the model."""
    line = dict(custom_id="1", method="POST", url=path, body=BODIES[path])
    assert list_names(json.dumps(line))
    for changed in list_changed(line):
        list_names(json.dumps(changed))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(input=[dict(type="reasoning", summary=5)]),
            "the summary of a reasoning item must be a list of objects, got 5",
        ),
        (
            dict(input=[dict(type="reasoning", content=[dict(text=5)])]),
            "the text in the content of a reasoning item must be a string, got 5",
        ),
        (
            dict(tool_choice=dict(type="function", namespace=[])),
            r"tool_choice: a namespace must be a string, got \[\]",
        ),
    ],
)
def test_wrong_parts_of_a_response_are_named(served, changes, message):
    with pytest.raises(Refused, match=message) as refused:
        count_chat(served, read_response(dict(input="a") | changes))
    assert refused.value.param == next(iter(changes))
