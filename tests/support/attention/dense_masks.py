"""Dense float64 attention under a mask, written from the contract.

A request has a number of rows and a kind of mask; nothing here uses the package except
`jkv.read`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import jkv


@dataclasses.dataclass
class Request:
    """Rows of one request and their mask; rows are numbered within the request."""

    num_rows: int
    kind: str = "causal"  # or "span", "start", "canvas", "tree"
    ends: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)

    def sees(self, row: int, other: int) -> bool:
        """Return True if a row attends to another row of the step, ignoring windows."""
        if self.kind == "tree":
            while row > other:
                row = self.parents[row]
            return row == other
        start = max(self.starts[row], 0) if self.starts else 0
        end = max(self.ends[row], row) if self.ends else row
        return start <= other <= end

    def depth(self, row: int) -> int:
        """Return the row's position relative to the cached tokens."""
        if self.kind != "tree":
            return row
        return 0 if self.parents[row] < 0 else 1 + self.depth(self.parents[row])


# Mask kinds of a request.
KINDS = ("causal", "span", "start", "canvas", "tree")


def random_request(rng: np.random.Generator, kind: str, num_rows: int) -> Request:
    """Create a request with a valid random mask."""
    rows = range(num_rows)
    request = Request(num_rows, kind)
    if kind in ("span", "start", "canvas"):
        cut = sorted(rng.choice(rows, size=min(2, num_rows), replace=False))
        borders = [*cut, num_rows - 1]
        ends = [next(int(b) for b in borders if b >= row) for row in rows]
        # Some rows stay causal.
        request.ends = [e if rng.random() < 0.8 else -1 for e in ends]
    if kind == "start":
        request.starts = [int(rng.integers(-1, row + 1)) for row in rows]
    if kind == "tree":
        request.parents = [int(rng.integers(-1, row)) if row else -1 for row in rows]
    return request


def as_mask(requests: list[Request], capacity: int, **flags: bool) -> Any:
    """Return a `MixedMask` over the kinds that occur in packed requests."""
    kinds = [kind for kind in KINDS if any(r.kind == kind for r in requests)]
    filled: dict[str, Any] = {}
    for name in ("ends", "starts", "parents"):
        rows = np.full(capacity, -1, np.int32)
        start = 0
        for request in requests:
            given = getattr(request, name)
            rows[start : start + len(given)] = given
            start += request.num_rows
        filled[name] = jnp.asarray(rows)
    ends, starts, parents = filled.values()
    made = {
        "causal": jkv.CausalMask(),
        "span": jkv.SpanMask(ends, **flags),
        "start": jkv.SpanMask(ends, starts, **flags),
        "canvas": jkv.SpanMask(ends, one_window=True, **flags),
        "tree": jkv.TreeMask(parents),
    }
    which = jnp.array([kinds.index(request.kind) for request in requests])
    if len(kinds) == 1:
        return made[kinds[0]]
    return jkv.MixedMask(which, tuple(made[kind] for kind in kinds))


def attend_densely(
    queries: np.ndarray,  # [n, H, D], of one request
    keys: np.ndarray,  # [past + n, K, D], in slot order
    values: np.ndarray,
    request: Request,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
    xp: Any = np,
) -> tuple[Any, Any]:
    """Return the output [n, H, Dv] and log-sum-exp [n, H]; float64 if `xp` is numpy."""
    num_rows, num_heads, head_dim = queries.shape
    if xp is np:
        given = queries, keys, values
        queries, keys, values = (np.asarray(x, np.float64) for x in given)
    past, group = len(keys) - num_rows, num_heads // keys.shape[1]
    keys, values = (xp.repeat(x, group, axis=1) for x in (keys, values))
    visible = np.zeros((num_rows, len(keys)), bool)
    is_canvas = request.kind == "canvas"
    for row in range(num_rows):
        position = past + request.depth(row)
        for token in range(past):
            last = past if is_canvas else position
            visible[row, token] = window is None or token > last - window
        for other in range(num_rows):
            is_near = window is None or is_canvas
            is_near |= past + request.depth(other) > position - (window or 0)
            visible[row, past + other] = request.sees(row, other) and is_near
    scores = xp.einsum("qhd,thd->qht", queries, keys)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * xp.tanh(scores / soft_cap)
    scores = xp.where(visible[:, None], scores, -1e30)
    top = scores.max(axis=2, keepdims=True)
    weights = xp.exp(scores - top)
    total = weights.sum(axis=2, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(xp.asarray(sinks)[None, :, None] - top)
    output = xp.einsum("qht,thd->qhd", weights / total, values)
    return output, (top + xp.log(total))[..., 0]
