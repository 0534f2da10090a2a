"""Compile choices, regular expressions, JSON schemas and GBNF rules to grammars."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from jkv.arguments import explains_arguments
from jkv.grammar.bounds import Bounds, Timeout
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import Malformed, TooLarge
from jkv.grammar.grammar import Grammar
from jkv.grammar.kept_files import Folder, Limits, keep
from jkv.grammar.parts import (
    DEPTH,
    RECURSION,
    WHITESPACE,
    Choices,
    Part,
    Pattern,
    Rules,
    Schema,
    join_parts,
    list_cache_keys,
    read_list,
)
from jkv.grammar.tables import make_grammar
from jkv.grammar.token_table import make_table
from jkv.grammar.vocabulary import Vocabulary
from jkv.signatures import set_defaults

MAX_BYTES = 2**28


@explains_arguments
def concatenate(
    parts: Sequence[Part | str],
    vocabulary: Vocabulary,
    *,
    max_bytes: int = MAX_BYTES,
    timeout: Timeout = None,
    folder: Folder = None,
) -> Grammar:
    """Compile the concatenation of several languages.

    Args:
      parts: literal strings, and `Until`, `Schema`, `Pattern`, `Choices`, `Rules` and
        `Either`.
      vocabulary: of the model.
      max_bytes: limit of the tables, and of the peak host memory of compiling without
        the vocabulary's own; steps are limited in proportion.
      timeout: seconds that compiling may take, or a function polled from any thread
        that returns True to cancel; None for no limit.
      folder: cache of compiled grammars; None for no cache.

    Raises:
      NoText: the language is empty, or the vocabulary can spell none of its strings (a
        ValueError).
      Unsupported: a part uses an unsupported feature; the message has its place (a
        ValueError).
      TooLarge: `max_bytes` or `timeout` is exceeded (a ValueError).

    Example:
      >>> from jkv.grammar import Choices, Until, Vocabulary, concatenate
      >>> tokens = [bytes([byte]) for byte in range(128)]
      >>> vocabulary = Vocabulary([*tokens, None], end_tokens=[128])
      >>> parts = [Until("</think>"), Choices(["yes", "no"])]
      >>> grammar = concatenate(parts, vocabulary)
      >>> import jax.numpy as jnp
      >>> state = grammar.begin(jnp.array([0]), jnp.array([[]], int))
      >>> for byte in b"is 7 < 9? </think>n":
      ...     state = grammar.advance(state, jnp.array([byte]))
      >>> chr(grammar.forced(state)[0])
      'o'
    """

    parts = read_list("parts", parts, Part | str)

    def make() -> Grammar:
        bounds = Bounds(max_bytes, timeout)
        try:
            automaton = determinize(join_parts(parts, bounds), bounds)
        except RecursionError as error:
            raise TooLarge("the language is nested too deeply") from error
        except UnicodeEncodeError as error:
            raise Malformed(
                f"{error.object!r:.60} has a lone surrogate; pass valid Unicode"
            ) from error
        table = make_table(automaton, vocabulary, bounds)
        return make_grammar(table, vocabulary, bounds)

    return keep(folder, vocabulary, list_cache_keys(parts), make, max_bytes)


set_defaults(Limits, concatenate)


@explains_arguments
def from_choices(
    texts: Sequence[str], vocabulary: Vocabulary, **limits: Unpack[Limits]
) -> Grammar:
    """Compile a choice between given strings.

    Args:
      texts: to choose from.
      vocabulary: of the model.
      **limits: `max_bytes`, `timeout` and `folder`, as in `concatenate`.

    Raises:
      NoText: `texts` is empty, or the vocabulary can spell none of them (a ValueError).
      TooLarge: `max_bytes` or `timeout` is exceeded (a ValueError).

    Example:
      >>> from jkv.grammar import Vocabulary, from_choices
      >>> vocabulary = Vocabulary([b"y", b"yes", b"no", b"es", None], end_tokens=[4])
      >>> grammar = from_choices(["yes", "no"], vocabulary)
      >>> import jax.numpy as jnp
      >>> state = grammar.begin(jnp.array([0]), jnp.array([[]], int))
      >>> grammar.process(state, jnp.zeros((1, 5))).tolist()
      [[0.0, 0.0, 0.0, -inf, -inf]]
    """
    return concatenate([Choices(texts)], vocabulary, **limits)


@explains_arguments
def from_regex(
    pattern: str, vocabulary: Vocabulary, **limits: Unpack[Limits]
) -> Grammar:
    r"""Compile a regular expression, matched from end to end.

    Args:
      pattern: in the syntax of Python's `re`, over Unicode characters: `.` is any
        except a newline, `\d` a digit of any script. Greediness has no effect.
      vocabulary: of the model.
      **limits: `max_bytes`, `timeout` and `folder`, as in `concatenate`.

    Raises:
      Unsupported: the pattern is invalid, or has nested assertions, backreferences,
        atomic groups or the flags MULTILINE or LOCALE (a ValueError).
      NoText: the vocabulary can spell none of the matches (a ValueError).
      TooLarge: `max_bytes` or `timeout` is exceeded (a ValueError).

    Example:
      >>> from jkv.grammar import Vocabulary, from_regex
      >>> vocabulary = Vocabulary([b"a", b"b", b"ab", b"ba", None], end_tokens=[4])
      >>> grammar = from_regex("(ab)+", vocabulary)
      >>> import jax.numpy as jnp
      >>> state = grammar.begin(jnp.array([0]), jnp.array([[]], int))
      >>> state = grammar.advance(state, jnp.array([2]))
      >>> grammar.process(state, jnp.zeros((1, 5))).tolist()
      [[0.0, -inf, 0.0, -inf, 0.0]]
    """
    return concatenate([Pattern(pattern)], vocabulary, **limits)


@explains_arguments
def from_gbnf(
    text: str,
    vocabulary: Vocabulary,
    *,
    recursion: int = RECURSION,
    **limits: Unpack[Limits],
) -> Grammar:
    """Compile GBNF, llama.cpp's grammar notation, from the rule `root`.

    A left- or right-recursive rule becomes a repetition, of any length. Other recursion
    is expanded to a fixed depth, so the language is a subset.

    Args:
      text: rules such as `root ::= "yes" | [0-9]+ ("." [0-9]{1,2})?`; `#` starts a
        comment.
      vocabulary: of the model.
      recursion: depth to which a rule may contain itself.
      **limits: `max_bytes`, `timeout` and `folder`, as in `concatenate`.

    Raises:
      Unsupported: a rule is invalid or has token literals; the message has the line (a
        ValueError).
      NoText: the vocabulary can spell no string, or all are nested more deeply (a
        ValueError).
      TooLarge: `max_bytes` or `timeout` is exceeded (a ValueError).

    Example:
      >>> from jkv.grammar import Vocabulary, from_gbnf
      >>> vocabulary = Vocabulary([b"(", b")", b"x", None], end_tokens=[3])
      >>> rules = 'root ::= "(" root ")" | "x"'
      >>> from_gbnf(rules, vocabulary).num_states
      6
    """
    return concatenate([Rules(text, recursion)], vocabulary, **limits)


@explains_arguments
def from_json_schema(
    schema: Mapping[str, Any] | bool,
    vocabulary: Vocabulary,
    *,
    whitespace: str = WHITESPACE,
    depth: int = DEPTH,
    recursion: int = RECURSION,
    strict: bool = False,
    around: str = "",
    **limits: Unpack[Limits],
) -> Grammar:
    """Compile a JSON schema to the JSON values that it describes.

    Properties stand in the order of the schema. Properties and items that the schema
    does not mention are excluded. The page on grammars lists the supported, ignored and
    refused keywords.

    Args:
      schema: of JSON Schema, draft 2020-12, or in the notation of drafts 4 to 2019-09.
      vocabulary: of the model.
      whitespace: pattern of the space around each bracket, comma and colon.
      depth: levels of arrays and objects in a value without a schema.
      recursion: depth to which a recursive schema may contain itself; reduced if it
        takes more than some 16,000 states.
      strict: raise for keywords and formats that JSON Schema does not define; they are
        ignored by default, as the standard says.
      around: pattern of the text before and after the value; empty by default, since
        models that begin with a space rarely stop.
      **limits: `max_bytes`, `timeout` and `folder`, as in `concatenate`.

    Raises:
      Unsupported: a keyword is unsupported or has an invalid value; the message has its
        place in the schema (a ValueError).
      NoText: no value is valid, or the vocabulary spells none (a ValueError).
      TooLarge: `max_bytes` or `timeout` is exceeded, or the schema is nested too deeply
        (a ValueError).

    Example:
      >>> from jkv.grammar import Vocabulary, from_json_schema
      >>> tokens = [bytes([byte]) for byte in range(128)]
      >>> vocabulary = Vocabulary([*tokens, None], end_tokens=[128])
      >>> schema = {"type": "array", "items": {"enum": ["yes", "no"]}, "maxItems": 2}
      >>> from_json_schema(schema, vocabulary, whitespace="").num_states
      16
    """
    return concatenate(
        [Schema(schema, whitespace, depth, recursion, strict, around)],
        vocabulary,
        **limits,
    )


@explains_arguments
def from_json_object(
    vocabulary: Vocabulary,
    *,
    whitespace: str = WHITESPACE,
    depth: int = DEPTH,
    **limits: Unpack[Limits],
) -> Grammar:
    """Compile the language of all JSON objects.

    Args:
      vocabulary: of the model.
      whitespace: as in `from_json_schema`.
      depth: levels of arrays and objects inside the object.
      **limits: `max_bytes`, `timeout` and `folder`, as in `concatenate`.

    Raises:
      NoText: the vocabulary spells no object (a ValueError).
      TooLarge: `max_bytes` or `timeout` is exceeded (a ValueError).
    """
    return concatenate(
        [Schema({"type": "object"}, whitespace, depth)], vocabulary, **limits
    )
