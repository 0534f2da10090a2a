"""Masks within a step: which of its request's new rows each row attends to.

The tokens cached before the step are always visible. Rows are numbered within their
request, from 0. A mask is a pytree that the caller passes to `append`; `resolve` turns
it into a `StepMask`, which the batch holds, with rows numbered in the batch.

Symbols: `B` requests, `R` rows, `Q` most rows of a span.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jkv.arguments import expect, name_kind
from jkv.operations import gather, scatter_max


def _static(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


class Rows(NamedTuple):
    """The rows of a step."""

    rank: jax.Array  # i32[R], index within the request
    length: jax.Array  # i32[R], number of rows of the request
    request: jax.Array  # i32[R]

    @property
    def is_owned(self) -> jax.Array:
        """True for rows of a request, bool[R]."""
        return (self.rank >= 0) & (self.rank < self.length)


class Visible(NamedTuple):
    """The rows that each row attends to, numbered within its request."""

    low: jax.Array  # i32[R], first row
    high: jax.Array  # i32[R], last row
    ancestors: jax.Array | None  # bool[R, Q], which of them; None for all
    depth: jax.Array  # i32[R], position relative to the step's first token
    one_window: jax.Array  # bool[R], windows count from the step's first row
    is_private: jax.Array  # bool[R], keys depend on later rows; not in the prefix index
    is_wrong: jax.Array  # bool[R], invalid entries of the mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CausalMask:
    """Each row attends to the step's rows up to itself: the default.

    Example:
      >>> import jkv
      >>> jkv.CausalMask()
      CausalMask()
    """

    def see(self, rows: Rows, max_span: int) -> Visible:
        """Return the rows that each row attends to."""
        del max_span
        rank, no = rows.rank, jnp.zeros(rows.rank.shape, bool)
        return Visible(jnp.zeros_like(rank), rank, None, rank, no, no, no)


CAUSAL = CausalMask()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SpanMask:
    """Each row attends to its request's rows from a start to an end.

    Images and prefixes whose tokens attend to each other, and canvases of block
    diffusion. A window limits earlier rows by the positions of both; later rows of a
    span are always visible.

    Attributes:
      ends: i32[R], the last row that each row attends to, numbered within its request.
        An end before the row itself, such as -1, stands for the row: causal.
      starts: i32[R], the first one; None for the request's first row. Rows cached
        before the step stay visible.
      one_window: every row attends to the cached tokens that a window shows the
        request's first row, and to the step's rows regardless of the window
        (DiffusionGemma's canvases).
      cacheable: equal token ids imply equal spans, as with an image's hash in each of
        its ids, so that `commit` may add spans to the prefix index. Without it, look up
        the tokens before the first span only (`allocate(tokens=)`).

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> jkv.SpanMask(jnp.array([2, 2, 2, -1]))  # three rows, then a causal one
      SpanMask(ends=Array([ 2,  2,  2, -1], dtype=int32), starts=None, \
one_window=False, cacheable=False)
    """

    ends: jax.Array
    starts: jax.Array | None = None
    one_window: bool = _static(False)
    cacheable: bool = _static(False)

    def see(self, rows: Rows, max_span: int) -> Visible:
        """Return the rows that each row attends to."""
        rank, shape = rows.rank, rows.rank.shape
        low = jnp.zeros_like(rank) if self.starts is None else self.starts
        low, high = jnp.maximum(low, 0), jnp.maximum(self.ends, rank)
        is_wrong = (high >= rows.length) | (low > rank) | (high - rank >= max_span)
        is_private = (high > rank) & (not self.cacheable)
        one_window = jnp.full(shape, self.one_window)
        return Visible(low, high, None, rank, one_window, is_private, is_wrong)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TreeMask:
    """Each row attends to itself and its ancestors in a tree.

    Siblings share a position: the depth of the row after the cached tokens.

    Attributes:
      parents: i32[R], the parent of each row, numbered within its request, which
        precedes it; -1 for rows that follow the cached tokens.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> jkv.TreeMask(jnp.array([-1, 0, 0]))  # a token and two continuations
      TreeMask(parents=Array([-1,  0,  0], dtype=int32))
    """

    parents: jax.Array

    def see(self, rows: Rows, max_span: int) -> Visible:
        """Return the rows that each row attends to."""
        rank = rows.rank
        is_wrong = (self.parents >= rank) | (self.parents < -1)
        column = jnp.arange(max_span, dtype=jnp.int32)[None]
        sees = column == rank[:, None]
        first_row = jnp.arange(rank.shape[0], dtype=jnp.int32) - rank
        ancestor = jnp.where(is_wrong, -1, self.parents)
        # Each round doubles the number of ancestors found.
        for _ in range(max(1, (max_span - 1).bit_length())):
            has_one = ancestor >= 0
            row = first_row + ancestor
            sees |= has_one[:, None] & gather(sees, row)
            ancestor = jnp.where(has_one, gather(ancestor, row), -1)
        depth = jnp.sum(sees, axis=1, dtype=jnp.int32) - 1
        no, yes = jnp.zeros(rank.shape, bool), jnp.ones(rank.shape, bool)
        return Visible(jnp.zeros_like(rank), rank, sees, depth, no, yes, is_wrong)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MixedMask:
    """Requests with different masks.

    Attributes:
      which: i32[B], the index of each request's mask in `masks`.
      masks: masks of any kind but `MixedMask`, each over all R rows; the entries of
        other requests' rows are ignored.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> spans = jkv.SpanMask(jnp.array([1, 1, -1]))
      >>> mask = jkv.MixedMask(jnp.array([0, 1]), (spans, jkv.CausalMask()))
      >>> len(mask.masks)
      2
    """

    which: jax.Array
    masks: "tuple[CausalMask | SpanMask | TreeMask, ...]"

    def see(self, rows: Rows, max_span: int) -> Visible:
        """Return the rows that each row attends to."""
        which = gather(self.which, rows.request)
        each = [mask.see(rows, max_span) for mask in self.masks]
        found = each[0]
        all_rows = jnp.ones((rows.rank.shape[0], max_span), bool)
        for number, one in enumerate(each[1:], 1):
            is_it, ancestors = which == number, found.ancestors
            if ancestors is not None or one.ancestors is not None:
                old, new = (
                    all_rows if x is None else x for x in (ancestors, one.ancestors)
                )
                ancestors = jnp.where(is_it[:, None], new, old)
            of_row = {
                name: jnp.where(is_it, getattr(one, name), getattr(found, name))
                for name in Visible._fields
                if name != "ancestors"
            }
            found = Visible(**of_row, ancestors=ancestors)
        is_unknown = (which < 0) | (which >= len(each))
        return found._replace(is_wrong=found.is_wrong | is_unknown)


Mask: TypeAlias = CausalMask | SpanMask | TreeMask | MixedMask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepMask:
    """The mask of a batch: rows are numbered in the batch.

    A row attends to rows `low .. high`; to none if `high` is below `low`.
    """

    past: jax.Array  # i32[B], tokens cached before the step
    low: jax.Array  # i32[R]
    high: jax.Array  # i32[R]
    request: jax.Array  # i32[R]
    first_row: jax.Array  # i32[R], the request's first row
    ancestors: jax.Array | None  # bool[R, Q], by row within the request; None for all
    one_window: jax.Array  # bool[R], windows count from the step's first row
    is_private: jax.Array  # bool[B], `commit` adds nothing to the prefix index
    # Static: Q, the most rows of a request that one row attends to; with `adds_later`
    # the most rows from a row to its end.
    max_span: int = _static(0)
    # Static: rows attend to all that causal rows do, and `low .. high` are later ones.
    adds_later: bool = _static(False)
    # Static: any, or every, row counts windows from its step's first row.
    has_one_window: bool = _static(False)
    is_one_window: bool = _static(False)
    # Static: rows have no slots, and attend to the cached tokens only.
    reads_only: bool = _static(False)

    @property
    def is_tree(self) -> bool:
        """True if positions may differ from the order of rows."""
        return self.ancestors is not None

    def first_requests(self, num_requests: int) -> "StepMask":
        """Return the mask of the first requests."""
        past, is_private = self.past[:num_requests], self.is_private[:num_requests]
        return dataclasses.replace(self, past=past, is_private=is_private)

    def first_rows(self, num_rows: int) -> "StepMask":
        """Return the mask of the first rows."""
        names = "low", "high", "request", "first_row", "ancestors", "one_window"
        of_rows = {name: getattr(self, name) for name in names}
        first = jax.tree.map(lambda rows: rows[:num_rows], of_rows)
        return dataclasses.replace(self, **first)


class Resolved(NamedTuple):
    """A mask with its rows numbered in the batch, and the checks of each request."""

    mask: StepMask
    depth: jax.Array  # i32[R], position relative to the request's first token
    is_wrong: jax.Array  # bool[B]


def resolve(mask: Mask, rows: Rows, past: jax.Array, max_span: int) -> Resolved:
    """Number the rows that a mask shows in the batch, and check its entries.

    Args:
      mask: the mask, not `CausalMask`.
      rows: the rows as requested, also of requests that are refused later.
      past: i32[B], tokens cached before the step.
      max_span: static Q.
    """
    seen, is_owned = mask.see(rows, max_span), rows.is_owned
    adds_later = all(map(_adds_later, _members(mask)))
    row = jnp.arange(rows.rank.shape[0], dtype=jnp.int32)
    first_row = row - rows.rank
    is_wrong = seen.is_wrong
    if not adds_later:  # a tile holds all rows of a request
        is_wrong |= rows.rank >= max_span

    def any_row(flags: jax.Array) -> jax.Array:
        none = jnp.zeros(past.shape, bool)
        return scatter_max(none, rows.request, flags & is_owned)

    windows = [getattr(each, "one_window", False) for each in _members(mask)]
    resolved = StepMask(
        past=past,
        low=row + 1 if adds_later else first_row + seen.low,
        high=jnp.where(is_owned, first_row + seen.high, -1),
        request=rows.request,
        first_row=first_row,
        ancestors=seen.ancestors,
        one_window=seen.one_window,
        is_private=any_row(seen.is_private),
        max_span=max_span,
        adds_later=adds_later,
        has_one_window=any(windows),
        is_one_window=all(windows),
    )
    return Resolved(resolved, seen.depth, any_row(is_wrong))


def without_rows(mask: StepMask, valid: jax.Array) -> StepMask:
    """Return the mask in which only valid rows, bool[R], attend to rows of the step."""
    return dataclasses.replace(mask, high=jnp.where(valid, mask.high, -1))


def read_only_mask(past: jax.Array, num_rows: int) -> StepMask:
    """Return the mask of rows without slots, `num_rows` for each request."""
    count = past.shape[0] * num_rows
    row = jnp.arange(count, dtype=jnp.int32)
    return StepMask(
        past=past,
        low=row,
        high=jnp.full((count,), -1, jnp.int32),
        request=row // num_rows,
        first_row=row - row % num_rows,
        ancestors=None,
        one_window=jnp.ones((count,), bool),
        is_private=jnp.ones(past.shape, bool),
        has_one_window=True,
        is_one_window=True,
        reads_only=True,
    )


def _members(mask: Mask) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, MixedMask) else (mask,)


def has_tree(mask: Mask) -> bool:
    """Return True if the mask, or one of a mixed mask, is a `TreeMask`."""
    return any(isinstance(each, TreeMask) for each in _members(mask))


def _adds_later(mask: Mask) -> bool:
    """Return True if rows attend to all that causal rows do."""
    if isinstance(mask, SpanMask):
        return mask.starts is None and not mask.one_window
    return isinstance(mask, CausalMask)


def check_mask(
    mask: Mask,
    num_rows: int,
    num_requests: int,
    check: Callable[[str, Any], jax.Array],
) -> Mask:
    """Return the mask with i32 arrays; refuse other kinds and shapes by name.

    Args:
      mask: the caller's mask.
      num_rows: R.
      num_requests: B.
      check: converts an argument, by name, to an i32 array of one axis.

    Raises:
      ValueError: not a mask, a mixed mask inside a mixed one, flags that are not bool,
        or an array of another shape or dtype.
    """

    def rows_of(name: str, value: Any) -> jax.Array:
        array = check(name, value)
        expect(name, array, "R", {"R": num_rows}, why="one per row of the step")
        return array

    if isinstance(mask, CausalMask):
        return mask
    if isinstance(mask, TreeMask):
        return TreeMask(rows_of("mask.parents", mask.parents))
    if isinstance(mask, SpanMask):
        for name in ("one_window", "cacheable"):
            if not isinstance(getattr(mask, name), bool):
                raise ValueError(
                    f"mask.{name} must be True or False, got {getattr(mask, name)!r}; "
                    f"it is static"
                )
        ends, starts = rows_of("mask.ends", mask.ends), mask.starts
        if starts is not None:
            starts = rows_of("mask.starts", starts)
        return SpanMask(ends, starts, mask.one_window, mask.cacheable)
    if not isinstance(mask, MixedMask):
        raise ValueError(
            f"mask must be a jkv.CausalMask, SpanMask, TreeMask or MixedMask, got "
            f"{name_kind(mask)}"
        )
    which, masks = check("mask.which", mask.which), mask.masks
    expect("mask.which", which, "B", {"B": num_requests}, why="one per request")
    if (
        not isinstance(masks, tuple)
        or not masks
        or any(isinstance(each, MixedMask) for each in masks)
    ):
        raise ValueError(
            f"mask.masks must be a tuple of CausalMask, SpanMask and TreeMask, got "
            f"{name_kind(masks)}; a MixedMask holds no other MixedMask"
        )
    members = [check_mask(each, num_rows, num_requests, check) for each in masks]
    return MixedMask(which, tuple(members))  # type: ignore[arg-type]
