"""Grammars: languages that texts are steered into, as arrays on the device.

`from_choices`, `from_regex` and `from_json_schema` compile a language for a vocabulary;
`join` puts several into one `Grammar`, which is a `jkv.Steering`.
"""

from jkv.grammar.catalog import Catalog, CatalogFull
from jkv.grammar.errors import NoText, TooLarge, Unsupported
from jkv.grammar.grammar import Grammar
from jkv.grammar.json_texts import from_json_object, from_json_schema
from jkv.grammar.languages import from_choices, from_regex
from jkv.grammar.spelling import with_one_spelling
from jkv.grammar.tables import join
from jkv.grammar.tool_calls import find_refused_tools, from_tools
from jkv.grammar.vocabulary import Vocabulary, vocabulary_of

__all__ = [
    "Catalog",
    "CatalogFull",
    "Grammar",
    "NoText",
    "TooLarge",
    "Unsupported",
    "Vocabulary",
    "find_refused_tools",
    "from_choices",
    "from_json_object",
    "from_json_schema",
    "from_regex",
    "from_tools",
    "join",
    "vocabulary_of",
    "with_one_spelling",
]
