"""Grammars that wait for a token, and leave a text free until it comes."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jkv.grammar.bounds import UNBOUNDED
from jkv.grammar.grammar import PIECE, Grammar
from jkv.grammar.tables import make_grammar
from jkv.grammar.token_table import TokenTable
from jkv.grammar.vocabulary import Vocabulary


def wait_for(
    tokens: Sequence[int],
    grammar: Grammar,
    vocabulary: Vocabulary,
    *,
    is_required: bool = False,
) -> Grammar:
    """Make a grammar that steers what follows a token, and nothing before it.

    Until one of the tokens comes every token is allowed, special ones, too; what comes
    behind the first of them is a text of the grammar. So a template's own token, such
    as one that begins a call, turns the grammar on. For marks that are texts there is
    `Until(mark, is_optional=True)`.

    Args:
      tokens: ids, any of the vocabulary but end tokens.
      grammar: of one language, made for the vocabulary.
      vocabulary: of the model.
      is_required: whether a text may not end before.

    Raises:
      ValueError: for ids that are none of these, or a grammar of several languages.

    Example:
      >>> from jkv.grammar import Vocabulary, from_choices, wait_for
      >>> vocabulary = Vocabulary([b"a", b"b", None, None], end_tokens=[3])
      >>> grammar = wait_for([2], from_choices(["ab"], vocabulary), vocabulary)
      >>> import jax.numpy as jnp
      >>> state = grammar.begin(jnp.array([0]), jnp.array([[]], int))
      >>> grammar.steer(state, jnp.zeros((1, 4))).tolist()
      [[0.0, 0.0, 0.0, 0.0]]
      >>> for token in (1, 2):
      ...     state = grammar.advance(state, jnp.array([token]))
      >>> grammar.steer(state, jnp.zeros((1, 4))).tolist()
      [[0.0, -inf, -inf, -inf]]
    """
    size, ends = len(vocabulary.tokens), {*vocabulary.end_tokens}
    if grammar.num_variants != 1 or grammar.vocabulary_size != size:
        raise ValueError("wait_for takes a grammar of one language of this vocabulary")
    wrong = [token for token in tokens if not 0 <= token < size or token in ends]
    if wrong or not tokens:
        raise ValueError(
            f"wait_for takes ids of tokens from 0 to {size - 1} that end no text, got "
            f"{wrong or 'none'}"
        )
    inner = _read(grammar)
    # A class more for the tokens waited for, of each class that they are of: they lead
    # where they led before, too.
    classes = inner.class_of_token.copy()
    num_classes = inner.transitions.shape[1]
    old = np.unique(classes[list(tokens)])
    for new, which in enumerate(old):
        own = [token for token in tokens if classes[token] == which]
        classes[own] = num_classes + new
    table = np.concatenate([inner.transitions, inner.transitions[:, old]], axis=1)
    waiting = np.zeros(table.shape[1], np.int32)
    waiting[num_classes:] = 1
    moved = np.where(table < 0, np.int32(-1), table + 1)
    accepting = np.append(not is_required, inner.accepting)
    whole = TokenTable(np.vstack([waiting, moved]), accepting, classes)
    return make_grammar(whole, vocabulary, UNBOUNDED)


def _read(grammar: Grammar) -> TokenTable:
    """Return the table that a grammar was made of, a class of nothing behind it."""
    num_states = grammar.num_states
    rows = np.asarray(grammar.row_of_state)[:num_states]
    per_state = len(np.asarray(grammar.transitions)) // (num_states + 2)
    pieces = np.asarray(grammar.transitions)[rows[:, None] + np.arange(per_state)]
    table = np.asarray(grammar.transition_pieces)[pieces].astype(np.int32)
    table = table.reshape(num_states, per_state * PIECE)
    classes = np.asarray(grammar.class_of_token)[0].astype(np.int32)
    end_class = int(classes[int(np.asarray(grammar.end_tokens)[0])])
    accepting: npt.NDArray[np.bool_] = table[:, end_class] == num_states + 1
    table = np.where(table[:, :end_class] < num_states, table[:, :end_class], -1)
    nothing = np.full((num_states, 1), -1, np.int32)
    return TokenTable(np.hstack([table, nothing]), accepting, classes)
