"""Unpaired surrogates, which JSON and Python allow, but UTF-8 does not."""

import pytest

from jkv.grammar import (
    Malformed,
    Vocabulary,
    concatenate,
    from_choices,
    from_json_schema,
    from_tools,
)

pytestmark = pytest.mark.one_end
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), None], [256])
HALF = "\ud83d"


@pytest.mark.parametrize(
    "schema, word",
    [
        ({"enum": ["a", HALF]}, "enum"),
        ({"const": {"a": [HALF]}}, "const"),
        ({"properties": {HALF: {}}}, "properties"),
        ({"type": "string", "pattern": f"a{HALF}"}, "pattern"),
        ({"enum": [{HALF: 1}]}, "enum"),
    ],
)
def test_schemas_with_surrogates_are_refused_with_their_location(schema, word):
    with pytest.raises(Malformed, match=f"'{word}' at #"):
        from_json_schema(schema, VOCABULARY)
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    with pytest.raises(Malformed, match=f"tool 'f': '{word}' at #/properties/a"):
        from_tools([tool], VOCABULARY)


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_choices(["a", HALF], VOCABULARY),
        lambda: concatenate([f"a{HALF}"], VOCABULARY),
        lambda: from_tools([{"name": f"f{HALF}"}], VOCABULARY),
        lambda: from_tools([{"name": "f"}], VOCABULARY, begin=HALF),
    ],
)
def test_other_grammars_with_surrogates_are_refused(make):
    with pytest.raises(Malformed, match="lone surrogate"):
        make()


def test_surrogate_pairs_are_characters():
    from_json_schema({"enum": ["\U0001f600"]}, VOCABULARY)
