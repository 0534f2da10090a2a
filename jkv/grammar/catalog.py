"""Add and remove grammars in arrays of fixed shapes, for a running engine.

Compiled programs depend on the shapes of a logits processor's arrays. A catalog
allocates room for a number of grammars and states once; each added grammar takes a
variant and ranges of the arrays, and releases them when removed. The other grammars are
not moved, so running sequences continue.
"""

from typing import Any

import jax
import numpy as np

from jkv.arguments import explains_class
from jkv.grammar.errors import TooLarge
from jkv.grammar.grammar import PIECE, Grammar
from jkv.grammar.tables import STATE_ARRAYS, TableSizes, move
from jkv.grammar.vocabulary import Vocabulary

Array = np.ndarray[Any, Any]


class CatalogFull(ValueError):
    """The catalog has no room for another grammar; remove one first."""


@explains_class
class Catalog:
    """Fixed-size storage of several grammars.

    Example:
      >>> from jkv.grammar import Catalog, Vocabulary, from_choices
      >>> vocabulary = Vocabulary([b"y", b"yes", b"no", b"es", None], end_tokens=[4])
      >>> catalog = Catalog(vocabulary, max_grammars=2)
      >>> catalog.add(from_choices(["yes", "no"], vocabulary))
      0
      >>> catalog.grammar.num_variants
      2
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        max_grammars: int,
        max_states: int = 2**14,
        max_transitions: int = 2**20,
        max_transition_pieces: int = 2**16,
        max_masks: int = 2**12,
        max_mask_pieces: int = 2**16,
    ) -> None:
        """Allocate arrays of fixed sizes.

        Args:
          vocabulary: shared by all grammars.
          max_grammars: grammars stored at one time, the number of variants.
          max_states: states of all grammars; a JSON schema has some hundreds.
          max_transitions: transition pieces of all states, one per 16 classes of
            tokens.
          max_transition_pieces: distinct transition pieces.
          max_masks: sets of allowed tokens of all grammars.
          max_mask_pieces: distinct mask pieces, 64 bytes per 512 tokens.
        """
        num_tokens = len(vocabulary.tokens)
        self._vocabulary_size = num_tokens
        self._end_tokens = np.array(list(vocabulary.end_tokens), np.int32)
        # The rejecting and the ended state belong to no grammar. They use a class map
        # of their own, after the variants', in which all tokens are alike.
        self._lost, self._ended = max_states, max_states + 1
        self._most = TableSizes(
            max_states,
            max_transitions,
            max_transition_pieces,
            max_masks,
            max_mask_pieces,
        )
        # Indexed by field name of `Grammar`.
        self._arrays: dict[str, Array] = {
            "class_of_token": np.zeros((max_grammars + 1, num_tokens), np.uint16),
            "starts": np.full(max_grammars, self._lost, np.int32),
            "end_tokens": self._end_tokens,
            **self._make_tables(),
            **self._make_states(max_grammars),
        }
        # Per variant, the grammar's first index in each array and its sizes.
        self._entries: dict[int, tuple[TableSizes, TableSizes]] = {}

    def _make_tables(self) -> dict[str, Array]:
        """Return empty tables, with the shared rows at their ends."""
        most = self._most
        lost, nothing = most.transition_pieces, most.mask_pieces
        # The empty set and the pieces of the end tokens follow all others.
        ends = np.zeros((-(-self._vocabulary_size // (32 * PIECE)), PIECE), np.uint32)
        for token in self._end_tokens:
            ends.reshape(-1)[token // 32] |= np.uint32(1 << (token % 32))
        pieces_of_ends = nothing + 1 + np.arange(len(ends))
        return {
            "transitions": _filled((most.transitions + 2,), lost, lost + 1),
            "transition_pieces": _filled((lost + 2, PIECE), self._lost, self._ended),
            "masks": _filled((most.masks + 2, len(ends)), nothing, pieces_of_ends),
            "mask_pieces": np.concatenate(
                [np.zeros((nothing + 1, PIECE), np.uint32), ends]
            ),
        }

    def _make_states(self, max_grammars: int) -> dict[str, Array]:
        """Return the per-state arrays: all states rejecting, the last one ended."""
        most, shape = self._most, (self._most.states + 2,)
        forced = self._end_tokens[0] if len(self._end_tokens) == 1 else -1
        return {
            "row_of_state": _filled(shape, most.transitions, most.transitions + 1),
            "variant_of_state": np.full(shape, max_grammars, np.int32),
            "mask_of_state": _filled(shape, most.masks, most.masks + 1),
            "forced_token": _filled(shape, -1, forced),
        }

    @property
    def grammar(self) -> Grammar:
        """All stored grammars as one, an engine's logits processor.

        Pass it to `Engine(logits_processor=)`, and to `Engine.replace_logits_processor`
        after `add`. A free variant allows no token.
        """
        # Copies: on a CPU, a device array may alias the arrays that `add` writes.
        placed = {
            n: jax.device_put(values, may_alias=False)
            for n, values in self._arrays.items()
        }
        return Grammar(vocabulary_size=self._vocabulary_size, **placed)

    def add(self, grammar: Grammar) -> int:
        """Store a grammar of one language and return its variant.

        Raises:
          CatalogFull: if the other grammars leave no room.
          TooLarge: if the grammar exceeds an empty catalog.
          ValueError: for a join of several languages, or another vocabulary.
        """
        self._check(grammar)
        counts = TableSizes.of(grammar)
        if any(count > most for count, most in zip(counts, self._most, strict=True)):
            raise TooLarge(
                f"grammar of {counts} exceeds the catalog's {self._most}; raise the "
                "max_* arguments of Catalog"
            )
        free = [v for v in range(len(self._arrays["starts"])) if v not in self._entries]
        firsts = self._find_gaps(counts)
        if not free or firsts is None:
            raise CatalogFull(
                f"grammar of {counts} does not fit beside {len(self._entries)} others; "
                "remove one first"
            )
        variant = free[0]
        self._entries[variant] = firsts, counts
        self._put(grammar, variant, firsts)
        return variant

    def remove(self, variant: int) -> None:
        """Free the room of a variant; no running sequence may use it.

        Raises:
          KeyError: if the variant is free.
        """
        first, count = (sizes.states for sizes in self._entries.pop(variant))
        self._arrays["mask_of_state"][first : first + count] = self._most.masks
        self._arrays["forced_token"][first : first + count] = -1
        self._arrays["starts"][variant] = self._lost

    def _check(self, grammar: Grammar) -> None:
        ends = np.asarray(grammar.end_tokens)
        is_same = grammar.vocabulary_size == self._vocabulary_size
        if not is_same or not np.array_equal(ends, self._end_tokens):
            raise ValueError(
                "grammar must be of the catalog's vocabulary, got another vocabulary "
                "size or other end tokens"
            )
        if grammar.num_variants != 1:
            raise ValueError(
                "grammar must be of one language, got a join of "
                f"{grammar.num_variants}; add each by itself"
            )

    def _find_gaps(self, counts: TableSizes) -> TableSizes | None:
        """Return the first gap that fits in each array; None if one has none."""
        found = []
        for kind in range(len(counts)):
            taken = sorted(
                (firsts[kind], firsts[kind] + own[kind])
                for firsts, own in self._entries.values()
            )
            starts = [0, *(stop for _, stop in taken)]
            stops = [*(start for start, _ in taken), self._most[kind]]
            gaps = [stop - start for start, stop in zip(starts, stops, strict=True)]
            fits = [i for i, gap in enumerate(gaps) if gap >= counts[kind]]
            if not fits:
                return None
            found.append(starts[fits[0]])
        return TableSizes(*found)

    def _put(self, grammar: Grammar, variant: int, firsts: TableSizes) -> None:
        moved = move(grammar, firsts, variant, self._lost)
        for name in TableSizes._fields[1:]:
            start = getattr(firsts, name)
            self._arrays[name][start : start + len(moved[name])] = moved[name]
        first, count = firsts.states, grammar.num_states
        for name in STATE_ARRAYS:
            self._arrays[name][first : first + count] = moved[name][:count]
        for name in ("class_of_token", "starts"):
            self._arrays[name][variant] = moved[name][0]


def _filled(shape: tuple[int, ...], value: int, last: Any) -> Array:
    """Return an array of `value` with `last` at its end, i32[...]."""
    array = np.full(shape, value, np.int32)
    array[-1] = last
    return array
