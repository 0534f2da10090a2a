"""Tool calls of a chat: offered, selected, returned whole and streamed."""

import contextlib
import json
import random
import re
import typing

import openai
import pydantic
import pytest
from served.asking import languages
from served.asking.prompts import read_chat
from served.asking.tools import read_tools
from served.replying.calls import CallReader

from jkv.grammar import TooLarge, from_tools, vocabulary_of

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]

CHAT = [{"role": "user", "content": "The with"}]


class Clock(pydantic.BaseModel):
    a: typing.Literal["x", "y"]


class Nothing(pydantic.BaseModel):
    pass


TOOLS = [openai.pydantic_function_tool(Clock, name="f")]
NAMED = {"type": "function", "function": {"name": "f"}}


def ask(client, **options):
    fields = dict(model="pydoc", messages=CHAT, max_tokens=60, tools=TOOLS, seed=1)
    return client.chat.completions.create(**fields | options)


def read(pieces, begin="<t>", end="</t>", **options):
    """Return the parsed content and calls of a text in pieces."""
    reader, content, calls = CallReader(begin, end, **options), "", []
    for place, piece in enumerate(pieces):
        reported = reader.advance(piece, is_last=place == len(pieces) - 1)
        content += reported.content
        for part in reported.calls:
            if part.name is not None:
                assert part.index == len(calls) and part.id.startswith("call_")
                calls.append([part.name, ""])
            calls[part.index][1] += part.arguments
    return content, calls, reader.has_called


HEAD = '{"name": "f", "arguments": '


@pytest.mark.parametrize(
    "text, expected",
    [
        ("free < t> <t text", ("free < t> <t text", [], False)),
        (" free <t ", (" free <t ", [], False)),
        ("<t>" + HEAD + "{}}</t>", ("", [["f", "{}"]], True)),
        (
            'so: |<t>|{"name":"g","arguments":{"a":"}</t>\\"{"}}|</t>|<t>'
            + HEAD
            + '{"b": {"c": [{}]}}}</t> and |',
            (
                "so:and |",
                [["g", '{"a":"}</t>\\"{"}'], ["f", '{"b": {"c": [{}]}}']],
                True,
            ),
        ),
        # Truncated by a limit: the parsed part is returned.
        ("a <t>" + HEAD + '{"a": "', ("a", [["f", '{"a": "']], False)),
        ("<t>" + HEAD[:-6], ("", [["f", ""]], False)),
        ('so |<t>{"name": "f"', ("so", [["f", ""]], False)),
        ('so <t>{"name": "f', ('so<t>{"name": "f', [], False)),
        ("so <t>", ("so<t>", [], False)),
        ("<t>" + HEAD + "{}}</t> |<t", ("<t", [["f", "{}"]], True)),
        ("<t>" + HEAD + "{}} ", ("", [["f", "{}"]], False)),
    ],
)
def test_calls_are_parsed_equally_in_any_chunks(text, expected):
    """A bar stands for a newline."""
    text, rng = text.replace("|", "\n"), random.Random(0)
    content, calls, has_called = expected
    expected = content.replace("|", "\n"), calls, has_called
    for num_cuts in (0, 1, 2, 5, 20, len(text)):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(num_cuts))
        bounds = zip([0, *cuts], [*cuts, len(text)], strict=True)
        assert read([text[start:stop] for start, stop in bounds]) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_an_answer_may_contain_a_tag(size):
    for text, expected in (
        ('{"a": "<t>"}', ('{"a": "<t>"}', [])),
        ("<", ("<", [])),
        ('<t>{"name": "f", "arguments": {}}</t>', ("", [["f", "{}"]])),
    ):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(pieces, has_answer=True)[:2] == expected


def test_the_closing_tag_of_a_call_is_optional():
    text = "[" + HEAD + "{}}\n[" + HEAD + "{}}"
    assert read([text], "[", "") == read([*text], "[", "")
    assert read([text], "[", "") == ("", [["f", "{}"]] * 2, True)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_the_real_client_parses_arguments_into_its_types(client, choice):
    found = client.chat.completions.parse(
        model="pydoc",
        messages=CHAT,
        max_tokens=60,
        tools=[*TOOLS, openai.pydantic_function_tool(Nothing, name="g")],
        tool_choice=choice,
        parallel_tool_calls=False,
        seed=3,
        n=3,
    )
    ids = set()
    for each in found.choices:
        (call,) = each.message.tool_calls
        expected = {"f": Clock, "g": Nothing}[call.function.name]
        assert isinstance(call.function.parsed_arguments, expected)
        assert choice == "required" or expected is Clock
        assert each.finish_reason == "tool_calls" and each.message.content is None
        ids.add(call.id)
    assert len(ids) == 3


def join_pieces(pieces):
    """Return the message that a stream's pieces form, and its finish reason."""
    content, calls, reason = "", [], None
    for piece in pieces:
        (choice,) = piece.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or ():
            if part.id is not None:
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments
    return content, calls, reason


def test_streams_equal_whole_responses(client, served):
    (begin,) = served.tokenizer.encode("=").ids
    options = dict(tool_choice="auto", parallel_tool_calls=False, temperature=1.2)
    kinds = set()
    for changes in (
        # One bias makes the tag likely, another the end after the call.
        {"extra_body": {"logit_bias": {begin: 9, served.stop_tokens[0]: 7}}},
        {"tool_choice": "required", "parallel_tool_calls": True},
        {},
    ):
        whole = ask(client, **options | changes).choices[0]
        calls = whole.message.tool_calls or []
        found = join_pieces(ask(client, stream=True, **options | changes))
        assert found == (
            whole.message.content or "",
            [[call.function.name, call.function.arguments] for call in calls],
            whole.finish_reason,
        )
        kinds.add((whole.finish_reason, bool(calls), bool(whole.message.content)))
    assert {has_content for _, has_calls, has_content in kinds if has_calls} == {
        True,
        False,
    }
    assert ("length", False, True) in kinds, kinds
    assert "tool_calls" in {reason for reason, *_ in kinds}


@pytest.mark.parametrize("form", ["schema", "object"])
def test_a_response_is_an_answer_or_calls(client, form):
    """Both occur over several seeds, and nothing else."""
    format = {"type": "json_object"}
    if form == "schema":
        schema = Clock.model_json_schema()
        format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    # A temperature at which any allowed token occurs; one call ends the response.
    request = dict(temperature=90, parallel_tool_calls=False, response_format=format)
    kinds = set()
    for choice in ask(client, n=16, **request).choices:
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
            assert not choice.message.tool_calls
        if choice.finish_reason == "tool_calls":
            assert not choice.message.content
    # A free-form object may exceed the limit.
    assert kinds >= {"tool_calls", "stop" if form == "schema" else "length"}
    required = ask(
        client, max_tokens=60, tool_choice="required", response_format=format
    ).choices[0]
    assert required.message.tool_calls and not required.message.content


def test_tool_choice_none_returns_plain_text(client):
    plain = ask(client, tools=[], max_tokens=8).choices[0]
    for changes in ({"tool_choice": "none"}, {"tools": None}):
        found = ask(client, max_tokens=8, **changes).choices[0]
        assert found.message.content == plain.message.content
        assert found.message.tool_calls is None
        assert found.finish_reason == plain.finish_reason


def test_templates_receive_tools_calls_and_results(served, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(
        "{% for t in tools %}{{ t.function.name }} {% endfor %}"
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}"
        "{{ m.tool_call_id or '' }}{% endfor %}"
    )
    called = {"name": "f", "arguments": '{"a": "x"}'}
    messages = [
        *CHAT,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "8"},
    ]
    other = served._replace(folder=tmp_path, longest_token=100)
    (tokens,) = read_chat(other, {"messages": messages}, TOOLS)
    assert served.tokenizer.decode(tokens) == "f The withx81"


def test_a_response_warns_if_its_template_does_not_show_tools(client, post):
    def warnings(found):
        return (found.model_extra or {}).get("warnings")

    options = dict(tool_choice="auto", max_tokens=8)
    (reported,) = warnings(ask(client, **options))
    assert "template of pydoc does not show tools" in reported
    first, *others = ask(client, stream=True, **options)
    assert warnings(first) == [reported]
    assert not any(map(warnings, others))
    assert not warnings(ask(client, tool_choice="none", max_tokens=2))
    assert not warnings(ask(client, tools=None, max_tokens=2))
    tool = {"type": "function", **TOOLS[0]["function"]}
    body = dict(input="The with", tools=[tool], max_output_tokens=16)
    status, reply = post(json.dumps(body).encode(), "/v1/responses")
    assert status == 200 and reply["warnings"] == [reported]


PATH = "/v1/chat/completions"
BARE = {"type": "function", "function": {"name": "f"}}
# Go's encoding of an absent list.
WRONG = {"name": "w", "parameters": {"type": "object", "required": None}}
WRONG = {"type": "function", "function": WRONG}


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"tools": {}}, "tools", "a list of at most 128"),
        ({"tools": [BARE] * 129}, "tools", "a list of at most 128"),
        ({"tools": [{"type": "custom"}]}, "tools", "of type function"),
        ({"tools": [{"type": "function"}]}, "tools", "with a name"),
        ({"tools": [{**BARE, "x": 1}]}, "tools", "'x' of the tool f"),
        ({"tools": [BARE, BARE]}, "tools", "different names"),
        ({"tools": [BARE], "tool_choice": "some"}, "tool_choice", "none, auto"),
        ({"tool_choice": "required"}, "tool_choice", "requires tools"),
        (
            {
                "tools": [BARE],
                "tool_choice": {
                    "type": "function",
                    "function": {"name": "f"},
                    "force": True,
                },
            },
            "tool_choice",
            "tool_choice.force is not supported",
        ),
        (
            {
                "tools": [BARE],
                "tool_choice": {
                    "type": "function",
                    "function": {"name": "f", "x": 1},
                },
            },
            "tool_choice",
            "tool_choice.x is not supported",
        ),
        (
            {"tools": [BARE], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice",
            "an object with mode and tools",
        ),
        (
            {
                "tools": [BARE],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [{"type": "function", "function": {"name": "g"}}],
                    },
                },
            },
            "tool_choice",
            "tools has no 'g'",
        ),
        ({"tools": [BARE], "parallel_tool_calls": 1}, "parallel_tool_calls", "true or"),
        (
            {"tools": [BARE], "guided_regex": "a"},
            "guided_regex",
            "tools and guided_regex exclude each other",
        ),
        ({"tools": [WRONG]}, "tools", "tool 'w': 'required' at # must be a list"),
        (
            {
                "tools": [BARE],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice",
            "tools has no 'g'",
        ),
        ({"messages": [{**CHAT[0], "tool_calls": {}}]}, "messages", "must be a list"),
        ({"messages": [{**CHAT[0], "tool_calls": [1]}]}, "messages", "list of calls"),
        ({"messages": [{**CHAT[0], "tool_call_id": 1}]}, "messages", "tool_call_id"),
        ({"functions": [{"name": "f"}]}, "functions", "the deprecated form of tools"),
    ],
)
def test_invalid_tools_are_refused_by_name(post, fields, param, words):
    body = {"messages": CHAT, **fields}
    status, reply = post(json.dumps(body).encode(), PATH)
    assert status == 400 and reply["error"]["param"] == param, reply
    assert words in reply["error"]["message"]


@pytest.mark.parametrize(
    "function, words",
    [
        ({"parameters": {"type": "array"}}, "of type object"),
        ({"parameters": []}, "of type object"),
        ({"description": 1}, "description of the tool f"),
        ({"strict": 1}, "true or false"),
        ({"name": "f g"}, "1 to 128 letters"),
        (
            {"parameters": {"$ref": "https://a.org/b"}, "strict": True},
            "tool 'f': .*only references within",
        ),
    ],
)
def test_an_invalid_function_is_reported(post, function, words):
    tool = {"type": "function", "function": {"name": "f", **function}}
    body = {"messages": CHAT, "tools": [tool]}
    status, reply = post(json.dumps(body).encode(), PATH)
    assert status == 400 and re.search(words, reply["error"]["message"]), reply


def test_tools_are_read_with_defaults():
    """The default choice is "auto"; a tool without parameters takes none."""
    found = read_tools({"tools": [BARE]}, ("<t>", "</t>"))
    described = json.loads(found.language.text)
    assert found.listed == [BARE] and described["choice"] == "auto"
    (tool,) = described["tools"]
    assert tool == {"name": "f", "parameters": {"type": "object", "properties": {}}}
    assert read_tools({"tools": [], "tool_choice": "none"}, ("", "")) is None


def test_an_unsupported_tool_does_not_refuse_the_others(post):
    """Its arguments are free JSON with a warning, but it cannot be required."""
    far = {"name": "far", "parameters": {"$ref": "https://a.org/b"}}
    tools = [{"type": "function", "function": each} for each in (far, {"name": "g"})]
    body = {"messages": CHAT, "tools": tools, "max_tokens": 4}
    status, reply = post(json.dumps(body).encode(), PATH)
    assert status == 200, reply
    (reported,) = [each for each in reply["warnings"] if "far" in each]
    assert "any JSON object: $ref 'https://a.org/b' at #" in reported
    again = post(json.dumps(body).encode(), PATH)[1]  # the grammar is cached
    assert reported in again["warnings"]
    body["tool_choice"] = "required"
    status, reply = post(json.dumps(body).encode(), PATH)
    assert status == 400 and "tool 'far'" in reply["error"]["message"]


def test_the_largest_of_many_tools_get_free_arguments(served):
    """Each fits alone; together they exceed the limit."""
    names = {"type": "array", "items": {"enum": ["some", "words", "of", "it"]}}
    small = {"name": "small", "parameters": {"properties": {"a": {"enum": [1, 2]}}}}
    large = [
        {
            "name": f"large{number}",
            "parameters": {
                "properties": {"a": {**names, "maxItems": 10}, "b": {"maxLength": 60}}
            },
        }
        for number in range(4)
    ]
    tools = [
        {**each, "parameters": {"type": "object", **each["parameters"]}}
        for each in (small, *large)
    ]
    described = {"tools": tools, "choice": "auto", "is_parallel": True}
    described |= {"begin": "<t>", "end": "</t>"}
    vocabulary = vocabulary_of(served.tokenizer, [0], served.vocabulary_size)
    alone = {**described, "tools": tools[1:2]}
    for most in (2**24, 2**23, 2**22, 2**21, 2**20):
        with contextlib.suppress(TooLarge):
            from_tools(vocabulary=vocabulary, max_bytes=most, **described)
            continue
        break
    from_tools(vocabulary=vocabulary, max_bytes=most, **alone)
    found = languages._compile_tools(described, vocabulary, max_bytes=most)
    reported = " ".join(found.warnings)
    assert "large0" in reported and "small" not in reported
    with pytest.raises(TooLarge):
        languages._compile_tools(
            {**described, "choice": "required"}, vocabulary, max_bytes=most
        )


def test_only_allowed_tools_are_called(client):
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    allowed = {"mode": "required", "tools": tools[1:2]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    found = ask(client, tools=tools, tool_choice=choice, max_tokens=40, seed=1)
    assert {call.function.name for call in found.choices[0].message.tool_calls} == {"g"}
