"""Convert between automata over tokens and the arrays of a `Grammar`."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import numpy.typing as npt

from jkv.arguments import explains_arguments
from jkv.grammar.bounds import UNBOUNDED, Bounds
from jkv.grammar.grammar import PIECE, Grammar
from jkv.grammar.token_table import TokenTable
from jkv.grammar.vocabulary import Vocabulary

Ints = npt.NDArray[np.integer[Any]]


def make_grammar(table: TokenTable, vocabulary: Vocabulary, bounds: Bounds) -> Grammar:
    """Build the arrays of one language."""
    num_states, num_tokens = len(table.transitions), len(vocabulary.tokens)
    lost, over = num_states, num_states + 1
    ends = list(vocabulary.end_tokens)
    allowed, mask_of_state = np.unique(
        np.column_stack([table.transitions >= 0, table.accepting]),
        axis=0,
        return_inverse=True,
    )
    num_words = -(-num_tokens // 32)
    # End tokens form one more class, the last. Merging equal pieces may save memory
    # later, but the full rows are built first.
    end_class = table.transitions.shape[1]
    entries = (num_states + 2) * (end_class + 1)
    needed = (
        num_tokens * _narrow(end_class + 1).itemsize
        + entries * _narrow(over + 1).itemsize
        + (len(allowed) + 2) * num_words * 4
        + (num_states + 2) * 16
    )
    bounds.hold(
        needed,
        f"a grammar of {num_states:,} states, {end_class + 1:,} classes and "
        f"{len(allowed):,} sets of {num_tokens:,} tokens",
    )
    transitions = np.full((num_states + 2, end_class + 1), lost, np.int32)
    transitions[:-2, :-1] = np.where(table.transitions < 0, lost, table.transitions)
    transitions[:-2, -1] = np.where(table.accepting, over, lost)
    transitions[over] = over
    class_of_token = table.class_of_token.copy()
    class_of_token[ends] = end_class
    # The rejecting state allows nothing, the ended state the end tokens.
    extra = np.zeros((2, end_class + 1), bool)
    extra[1, -1] = True
    sets = np.concatenate([allowed, extra])
    masks = np.stack([_pack(row[class_of_token], num_words) for row in sets])
    pieces_of_set, mask_pieces = _cut(masks)
    pieces_of_state, transition_pieces = _cut(transitions)
    per_state = pieces_of_state.shape[1]
    mask_of_state = np.append(mask_of_state.reshape(-1), len(allowed) + np.arange(2))
    forced = np.array([_only(row, class_of_token) for row in sets], np.int32)
    return _assemble(
        class_of_token=class_of_token[None],
        transition_pieces=transition_pieces,
        transitions=pieces_of_state.reshape(-1),
        row_of_state=np.arange(num_states + 2) * per_state,
        variant_of_state=np.zeros(num_states + 2, np.int32),
        mask_pieces=mask_pieces,
        masks=pieces_of_set,
        mask_of_state=mask_of_state,
        forced_token=forced[mask_of_state],
        starts=np.zeros(1, np.int32),
        end_tokens=np.array(ends),
        vocabulary_size=num_tokens,
    )


@explains_arguments
def join(grammars: Sequence[Grammar]) -> Grammar:
    """Combine grammars into one with a variant for each, in the given order.

    The variants of a joined grammar stay adjacent.

    Args:
      grammars: of one vocabulary.

    Raises:
      ValueError: none are given, or vocabularies or end tokens differ.
    """
    if not grammars:
        raise ValueError("grammars is empty; pass at least one")
    sizes = {grammar.vocabulary_size for grammar in grammars}
    ends = {tuple(np.asarray(grammar.end_tokens).tolist()) for grammar in grammars}
    if len(sizes) > 1 or len(ends) > 1:
        raise ValueError(
            f"grammars must be of one vocabulary, got sizes {sorted(sizes)} and end "
            f"tokens {sorted(ends)}"
        )
    counts = [(*TableSizes.of(grammar), grammar.num_variants) for grammar in grammars]
    *firsts, total = np.cumsum([[0] * len(counts[0]), *counts], axis=0).tolist()
    moved = [
        move(grammar, TableSizes(*first), variant, total[0])
        for grammar, (*first, variant) in zip(grammars, firsts, strict=True)
    ]
    joined = {name: np.concatenate([each[name] for each in moved]) for name in _ROWS}
    for name in STATE_ARRAYS:  # the rejecting and ended states follow all others
        own = [each[name][:-2] for each in moved]
        joined[name] = np.concatenate([*own, moved[-1][name][-2:]])
    for name in ("masks", "transitions"):
        pieces = f"{name.removesuffix('s')}_pieces"
        joined[pieces], which = np.unique(joined[pieces], axis=0, return_inverse=True)
        joined[name] = which.reshape(-1)[joined[name]]
    return _assemble(
        end_tokens=np.asarray(grammars[0].end_tokens),
        vocabulary_size=grammars[0].vocabulary_size,
        **joined,
    )


@explains_arguments
def wait_for(
    tokens: Sequence[int],
    grammar: Grammar,
    vocabulary: Vocabulary,
    *,
    is_required: bool = False,
) -> Grammar:
    """Return a grammar that constrains only the tokens after a trigger token.

    Every token, special ones included, is allowed until the first of `tokens`; the
    tokens after it form a string of `grammar`. A template's own token, such as the
    beginning of a tool call, so enables the grammar. For a trigger in plain text use
    `Until(mark, is_optional=True)`.

    Args:
      tokens: trigger ids, any of the vocabulary except end tokens.
      grammar: of one language, compiled for the vocabulary.
      vocabulary: of the model.
      is_required: forbid end tokens before the trigger.

    Raises:
      ValueError: for invalid ids, or a grammar of several languages.

    Example:
      >>> from jkv.grammar import Vocabulary, from_choices, wait_for
      >>> vocabulary = Vocabulary([b"a", b"b", None, None], end_tokens=[3])
      >>> grammar = wait_for([2], from_choices(["ab"], vocabulary), vocabulary)
      >>> import jax.numpy as jnp
      >>> state = grammar.begin(jnp.array([0]), jnp.array([[]], int))
      >>> grammar.process(state, jnp.zeros((1, 4))).tolist()
      [[0.0, 0.0, 0.0, 0.0]]
      >>> for token in (1, 2):
      ...     state = grammar.advance(state, jnp.array([token]))
      >>> grammar.process(state, jnp.zeros((1, 4))).tolist()
      [[0.0, -inf, -inf, -inf]]
    """
    size, ends = len(vocabulary.tokens), {*vocabulary.end_tokens}
    if grammar.num_variants != 1 or grammar.vocabulary_size != size:
        raise ValueError(
            f"grammar must be of one language and {size} tokens, got "
            f"{grammar.num_variants} languages and {grammar.vocabulary_size} tokens"
        )
    wrong = [token for token in tokens if not 0 <= token < size or token in ends]
    if wrong or not tokens:
        raise ValueError(
            f"tokens must be ids from 0 to {size - 1} other than end tokens, got "
            f"{wrong or 'none'}"
        )
    inner = _read(grammar)
    # Trigger tokens move to new classes with the transitions of their old ones.
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


class TableSizes(NamedTuple):
    """Sizes of the arrays of a grammar, or of a catalog."""

    states: int
    transitions: int
    transition_pieces: int
    masks: int
    mask_pieces: int

    @classmethod
    def of(cls, grammar: Grammar) -> Self:
        """Return a grammar's sizes."""
        arrays = (getattr(grammar, name) for name in cls._fields[1:])
        return cls(grammar.num_states, *(array.shape[0] for array in arrays))


STATE_ARRAYS = "row_of_state", "variant_of_state", "mask_of_state", "forced_token"
_ROWS = "class_of_token", "starts", *TableSizes._fields[1:]


def move(
    grammar: Grammar, firsts: TableSizes, variant: int, lost: int
) -> dict[str, npt.NDArray[Any]]:
    """Return a grammar's arrays, renumbered to follow those of other grammars.

    Rows start at `firsts` and variants at `variant`. The rejecting state becomes
    `lost`, the ended state `lost + 1`.
    """
    arrays = {name: np.asarray(values) for name, values in vars(grammar).items()}
    wide = {name: arrays[name].astype(np.int32) for name in TableSizes._fields[1:4]}
    targets, count = wide["transition_pieces"], grammar.num_states
    return arrays | {
        "transition_pieces": targets
        + np.where(targets < count, firsts.states, lost - count),
        "transitions": wide["transitions"] + firsts.transition_pieces,
        "masks": wide["masks"] + firsts.mask_pieces,
        "row_of_state": arrays["row_of_state"] + firsts.transitions,
        "variant_of_state": arrays["variant_of_state"] + variant,
        "mask_of_state": arrays["mask_of_state"] + firsts.masks,
        "starts": arrays["starts"] + firsts.states,
    }


def _read(grammar: Grammar) -> TokenTable:
    """Return the token table of a grammar, with an empty class at its end."""
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


def _assemble(*, vocabulary_size: int, **arrays: Ints) -> Grammar:
    """Cast each array to its smallest dtype and put it on the device."""
    num_states = len(arrays["row_of_state"])
    dtypes = {
        "class_of_token": _narrow(int(arrays["class_of_token"].max()) + 1),
        "transition_pieces": _narrow(num_states),
        "transitions": _narrow(len(arrays["transition_pieces"])),
        "mask_pieces": np.dtype(np.uint32),
        "masks": _narrow(len(arrays["mask_pieces"])),
    }
    placed = {
        name: jax.device_put(values.astype(dtypes.get(name, np.dtype(np.int32))))
        for name, values in arrays.items()
    }
    return Grammar(vocabulary_size=vocabulary_size, **placed)


def _narrow(num_values: int) -> np.dtype[np.generic]:
    """Return the smallest dtype that holds `num_values` distinct values."""
    if num_values <= 2**8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if num_values <= 2**16 else np.int32)


def _cut(rows: Ints) -> tuple[Ints, Ints]:
    """Split rows into pieces; return piece numbers, [R, n], and distinct pieces."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % PIECE)))
    pieces, which = np.unique(padded.reshape(-1, PIECE), axis=0, return_inverse=True)
    return which.reshape(len(rows), -1), pieces


def _pack(bits: npt.NDArray[np.bool_], num_words: int) -> npt.NDArray[np.uint32]:
    padded = np.zeros(num_words * 32, bool)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


def _only(allowed: npt.NDArray[np.bool_], class_of_token: Ints) -> int:
    """Return the only allowed token; -1 for none or several."""
    if allowed.sum() != 1:
        return -1
    found = np.flatnonzero(class_of_token == np.argmax(allowed))
    return int(found[0]) if len(found) == 1 else -1
