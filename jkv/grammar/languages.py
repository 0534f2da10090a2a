"""Grammars of texts to choose from and of regular expressions."""

from collections.abc import Sequence

from jkv.grammar.bounds import Bounds
from jkv.grammar.determinization import determinize
from jkv.grammar.errors import NoText, TooLarge
from jkv.grammar.expressions import Choice, Expression, Leaf, Literal
from jkv.grammar.grammar import Grammar
from jkv.grammar.kept_files import Folder, keep
from jkv.grammar.regexes import compile_regex
from jkv.grammar.tables import make_grammar
from jkv.grammar.token_table import make_table
from jkv.grammar.vocabulary import Vocabulary

MAX_BYTES = 2**28


def from_choices(
    texts: Sequence[str],
    vocabulary: Vocabulary,
    *,
    max_bytes: int = MAX_BYTES,
    timeout: float | None = None,
    folder: Folder = None,
) -> Grammar:
    """Make a grammar whose texts are some given ones.

    Args:
      texts: to choose from.
      vocabulary: of the model.
      max_bytes: of the tables, and of the memory that compiling takes beside the
        vocabulary's own; steps are bounded in proportion.
      timeout: seconds that compiling may take; None for any time.
      folder: where compiled grammars are kept and found again; None for nowhere.

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
    if not texts:
        raise NoText("there are no texts to choose from")
    choice = Choice([Literal(text.encode()) for text in texts])

    def make() -> Grammar:
        return compile_expression(choice, vocabulary, Bounds(max_bytes, timeout))

    return keep(folder, vocabulary, ["choices", list(texts)], make)


def from_regex(
    pattern: str,
    vocabulary: Vocabulary,
    *,
    max_bytes: int = MAX_BYTES,
    timeout: float | None = None,
    folder: Folder = None,
) -> Grammar:
    r"""Make a grammar whose texts match a regular expression, from end to end.

    Args:
      pattern: in the syntax of Python's `re`, over Unicode characters: `.` is any but
        a line's end, `\d` a digit of any script. Greedy or not makes no difference.
      vocabulary: of the model.
      max_bytes: of the tables, and of the memory that compiling takes beside the
        vocabulary's own; steps are bounded in proportion.
      timeout: seconds that compiling may take; None for any time.
      folder: where compiled grammars are kept and found again; None for nowhere.

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

    def make() -> Grammar:
        bounds = Bounds(max_bytes, timeout)
        leaf = Leaf(compile_regex(pattern, bounds))
        return compile_expression(leaf, vocabulary, bounds)

    return keep(folder, vocabulary, ["regex", pattern], make)


def compile_expression(
    expression: Expression, vocabulary: Vocabulary, bounds: Bounds
) -> Grammar:
    """Make the grammar of an expression over bytes."""
    try:
        automaton = determinize(expression, bounds)
    except RecursionError as error:
        raise TooLarge("what is nested in the language is nested too deeply") from error
    table = make_table(automaton, vocabulary, bounds)
    return make_grammar(table, vocabulary, bounds)
