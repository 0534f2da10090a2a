"""From automata over tokens to the arrays of a `Grammar`, for one language or many."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jkv.grammar.bounds import Bounds
from jkv.grammar.grammar import PIECE, Grammar
from jkv.grammar.token_table import TokenTable
from jkv.grammar.vocabulary import Vocabulary

Ints = npt.NDArray[np.integer[Any]]


def make_grammar(table: TokenTable, vocabulary: Vocabulary, bounds: Bounds) -> Grammar:
    """Lay out one language.

    Raises:
      TooLarge: the arrays exceed the bounds.
    """
    num_states, num_tokens = len(table.transitions), len(vocabulary.tokens)
    lost, over = num_states, num_states + 1
    ends = list(vocabulary.end_tokens)
    allowed, mask_of_state = np.unique(
        np.column_stack([table.transitions >= 0, table.accepting]),
        axis=0,
        return_inverse=True,
    )
    num_words = -(-num_tokens // 32)
    # End tokens are one more class, behind the others. Equal pieces may spare some of
    # what is counted here, but the rows are made first.
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
    # Of a lost text nothing is allowed, of one that has ended its end.
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


def join(grammars: Sequence[Grammar]) -> Grammar:
    """Serve several languages in one call, a variant each, in the order given.

    Variants of a grammar that is itself a join follow each other.

    Args:
      grammars: of one vocabulary.

    Raises:
      ValueError: none are given, or vocabularies or end tokens differ.
    """
    if not grammars:
        raise ValueError("join needs at least one grammar")
    sizes = {grammar.vocabulary_size for grammar in grammars}
    ends = {tuple(np.asarray(grammar.end_tokens).tolist()) for grammar in grammars}
    if len(sizes) > 1 or len(ends) > 1:
        raise ValueError(
            f"grammars of different vocabularies: sizes {sorted(sizes)}, end tokens "
            f"{sorted(ends)}"
        )
    total = sum(grammar.num_states for grammar in grammars)
    parts: dict[str, list[Ints]] = {name: [] for name in _STATE_ARRAYS}
    tails: dict[str, list[Ints]] = {}
    first_state = first_entry = first_variant = 0
    rows: dict[str, list[Ints]] = {name: [] for name in _PIECE_ARRAYS}
    num_masks = num_mask_pieces = num_pieces = 0
    for grammar in grammars:
        own = {name: np.asarray(getattr(grammar, name)) for name in _STATE_ARRAYS}
        count = grammar.num_states
        own["row_of_state"] = own["row_of_state"] + first_entry
        own["variant_of_state"] = own["variant_of_state"] + first_variant
        own["mask_of_state"] = own["mask_of_state"] + num_masks
        for name, values in own.items():
            parts[name].append(values[:count])
            tails[name] = [values[count:]]
        targets = np.asarray(grammar.transition_pieces).astype(np.int32)
        moved = np.where(
            targets < count, targets + first_state, targets - count + total
        )
        rows["transition_pieces"].append(moved)
        entries = np.asarray(grammar.transitions).astype(np.int32)
        rows["transitions"].append(entries + num_pieces)
        rows["mask_pieces"].append(np.asarray(grammar.mask_pieces))
        masks = np.asarray(grammar.masks).astype(np.int32)
        rows["masks"].append(masks + num_mask_pieces)
        first_state += count
        first_entry += len(entries)
        first_variant += grammar.num_variants
        num_masks += len(masks)
        num_pieces += len(moved)
        num_mask_pieces += len(rows["mask_pieces"][-1])
    joined = {name: np.concatenate(parts[name] + tails[name]) for name in parts}
    joined |= {name: np.concatenate(values) for name, values in rows.items()}
    for name in ("masks", "transitions"):
        pieces = f"{name.removesuffix('s')}_pieces"
        joined[pieces], which = np.unique(joined[pieces], axis=0, return_inverse=True)
        joined[name] = which.reshape(-1)[joined[name]]
    firsts = np.cumsum([0, *(grammar.num_states for grammar in grammars[:-1])])
    starts = [
        np.asarray(g.starts) + first for g, first in zip(grammars, firsts, strict=True)
    ]
    return _assemble(
        class_of_token=np.concatenate([np.asarray(g.class_of_token) for g in grammars]),
        starts=np.concatenate(starts),
        end_tokens=np.asarray(grammars[0].end_tokens),
        vocabulary_size=grammars[0].vocabulary_size,
        **joined,
    )


_PIECE_ARRAYS = "transition_pieces", "transitions", "mask_pieces", "masks"
_STATE_ARRAYS = "row_of_state", "variant_of_state", "mask_of_state", "forced_token"


def _assemble(*, vocabulary_size: int, **arrays: Ints) -> Grammar:
    """Give each array the smallest dtype that holds it, and put it on the device."""
    num_states = len(arrays["row_of_state"])
    dtypes = {
        "class_of_token": _narrow(int(arrays["class_of_token"].max()) + 1),
        "transition_pieces": _narrow(num_states),
        "transitions": _narrow(len(arrays["transition_pieces"])),
        "mask_pieces": np.dtype(np.uint32),
        "masks": _narrow(len(arrays["mask_pieces"])),
    }
    placed = {
        name: jnp.asarray(values.astype(dtypes.get(name, np.dtype(np.int32))))
        for name, values in arrays.items()
    }
    return Grammar(vocabulary_size=vocabulary_size, **placed)


def _narrow(num_values: int) -> np.dtype[np.generic]:
    """Return the smallest dtype that holds numbers below this."""
    if num_values <= 2**8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if num_values <= 2**16 else np.int32)


def _cut(rows: Ints) -> tuple[Ints, Ints]:
    """Cut rows into pieces; return each row's [R, n] and the distinct pieces."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % PIECE)))
    pieces, which = np.unique(padded.reshape(-1, PIECE), axis=0, return_inverse=True)
    return which.reshape(len(rows), -1), pieces


def _pack(bits: npt.NDArray[np.bool_], num_words: int) -> npt.NDArray[np.uint32]:
    padded = np.zeros(num_words * 32, bool)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


def _only(allowed: npt.NDArray[np.bool_], class_of_token: Ints) -> int:
    """Return the only token of a set of classes, or -1."""
    if allowed.sum() != 1:
        return -1
    found = np.flatnonzero(class_of_token == np.argmax(allowed))
    return int(found[0]) if len(found) == 1 else -1
