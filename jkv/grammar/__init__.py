"""Structured output: grammars compiled to arrays for constrained decoding.

`from_choices`, `from_regex`, `from_json_schema` and `from_gbnf` compile a language for
a vocabulary, `concatenate` a sequence of languages; `join` combines grammars into one
`Grammar`, which is a `jkv.LogitsProcessor`.

Each source (`regexes`, `gbnf`, `schema`) becomes an expression over bytes with automata
as leaves (`automaton`), which is determinized (`determinization`) and turned into a
table of tokens (`token_table`). Start with `languages.from_regex`.
"""

from jkv.grammar.catalog import Catalog, CatalogFull
from jkv.grammar.errors import Malformed, NoText, TooLarge, Unsupported
from jkv.grammar.grammar import Grammar
from jkv.grammar.languages import (
    concatenate,
    from_choices,
    from_gbnf,
    from_json_object,
    from_json_schema,
    from_regex,
)
from jkv.grammar.parts import Choices, Either, Pattern, Rules, Schema, Until
from jkv.grammar.spelling import with_one_spelling
from jkv.grammar.tables import join, wait_for
from jkv.grammar.tool_calls import find_refused_tools, from_tools
from jkv.grammar.vocabulary import Vocabulary, vocabulary_of

__all__ = [
    "Catalog",
    "CatalogFull",
    "Choices",
    "Either",
    "Grammar",
    "Malformed",
    "NoText",
    "Pattern",
    "Rules",
    "Schema",
    "TooLarge",
    "Unsupported",
    "Until",
    "Vocabulary",
    "concatenate",
    "find_refused_tools",
    "from_choices",
    "from_gbnf",
    "from_json_object",
    "from_json_schema",
    "from_regex",
    "from_tools",
    "join",
    "vocabulary_of",
    "wait_for",
    "with_one_spelling",
]
