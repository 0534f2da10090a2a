"""KV cache compression: rules that score cached tokens, and their selection.

A rule is a value with one method, `scores(keys, values, queries, lengths)`, called
layer by layer. Keys and values are f32[B, N, K, D], and `queries` is None or as the
rule documents. It returns f32[B, K, N]; `top_tokens` selects the highest scores of each
head for `jkv.prune`. Tokens at and after `lengths`, i32[B], are ignored. Rules of your
own work the same way; `generate(press=)` needs them hashable.

Formulas as in kvpress 0.5.5 (https://github.com/NVIDIA/kvpress).

Symbols: B sequences, N tokens, K kv heads, H query heads, D head dim, W queries.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import explains_arguments
from jkv.metadata.requests import Integers, broadcast, check_static
from jkv.status import UsageError

# Scores of tokens that are always kept.
_KEPT = np.float32(1e30)
_NORM_EPSILON, _COSINE_EPSILON = np.float32(1e-12), np.float32(1e-8)

# (rows f32[..., D], positions i32[...]) -> rows, rotated by their positions
RotateRows = Callable[[jax.Array, jax.Array], jax.Array]


class Press(Protocol):
    """A scoring rule."""

    def scores(
        self, keys: jax.Array, values: jax.Array, queries: Any, lengths: jax.Array
    ) -> jax.Array:
        """Return the scores of tokens, f32[B, K, N]; higher ones are kept."""


class QueryMoments(NamedTuple):
    """Mean and covariance of a layer's unrotated queries, after the sinks."""

    mean: jax.Array  # f32[B, H, D]
    covariance: jax.Array  # f32[B, H, D, D]

    @classmethod
    def of(
        cls,
        queries: jax.Array,  # [B, W, H, D], rotated, newest last
        lengths: jax.Array,  # i32[B], context lengths
        sinks: int,
        rotate: "RotateRows",
    ) -> Self:
        """Return the moments of observed queries, rotated back by their positions."""
        width, dim = queries.shape[1], queries.shape[3]
        steps = jnp.arange(-width, 0, dtype=jnp.int32)
        position = lengths[:, None] + steps[None]
        position = jnp.broadcast_to(position[..., None], queries.shape[:3])
        rows = queries.astype(jnp.float32).reshape(-1, dim)
        plain = rotate(rows, -position.reshape(-1)).reshape(queries.shape)
        counts = (position >= sinks)[..., None]  # [B, W, H, 1]
        num = jnp.maximum(jnp.sum(counts, axis=1), 1).astype(jnp.float32)
        mean = jnp.sum(jnp.where(counts, plain, 0), axis=1) / num
        centred = jnp.where(counts, plain - mean[:, None], 0)
        covariance = jnp.einsum("bwhi,bwhj->bhij", centred, centred) / num[..., None]
        return cls(mean, covariance)


@dataclasses.dataclass(frozen=True)
class streaming_llm:  # noqa: N801 (rules read as functions)
    """Keep the first `sinks` tokens and the newest ones.

    StreamingLLM (https://arxiv.org/abs/2309.17453).
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        check_static("sinks", self.sinks, 0)

    def scores(
        self, keys: jax.Array, _values: Any, _queries: Any, _lengths: Any
    ) -> jax.Array:
        position = jnp.arange(keys.shape[1], dtype=jnp.float32)
        score = jnp.where(position < self.sinks, _KEPT, position)
        shape = (keys.shape[0], keys.shape[2], keys.shape[1])
        return jnp.broadcast_to(score[None, None], shape)


@dataclasses.dataclass(frozen=True)
class knorm:  # noqa: N801
    """Keep the keys of the smallest norm (https://arxiv.org/abs/2406.11430)."""

    def scores(
        self, keys: jax.Array, _values: Any, _queries: Any, _lengths: Any
    ) -> jax.Array:
        return -jnp.linalg.norm(_by_head(keys), axis=-1)


@dataclasses.dataclass(frozen=True)
class key_diff:  # noqa: N801
    """Keep the keys least similar to the mean key (https://arxiv.org/abs/2504.15364)."""

    def scores(
        self, keys: jax.Array, _values: Any, _queries: Any, lengths: jax.Array
    ) -> jax.Array:
        rows = _by_head(keys)  # [B, K, N, D]
        norms = jnp.linalg.norm(rows, axis=-1, keepdims=True)
        units = rows / jnp.maximum(norms, _NORM_EPSILON)
        is_valid = _valid(keys, lengths)[..., None]
        count = jnp.maximum(lengths, 1).astype(jnp.float32)[:, None, None]
        anchor = jnp.sum(jnp.where(is_valid, units, 0), axis=2) / count
        length = jnp.linalg.norm(anchor, axis=-1)[..., None]
        products = jnp.einsum("bknd,bkd->bkn", rows, anchor)
        scale = jnp.maximum(norms[..., 0], _COSINE_EPSILON)
        return -products / (scale * jnp.maximum(length, _COSINE_EPSILON))


@dataclasses.dataclass(frozen=True)
class snap_kv:  # noqa: N801
    """Keep the tokens that the newest queries attend to, and the newest tokens.

    SnapKV (https://arxiv.org/abs/2404.14469). `queries` are the rotated queries of the
    newest W >= `window` tokens, f32[B, W, H, D], newest last. Attention of the last
    `window` of them is averaged, and pooled over `kernel` neighbours.
    """

    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        check_static("window", self.window, 1)
        check_static("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise UsageError(f"kernel must be odd, got {self.kernel}; add 1")

    def scores(
        self, keys: jax.Array, _values: Any, queries: Any, lengths: jax.Array
    ) -> jax.Array:
        shape = jnp.shape(queries) if queries is not None else ()
        if len(shape) != 4 or shape[1] < self.window:
            raise UsageError(
                f"snap_kv needs queries of the newest {self.window} tokens, f32[B, W, "
                f"H, D], got {list(shape) or None}; pass them to scores, or use a rule "
                f"of keys alone, such as key_diff()"
            )
        num_heads = keys.shape[2]
        rows = _by_group(queries[:, -self.window :], num_heads)  # [B, K, G, w, D]
        logits = jnp.einsum("bkgwd,bnkd->bkgwn", rows, keys) / math.sqrt(keys.shape[-1])
        position = jnp.arange(keys.shape[1], dtype=jnp.int32)
        first = (lengths - self.window)[:, None, None]
        own = first + jnp.arange(self.window, dtype=jnp.int32)[None, :, None]
        is_visible = position[None, None] <= own  # [B, w, N]
        logits = jnp.where(is_visible[:, None, None], logits, -jnp.inf)
        weights = jnp.mean(jax.nn.softmax(logits, axis=-1), axis=(2, 3))  # [B, K, N]
        is_before = (position[None] < first[:, 0])[:, None]
        weights = jnp.where(is_before, weights, 0)
        pooled = _pool(weights, self.kernel)
        return jnp.where(is_before, pooled, _KEPT)


@dataclasses.dataclass(frozen=True)
class expected_attention:  # noqa: N801
    """Keep the tokens that future queries are expected to attend to.

    Expected attention (https://arxiv.org/abs/2510.00636). `queries` are `QueryMoments`,
    or the rotated queries of the newest W tokens, f32[B, W, H, D], which estimate them.
    `rotate(rows f32[P, D], positions i32[P])` is the model's rotary embedding: its mean
    over the next `future` positions rotates the moments, and negative positions rotate
    queries back. The first `sinks` tokens are kept. Slots are used as positions, so
    close the gaps of a pruned sequence first (`prune(rotate=)`).
    """

    future: int = 512
    sinks: int = 4
    rotate: RotateRows | None = None

    def __post_init__(self) -> None:
        check_static("future", self.future, 1)
        check_static("sinks", self.sinks, 0)

    def scores(
        self, keys: jax.Array, values: jax.Array, queries: Any, lengths: jax.Array
    ) -> jax.Array:
        shape = () if queries is None else jnp.shape(queries[0])
        is_given = isinstance(queries, QueryMoments) or len(shape) == 3
        if not is_given or self.rotate is None:
            raise UsageError(
                "expected_attention needs rotate= and queries: QueryMoments(mean, "
                "covariance) of unrotated ones, or f32[B, W, H, D] of the newest "
                "tokens; pass both, or use a rule of keys alone, such as key_diff()"
            )
        if not isinstance(queries, QueryMoments):
            queries = QueryMoments.of(queries, lengths, self.sinks, self.rotate)
        num_heads, dim = keys.shape[2], keys.shape[3]
        rotation = self._mean_rotation(dim, lengths)  # [B, D, D]
        mean = jnp.einsum("bij,bhj->bhi", rotation, queries.mean)
        covariance = jnp.einsum(
            "bij,bhjk,blk->bhil", rotation, queries.covariance, rotation
        )
        mean, covariance = (_split(each, num_heads) for each in (mean, covariance))
        logits = jnp.einsum("bkgd,bnkd->bkgn", mean, keys) / math.sqrt(dim)
        spread = jnp.einsum("bnki,bkgij,bnkj->bkgn", keys, covariance, keys)
        logits += spread / (2 * dim)
        position = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        is_sink = position < self.sinks
        is_scored = (position < lengths[:, None]) & ~is_sink
        logits = jnp.where(is_scored[:, None, None], logits, -jnp.inf)
        weights = jnp.mean(jax.nn.softmax(logits, axis=-1), axis=2)
        weights *= jnp.linalg.norm(_by_head(values), axis=-1)
        return jnp.where(is_sink[:, None], _KEPT, weights)

    def _mean_rotation(self, dim: int, lengths: jax.Array) -> jax.Array:
        """Return the mean rotation over the future positions, f32[B, D, D]."""
        assert self.rotate is not None
        position = lengths[:, None] + jnp.arange(self.future, dtype=jnp.int32)[None]
        shape = (*position.shape, dim)
        units = jnp.broadcast_to(
            jnp.eye(dim, dtype=jnp.float32)[:, None, None], (dim, *shape)
        )
        at = jnp.broadcast_to(position[None], (dim, *position.shape))
        rotated = self.rotate(units.reshape(-1, dim), at.reshape(-1))
        columns = jnp.mean(rotated.reshape(dim, *shape), axis=2)  # [D, B, D]
        return columns.transpose(1, 2, 0)


@explains_arguments
def top_tokens(
    scores: jax.Array, num_kept: Integers, lengths: Integers, max_kept: int
) -> jax.Array:
    """Select the highest scores of each row, as `prune` takes them.

    Args:
      scores: f32[B, ..., N]. Of equal scores the first is kept.
      num_kept: i32[B] or int, tokens to keep of each sequence.
      lengths: i32[B] or int, context lengths; later entries are never kept.
      max_kept: static C, the width of the result.

    Returns:
      i32[B, ..., C], slots in ascending order, N from `num_kept` (or the length) on.

    Raises:
      ValueError: if `max_kept` is not a positive static int, or sizes differ.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> jkv.top_tokens(jnp.array([[3., 1., 2., 9.]]), 2, 3, 4).tolist()
      [[0, 2, 4, 4]]
    """
    check_static("max_kept", max_kept, 1)
    num_requests, num_tokens = scores.shape[0], scores.shape[-1]
    num_kept, lengths = broadcast(num_requests, num_kept=num_kept, lengths=lengths)
    each, last = (-1, *(1,) * (scores.ndim - 1)), (*(1,) * (scores.ndim - 1), -1)
    slot = jnp.arange(num_tokens, dtype=jnp.int32).reshape(last)
    is_valid = slot < jnp.asarray(lengths).reshape(each)
    scores = jnp.where(is_valid & ~jnp.isnan(scores), scores, -jnp.inf)
    width = min(max_kept, num_tokens)
    _, chosen = jax.lax.top_k(scores, width)
    rank = jnp.arange(width, dtype=jnp.int32).reshape(last)
    most = jnp.minimum(jnp.asarray(num_kept), jnp.asarray(lengths)).reshape(each)
    chosen = jnp.sort(jnp.where(rank < most, chosen, num_tokens), axis=-1)
    more = [(0, 0)] * (scores.ndim - 1) + [(0, max_kept - width)]
    return jnp.pad(chosen, more, constant_values=num_tokens)


def _by_head(rows: jax.Array) -> jax.Array:
    """Return rows, [B, N, K, D], as f32[B, K, N, D]."""
    return rows.astype(jnp.float32).swapaxes(1, 2)


def _by_group(queries: jax.Array, num_heads: int) -> jax.Array:
    """Return queries, [B, W, H, D], as [B, K, H / K, W, D]."""
    return _split(queries.astype(jnp.float32).swapaxes(1, 2), num_heads)


def _split(array: jax.Array, num_heads: int) -> jax.Array:
    """Split the query heads of an array, [B, H, ...], into [B, K, H / K, ...]."""
    return array.reshape(array.shape[0], num_heads, -1, *array.shape[2:])


def _valid(keys: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return True for tokens before the lengths, bool[B, 1, N]."""
    position = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
    return (position < lengths[:, None])[:, None]


def _pool(weights: jax.Array, kernel: int) -> jax.Array:
    """Average over neighbours, [..., N]; past the ends count zeros."""
    half, num_tokens = kernel // 2, weights.shape[-1]
    padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(half, half)])
    shifted = [padded[..., i : i + num_tokens] for i in range(kernel)]
    return sum(shifted[1:], start=shifted[0]) / kernel
