"""From logits to tokens: the most likely one, or one draw from what filters keep.

A draw inverts the cumulative distribution in two levels, a tile and a token in it, with
two uniform numbers in place of one Gumbel number per token of the vocabulary.

A row's randomness depends on its own seed and on how many tokens it has generated,
so a sequence's text does not depend on its neighbours or on the batch's size.

Symbols: B sequences of a call, V tokens in the vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jkv.arguments import explains_arguments
from jkv.decoding.sampling.filters import PerRow, by_row, filter_rows, penalise
from jkv.decoding.sampling.options import Sampling
from jkv.steering import Steering

Part = TypeVar("Part")
Results = TypeVar("Results")

# A choice picks one of V / _TILE tiles, then one token of it: for a draw two short
# cumulative sums in place of one of length V.
_TILE = 128


@explains_arguments
def sample(
    logits: jax.Array,  # f32[B, V]
    sampling: Sampling,
    counts: jax.Array | int = 0,  # i32[B]
    *,
    seen: jax.Array | None = None,  # bool[B, V]
) -> tuple[jax.Array, jax.Array]:
    """Choose one token per row.

    Args:
      logits: f32[B, V], finite or -inf; a token at -inf is never chosen.
      sampling: how to choose.
      counts: i32[B], tokens each sequence has generated before this one. Together
        with its seed it fixes the sequence's random numbers.
      seen: bool[B, V], tokens that the repetition penalty applies to; None is none.

    Returns:
      tokens: i32[B].
      logprobs: f32[B], log-probability of each under the logits as given, before
        penalty, temperature and filters.

    Raises:
      ValueError: for a field of `sampling` that is neither one number nor B.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.decoding import Sampling, sample
      >>> tokens, logprobs = sample(jnp.log(jnp.array([[0.1, 0.7, 0.2]])), Sampling())
      >>> tokens.tolist(), round(float(jnp.exp(logprobs[0])), 3)
      ([1], 0.7)
    """
    rows = by_row(sampling, logits.shape[0])
    counts = jnp.broadcast_to(jnp.asarray(counts, jnp.int32), rows.seeds.shape)
    return _sample(logits.astype(jnp.float32), rows, counts, seen)


@jax.jit
def _sample(
    logits: jax.Array, rows: PerRow, counts: jax.Array, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    is_greedy = rows.temperature <= 0

    def choose_best() -> jax.Array:
        return find_best(penalise(logits, rows, seen))

    def draw_some() -> jax.Array:
        drawn = draw(filter_rows(logits, rows, seen), rows.seeds, counts)
        best = lax.cond(jnp.any(is_greedy), choose_best, lambda: drawn)
        return jnp.where(is_greedy, best, drawn)

    # A batch that is greedy throughout skips the filters and the draw.
    tokens = lax.cond(jnp.all(is_greedy), choose_best, draw_some)
    return tokens, pick_logprobs(logits, tokens)


def pick_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log-probability of one token of each row, f32[B]."""
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)
    return logprobs[:, 0]


def find_best(logits: jax.Array) -> jax.Array:
    """Return the first of the most likely tokens of each row, i32[B].

    `argmax` takes an index along with each value, one by one on a CPU. So one pass
    finds the largest logit of each tile, and two small ones the tile and the token.
    """
    tiles = _cut_tiles(logits, -jnp.inf)
    tile = lax.argmax(jnp.max(tiles, axis=-1), 1, jnp.int32)
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    # Any token does where there are no numbers, but no other index.
    token = tile * _TILE + lax.argmax(inside, 1, jnp.int32)
    return jnp.minimum(token, logits.shape[1] - 1)


def _cut_tiles(values: jax.Array, filling: float) -> jax.Array:
    """Return values f32[B, V] as [B, tiles, _TILE]; the last tile is filled up."""
    num_rows, vocabulary = values.shape
    missing = ((0, 0), (0, -vocabulary % _TILE))
    padded = jnp.pad(values, missing, constant_values=filling)
    return padded.reshape(num_rows, -1, _TILE)


def draw(
    logits: jax.Array, seeds: jax.Array, counts: jax.Array, purpose: int = 0
) -> jax.Array:
    """Draw from softmax(logits), i32[B]; the maximum of each row is 0."""
    uniforms = draw_uniforms(seeds, counts, purpose)
    tiles = _cut_tiles(jnp.exp(logits), 0.0)
    tile = _invert(jnp.sum(tiles, axis=-1), uniforms[:, 0])
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    return tile * _TILE + _invert(inside, uniforms[:, 1])


def draw_uniforms(seeds: jax.Array, counts: jax.Array, purpose: int = 0) -> jax.Array:
    """Return numbers in [0, 1), f32[B, 2], by a row's seed, count and purpose alone."""

    def of_row(seed: jax.Array, count: jax.Array) -> jax.Array:
        # The generator is named: others give a batch other numbers than its rows.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), count)
        if purpose:
            key = jax.random.fold_in(key, purpose)
        return jax.random.uniform(key, (2,), jnp.float32)

    return jax.vmap(of_row)(seeds, counts)


def _invert(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Return the index where the cumulative weights pass `uniforms` of their total."""
    # A parallel sum need not be monotone in its last bit: an index of weight 0 is
    # excluded by its weight, never by the sum.
    sums = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), jnp.float32(0))
    target = uniforms * jnp.max(sums, axis=-1)
    return jnp.argmax(sums > target[:, None], axis=-1).astype(jnp.int32)


class Choice(NamedTuple):
    """How the tokens of N sequences are chosen."""

    sampling: Sampling
    steering: Steering | None = None
    # Rows that are chosen for at a time, so that bits do not depend on how many there
    # are; None: as they come.
    num_rows: int | None = None

    def sample(
        self,
        logits: jax.Array,  # f32[K, V]
        sampling: Sampling,  # of these rows, one number or K
        counts: jax.Array,  # i32[K], tokens that each has generated
        seen: jax.Array | None,  # bool[K, V] or None, as for `sample`
    ) -> tuple[jax.Array, jax.Array]:
        """Choose a token for each row, i32[K], with its log-probability, f32[K]."""
        if self.num_rows is None or self.num_rows == logits.shape[0]:
            return sample(logits, sampling, counts, seen=seen)
        rows = by_row(sampling, logits.shape[0])

        def choose(
            chunk: tuple[jax.Array, PerRow, jax.Array, jax.Array | None],
        ) -> tuple[jax.Array, jax.Array]:
            logits, rows, counts, seen = chunk
            return sample(logits, Sampling(**rows._asdict()), counts, seen=seen)

        return _map_chunks(choose, (logits, rows, counts, seen), self.num_rows)


def _map_chunks(
    function: Callable[[Part], Results], rows: Part, num_rows: int
) -> Results:
    """Call a function of rows for so many at a time; the last chunk is filled up."""
    count = jax.tree.leaves(rows)[0].shape[0]
    missing = -count % num_rows

    def cut(array: jax.Array) -> jax.Array:
        # The last row again: what is computed of it is dropped.
        last = jnp.broadcast_to(array[-1:], (missing, *array.shape[1:]))
        whole = jnp.concatenate([array, last])
        return whole.reshape(-1, num_rows, *array.shape[1:])

    found = lax.map(function, jax.tree.map(cut, rows))
    return jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:])[:count], found)
