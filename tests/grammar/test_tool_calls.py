"""Tool-call grammars: every mask equals that of a plain-Python validator.

Tokens cross tag boundaries, and some are parts of characters.
"""

import codecs
import re

import pytest
from support.grammar.grammar_reading import HostGrammar

from jkv.grammar import NoText, Vocabulary, from_tools

pytestmark = pytest.mark.one_end

TOOLS = [
    {"name": "f", "parameters": {"type": "object", "properties": {}}},
    {
        "type": "function",
        "function": {
            "name": "g",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": ["<t>", "é"]}},
                "required": ["a"],
            },
        },
    },
]
CALLS = {
    "f": [b'{"name":"f","arguments":{}}'],
    "g": [
        b'{"name":"g","arguments":{"a":"<t>"}}',
        '{"name":"g","arguments":{"a":"é"}}'.encode(),
    ],
}
TAGGED = [
    b"<t>" + before + call + behind + b"</t>"
    for call in [*CALLS["f"], *CALLS["g"]]
    for before in (b"", b"\n")
    for behind in (b"", b"\n")
]
PIECES = [*(bytes([byte]) for byte in b'<t>/{}"\n:,aefgmnrsu'), b"\xc3", b"\xa9"]
PIECES += [b"a<", b"a<t", b"<t", b"t>{", b'<t>{"', b'{"name":"', b'","arguments":{']
PIECES += [b"}}", b"}<", b"}}</t>", b"/t>a", b"</t><t>", b"</t>\n<t>", b"\xa9<", b"<<"]
PIECES += [b'\xa9"', b"a\xc3", "é".encode(), b">\xc3", b"t>\n{", b"</t>\xc3"]
END = len(PIECES)
VOCABULARY = Vocabulary([*PIECES, None], end_tokens=[END])


def is_text(data, *, is_whole):
    """Return True if bytes are (a prefix of) UTF-8 without an opening tag."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, is_whole)
    except UnicodeDecodeError:
        return False
    return b"<t>" not in data


def judge(text, names, *, has_text, is_single):
    """Return whether bytes are a prefix of the language, and whether they match.

    Calls are found from the left.
    """
    calls = [t for t in TAGGED if any(c in t for name in names for c in CALLS[name])]
    num_calls = 0
    while True:
        may_call = not (is_single and num_calls)
        if has_text:
            place = text.find(b"<t>")
            if place < 0:
                whole = is_text(text, is_whole=True)
                return whole or is_text(text, is_whole=False), whole
            if not is_text(text[:place], is_whole=True):
                return False, False
            text = text[place:]
        elif not text:
            return may_call or num_calls > 0, num_calls > 0
        elif num_calls:
            text = text.removeprefix(b"\n")
        call = next((call for call in calls if text.startswith(call)), None)
        if call is None or not may_call:
            begins = any(call.startswith(text) for call in calls)
            return may_call and begins, False
        text, num_calls = text[len(call) :], num_calls + 1


@pytest.mark.parametrize(
    "choice, is_parallel, rules",
    [
        ("auto", True, dict(names="fg", has_text=True, is_single=False)),
        ("auto", False, dict(names="fg", has_text=True, is_single=True)),
        ("required", True, dict(names="fg", has_text=False, is_single=False)),
        ("g", True, dict(names="g", has_text=False, is_single=True)),
    ],
)
def test_tool_call_masks_equal_a_validator(choice, is_parallel, rules):
    grammar = HostGrammar(
        from_tools(
            TOOLS,
            VOCABULARY,
            choice=choice,
            is_parallel=is_parallel,
            begin="<t>",
            end="</t>",
            whitespace="",
        )
    )
    texts = {grammar.start(): b""}  # a text for each state
    num_whole = 0
    for state in (order := [grammar.start()]):
        text, allowed = texts[state], grammar.allowed(state)
        is_whole = judge(text, **rules)[1]
        expected = {t for t, p in enumerate(PIECES) if judge(text + p, **rules)[0]}
        assert allowed == expected | ({END} if is_whole else set()), text
        num_whole += is_whole
        for token in sorted(expected):
            reached = grammar.advance(state, token)
            if reached not in texts:
                texts[reached] = text + PIECES[token]
                order.append(reached)
        if is_whole:
            assert grammar.advance(state, END) == grammar.ended
    assert len(order) == grammar.grammar.num_states
    # Some texts end within a tag, and none within a character.
    ends = {texts[state][-2:] for state in order if END in grammar.allowed(state)}
    assert (b"<t" in ends) == rules["has_text"] and num_whole
    assert not any(end.endswith(b"\xc3") for end in ends)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_text_is_either_an_answer_or_calls(is_parallel):
    """JSON of the schema, or only calls."""
    grammar = from_tools(
        TOOLS,
        VOCABULARY,
        is_parallel=is_parallel,
        begin="<t>",
        end="</t>",
        whitespace="",
        answer={"enum": ["a", "e"]},
    )
    host = HostGrammar(grammar)
    call = b"<t>" + CALLS["f"][0] + b"</t>"

    def is_in(text):
        state = host.start()
        for byte in text:
            token = PIECES.index(bytes([byte]))
            if token not in host.allowed(state):
                return False
            state = host.advance(state, token)
        return END in host.allowed(state)

    assert all(map(is_in, (b'"a"', b'"e"', call)))
    assert is_in(call + b"\n" + call) == is_parallel
    for wrong in (b"", b"a", b'"f"', b'"a"' + call, call + b'"a"', call[:-1]):
        assert not is_in(wrong), wrong


def test_unknown_tools_and_overlapping_tags_are_refused():
    with pytest.raises(NoText, match="matches no tool"):
        from_tools(TOOLS, VOCABULARY, choice="h")
    for begin in ("<<", "<t<"):
        with pytest.raises(ValueError, match="must not overlap itself"):
            from_tools(TOOLS, VOCABULARY, begin=begin)
    # These tokens can spell free text, but no call.
    spells_no_name = [piece for piece in PIECES if not re.search(b"[fg]", piece)]
    vocabulary = Vocabulary([*spells_no_name, None], [len(spells_no_name)])
    free = HostGrammar(from_tools(TOOLS, vocabulary, begin="<t>", end="</t>"))
    assert len(spells_no_name) in free.allowed(free.start())
    assert spells_no_name.index(b'<t>{"') not in free.allowed(free.start())
    with pytest.raises(NoText, match="cannot spell any string"):
        from_tools(TOOLS, vocabulary, choice="required", begin="<t>", end="</t>")
