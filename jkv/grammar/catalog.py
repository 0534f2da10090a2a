"""Grammars that come and go in arrays of fixed shapes, for an engine that never stops.

An engine's programs are compiled for the shapes of what steers it. A catalog makes room
for so many grammars of so many states once; each one that comes takes a variant and
ranges of the arrays, and gives them back when it goes. The others stay where they are,
so that texts under way go on.
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
    """A grammar finds no room beside those that are there; remove one of them."""


@explains_class
class Catalog:
    """Room for grammars, and those that are in it.

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
        """Make room; the arrays are of these sizes from now on.

        Args:
          vocabulary: of all grammars.
          max_grammars: that are here at one time, the number of variants.
          max_states: of all of them together; a JSON schema has some hundreds.
          max_transitions: pieces of all states together, one for 16 classes of tokens.
          max_transition_pieces: those of them that differ.
          max_masks: sets of allowed tokens of all together.
          max_mask_pieces: pieces of these sets that differ, 64 bytes for 512 tokens.
        """
        num_tokens = len(vocabulary.tokens)
        self._vocabulary_size = num_tokens
        self._end_tokens = np.array(list(vocabulary.end_tokens), np.int32)
        # Of no grammar: a text that is lost, and one that has ended. They have a class
        # map of their own, behind those of the variants, in which all tokens are alike.
        self._lost, self._ended = max_states, max_states + 1
        self._most = TableSizes(
            max_states,
            max_transitions,
            max_transition_pieces,
            max_masks,
            max_mask_pieces,
        )
        # By the names of a grammar's arrays.
        self._arrays: dict[str, Array] = {
            "class_of_token": np.zeros((max_grammars + 1, num_tokens), np.uint16),
            "starts": np.full(max_grammars, self._lost, np.int32),
            "end_tokens": self._end_tokens,
            **self._make_tables(),
            **self._make_states(max_grammars),
        }
        # By variant, where each grammar begins and what it takes.
        self._entries: dict[int, tuple[TableSizes, TableSizes]] = {}

    def _make_tables(self) -> dict[str, Array]:
        """Return tables without a grammar, the rows of no grammar at their ends."""
        most = self._most
        lost, nothing = most.transition_pieces, most.mask_pieces
        # What nobody allows, and the pieces of the end tokens, stand behind the others.
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
        """Return what each state has; none is of a grammar yet, the last has ended."""
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
        """All grammars that are here, as one: what steers an engine.

        Give it to `Engine(steering=)`, and to `Engine.replace_steering` whenever one
        was added. A variant that is free allows nothing.
        """
        # Copies: a device may look at the memory of the arrays themselves.
        placed = {
            n: jax.device_put(values, may_alias=False)
            for n, values in self._arrays.items()
        }
        return Grammar(vocabulary_size=self._vocabulary_size, **placed)

    def add(self, grammar: Grammar) -> int:
        """Take in a grammar of one language; return its variant from now on.

        Raises:
          CatalogFull: if there is no room beside the others.
          TooLarge: if there would be none without them, either.
          ValueError: for a join, or another vocabulary.
        """
        self._check(grammar)
        counts = TableSizes.of(grammar)
        if any(count > most for count, most in zip(counts, self._most, strict=True)):
            raise TooLarge(
                f"a grammar of {counts} finds no room in a catalog of {self._most} "
                "(max_states and so on)"
            )
        free = [v for v in range(len(self._arrays["starts"])) if v not in self._entries]
        firsts = self._find_gaps(counts)
        if not free or firsts is None:
            raise CatalogFull(
                f"{len(self._entries)} grammars leave no room for one of {counts}"
            )
        variant = free[0]
        self._entries[variant] = firsts, counts
        self._put(grammar, variant, firsts)
        return variant

    def remove(self, variant: int) -> None:
        """Give the room of a grammar back; no text may be steered by it any more.

        Raises:
          KeyError: if there is none.
        """
        first, count = (sizes.states for sizes in self._entries.pop(variant))
        self._arrays["mask_of_state"][first : first + count] = self._most.masks
        self._arrays["forced_token"][first : first + count] = -1
        self._arrays["starts"][variant] = self._lost

    def _check(self, grammar: Grammar) -> None:
        ends = np.asarray(grammar.end_tokens)
        is_same = grammar.vocabulary_size == self._vocabulary_size
        if not is_same or not np.array_equal(ends, self._end_tokens):
            raise ValueError("a catalog takes grammars of its own vocabulary")
        if grammar.num_variants != 1:
            raise ValueError(
                f"a catalog takes one language at a time, not a join of "
                f"{grammar.num_variants}"
            )

    def _find_gaps(self, counts: TableSizes) -> TableSizes | None:
        """Return where there is room for so many of each, the first gap that holds."""
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
    """Return an array of one value, with another at its end, i32[...]."""
    array = np.full(shape, value, np.int32)
    array[-1] = last
    return array
