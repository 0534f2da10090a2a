"""Grammars of choices, patterns, schemas and rules, and of several after each other."""

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
    list_asked,
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
    """Make a grammar of texts that have parts after each other.

    Args:
      parts: texts that stand as they are, and `Until`, `Schema`, `Pattern`, `Choices`,
        `Rules` and `Either`.
      vocabulary: of the model.
      max_bytes: of the tables, and of the memory that compiling takes beside the
        vocabulary's own; steps are bounded in proportion.
      timeout: seconds that compiling may take, or a function that is asked now and then
        whether to stop, in any thread; None for any time.
      folder: where compiled grammars are kept and found again; None for nowhere.

    Raises:
      NoText: the vocabulary can spell none of the texts, or there are none (a
        ValueError).
      Unsupported: a part is not served, at which place (a ValueError).
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

    def make() -> Grammar:
        bounds = Bounds(max_bytes, timeout)
        try:
            automaton = determinize(join_parts(parts, bounds), bounds)
        except RecursionError as error:
            raise TooLarge("the language is nested too deeply") from error
        except UnicodeEncodeError as error:
            raise Malformed(
                f"{error.object!r:.60} has half of a surrogate pair, which is no "
                f"character"
            ) from error
        table = make_table(automaton, vocabulary, bounds)
        return make_grammar(table, vocabulary, bounds)

    return keep(folder, vocabulary, list_asked(parts), make, max_bytes)


set_defaults(Limits, concatenate)


@explains_arguments
def from_choices(
    texts: Sequence[str], vocabulary: Vocabulary, **limits: Unpack[Limits]
) -> Grammar:
    """Make a grammar whose texts are some given ones.

    Args:
      texts: to choose from.
      vocabulary: of the model.
      **limits: `max_bytes`, `timeout` and `folder`, as `concatenate` has them.

    Raises:
      NoText: the vocabulary can spell none of them, or none are given (a ValueError).
      TooLarge: `max_bytes` or `timeout` is exceeded (a ValueError).

    Example:
      >>> from jkv.grammar import Vocabulary, from_choices
      >>> vocabulary = Vocabulary([b"y", b"yes", b"no", b"es", None], end_tokens=[4])
      >>> grammar = from_choices(["yes", "no"], vocabulary)
      >>> import jax.numpy as jnp
      >>> state = grammar.begin(jnp.array([0]), jnp.array([[]], int))
      >>> grammar.steer(state, jnp.zeros((1, 5))).tolist()
      [[0.0, 0.0, 0.0, -inf, -inf]]
    """
    return concatenate([Choices(texts)], vocabulary, **limits)


@explains_arguments
def from_regex(
    pattern: str, vocabulary: Vocabulary, **limits: Unpack[Limits]
) -> Grammar:
    r"""Make a grammar whose texts match a regular expression, from end to end.

    Args:
      pattern: in the syntax of Python's `re`, over Unicode characters: `.` is any but
        a line's end, `\d` a digit of any script. Greedy or not makes no difference.
      vocabulary: of the model.
      **limits: `max_bytes`, `timeout` and `folder`, as `concatenate` has them.

    Raises:
      Unsupported: it is no pattern, or it has look-around, references back, `\b`,
        atomic groups or lines as a flag (a ValueError).
      NoText: the vocabulary can spell none of the texts (a ValueError).
      TooLarge: `max_bytes` or `timeout` is exceeded (a ValueError).

    Example:
      >>> from jkv.grammar import Vocabulary, from_regex
      >>> vocabulary = Vocabulary([b"a", b"b", b"ab", b"ba", None], end_tokens=[4])
      >>> grammar = from_regex("(ab)+", vocabulary)
      >>> import jax.numpy as jnp
      >>> state = grammar.begin(jnp.array([0]), jnp.array([[]], int))
      >>> state = grammar.advance(state, jnp.array([2]))
      >>> grammar.steer(state, jnp.zeros((1, 5))).tolist()
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
    """Make a grammar whose texts derive from the rule `root`, in llama.cpp's notation.

    A rule that names itself first or last in its ways is any number of repetitions. Any
    other that leads back to itself goes so deep and no deeper, so that texts are fewer.

    Args:
      text: rules as in `root ::= "yes" | [0-9]+ ("." [0-9]{1,2})?`, with `#` before
        what is not read.
      vocabulary: of the model.
      recursion: how often a rule may stand in itself.
      **limits: `max_bytes`, `timeout` and `folder`, as `concatenate` has them.

    Raises:
      Unsupported: it is no such grammar, with the line (a ValueError); tokens in it are
        not served.
      NoText: the vocabulary can spell none of the texts, or all are nested more deeply
        (a ValueError).
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
    """Make a grammar whose texts are the JSON values that a schema describes.

    Properties stand in the order in which the schema names them. What a schema leaves
    open is left out: an object has no properties and a tuple no items but those that
    the schema speaks of. The page on grammars lists the keywords that are served,
    ignored and refused.

    Args:
      schema: of JSON Schema, draft 2020-12, with what older drafts wrote otherwise.
      vocabulary: of the model.
      whitespace: pattern of what may stand around brackets, commas and colons; once at
        each place.
      depth: levels of arrays and objects in a value of which the schema says nothing.
      recursion: how often a schema that refers to itself may stand in itself; less
        often where that takes more than some 16,000 states.
      strict: whether keywords and formats that JSON Schema does not define are errors;
        they are ignored otherwise, as the standard says.
      around: pattern of what may stand before the value and behind it; nothing unless
        said, as models that begin with a blank rarely stop.
      **limits: `max_bytes`, `timeout` and `folder`, as `concatenate` has them.

    Raises:
      Unsupported: a keyword that is not served, or has a value that it cannot have,
        with its place in the schema (a ValueError).
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
    """Make a grammar whose texts are any JSON object.

    Args:
      vocabulary: of the model.
      whitespace: as `from_json_schema` has it.
      depth: levels of arrays and objects inside of the object.
      **limits: `max_bytes`, `timeout` and `folder`, as `concatenate` has them.

    Raises:
      NoText: the vocabulary spells no object (a ValueError).
      TooLarge: `max_bytes` or `timeout` is exceeded (a ValueError).
    """
    return concatenate(
        [Schema({"type": "object"}, whitespace, depth)], vocabulary, **limits
    )
