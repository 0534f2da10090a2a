"""Prompts without a past: their own rows are all that they see.

Such a prompt needs no pages. Its keys and values, which the step has just written, are
read back from the pool once, side by side, and an attention over contiguous arrays
takes its rows; the paged one takes the rows of all other requests. So a row is computed
by one of the two from beginning to end, and nothing is joined.

Sizes are static, so one prompt of a step goes this way, one that has more than half of
the rows, in the smallest of a few sizes that holds it. On an H100 the kernel takes 1.8
times as long as torch; what is read, moved and launched here is some 40 us and eight
copies of the rows at most. With these a prompt that fills 15/16 of 4,096 rows gains,
and one that fills half of its size would lose (`docs/kernel.md` has the sums).

Symbols: as in `jkv.attention.call`; `Q` rows of a size.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Attend, Call, check_call
from jkv.attention.elements import to_float32
from jkv.attention.kernel.lists import Work
from jkv.sharding.varying import vary_over, varying_axes

# Rows of the smallest size.
MIN_ROWS = 4_096
# Sizes are so many of these parts of the rows: from one to the next a sixteenth of the
# step, more than half of it.
_NUM_PARTS = 16


class AttendContiguous(Protocol):
    """Causal attention of rows to themselves and those before them."""

    def __call__(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array, scale: float, /
    ) -> jax.Array:
        """Return [Q, H, D] for [Q, H, D] and twice [Q, K, D], of one dtype."""
        ...


def list_sizes(num_rows: int, min_rows: int = MIN_ROWS) -> tuple[int, ...]:
    """Return the rows that a prompt is computed with, ascending; none for a small step.

    Args:
      num_rows: of the step.
      min_rows: of the smallest size.
    """
    parts = range(_NUM_PARTS // 2 + 1, _NUM_PARTS + 1)
    sizes = {-(-num_rows * part // _NUM_PARTS) for part in parts}
    return tuple(sorted(size for size in sizes if size >= min_rows))


class Prompt(NamedTuple):
    """The prompt that goes this way, i32[] each."""

    request: jax.Array
    start: jax.Array  # its first row
    length: jax.Array  # its rows, 0 for none
    num_others: jax.Array  # rows of all other requests

    def owns(self, row: jax.Array) -> jax.Array:
        """Return whether it has each row, bool[...]."""
        return (row >= self.start) & (row < self.start + self.length)


def attend_prompts(
    call: Call,
    *,
    attend: Attend,
    attend_contiguous: AttendContiguous,
    min_rows: int = MIN_ROWS,
) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv], and NaN for the log-sum-exp, which nobody has of a prompt.

    Args:
      call: with a fixed scale, without sinks, soft cap and part.
      attend: what takes all other rows.
      attend_contiguous: what takes a prompt's.
      min_rows: of the smallest size.
    """
    check_call(call)
    lse = jnp.full(call.results[1].shape, jnp.nan, jnp.float32)
    sizes = list_sizes(call.num_rows, min_rows)
    if not sizes or call.is_decoding:
        return attend(call)[0], lse
    prompt = find_prompt(call, sizes[0])

    def attend_others() -> jax.Array:
        return attend(without_prompt(call, prompt))[0]

    def attend_alone() -> jax.Array:
        nothing = jnp.zeros((), call.output_dtype)
        return replace_rows(nothing, lambda size: call.queries[:size])

    def attend_beside() -> jax.Array:
        take = functools.partial(_take_rows, call, prompt)
        return replace_rows(attend_others(), take)

    def replace_rows(output: jax.Array, take: Callable[[int], jax.Array]) -> jax.Array:
        def replace_in(size: int) -> jax.Array:
            own = _attend_prompt(call, prompt, attend_contiguous, take(size))
            return _replace_rows(output, prompt, own, call.num_rows)

        too_small = [(prompt.length > size).astype(jnp.int32) for size in sizes[:-1]]
        ways = [functools.partial(replace_in, size) for size in sizes]
        return choose(sum(too_small, start=jnp.int32(0)), ways)

    # Inside `shard_map` all must answer with what varies over the same axes.
    axes = varying_axes(call)

    def choose(index: jax.Array, ways: Sequence[Callable[[], jax.Array]]) -> jax.Array:
        vary = [lambda way=way: vary_over(way(), axes) for way in ways]
        chosen: jax.Array = lax.switch(index, vary)
        return chosen

    is_alone = (prompt.start == 0) & (prompt.num_others == 0)
    way = jnp.where(prompt.length == 0, 0, jnp.where(is_alone, 1, 2))
    return choose(way, [attend_others, attend_alone, attend_beside]), lse


def find_prompt(call: Call, least_size: int) -> Prompt:
    """Return the prompt without a past that has most of the rows, if there is one.

    One that is longer than the window is left to the paged attention, and one that
    would leave a sixteenth of the least size empty.
    """
    requests = call.requests
    lengths = requests.query_lengths
    least = -(-least_size * (_NUM_PARTS - 1) // _NUM_PARTS)
    fits = (requests.context_lengths == lengths) & (lengths >= least)
    if call.window is not None:
        fits &= lengths <= call.window
    request = jnp.argmax(fits).astype(jnp.int32)
    length = jnp.where(fits[request], lengths[request], 0)
    return Prompt(
        request=request,
        start=jnp.where(fits[request], requests.query_starts[request], 0),
        length=length,
        num_others=jnp.sum(lengths, dtype=jnp.int32) - length,
    )


def without_prompt(call: Call, prompt: Prompt) -> Call:
    """Return the call in which the prompt has no rows.

    Lists that the step has made for the kernel keep its tiles, with nothing to do.
    """
    requests, lists = call.requests, call.work_lists
    request = jnp.arange(call.num_requests, dtype=jnp.int32)
    is_prompt = (request == prompt.request) & (prompt.length > 0)
    lengths = jnp.where(is_prompt, 0, requests.query_lengths)
    if lists is not None:
        prefill = tuple(
            dataclasses.replace(each, work=_clear_tiles(each.work, prompt))
            for each in lists.prefill
        )
        lists = dataclasses.replace(lists, prefill=prefill)
    return dataclasses.replace(
        call, requests=requests._replace(query_lengths=lengths), work_lists=lists
    )


def _clear_tiles(work: Work, prompt: Prompt) -> Work:
    """Leave the tiles of the prompt's rows with nothing to do."""
    is_own = prompt.owns(work.row)
    return work._replace(
        num_rows=jnp.where(is_own, 0, work.num_rows),
        end=jnp.where(is_own, 0, work.end),
    )


def _take_rows(call: Call, prompt: Prompt, size: int) -> jax.Array:
    """Return queries, [Q, H, D], the prompt's first row in front."""
    rows = prompt.start + jnp.arange(size, dtype=jnp.int32)
    return call.queries.at[rows].get(mode="clip")


def _replace_rows(
    output: jax.Array,  # [R, H, Dv], or [] for one number everywhere
    prompt: Prompt,
    own: jax.Array,  # [Q, H, Dv], the prompt's first row in front
    num_rows: int,
) -> jax.Array:
    """Return the output with the prompt's rows where they belong, [R, H, Dv]."""
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    own = own.at[rows - prompt.start].get(mode="clip")
    return jnp.where(prompt.owns(rows)[:, None, None], own, output)


def _attend_prompt(
    call: Call, prompt: Prompt, attend: AttendContiguous, queries: jax.Array
) -> jax.Array:
    """Return what the prompt's rows see, [Q, H, D], the first at row 0; then anything.

    Args:
      call: the call.
      prompt: the prompt, of Q rows at most.
      attend: what attends.
      queries: [Q, H, D], the prompt's at row 0 and following.
    """
    pools, requests = call.pools, call.requests
    token = jnp.arange(queries.shape[0], dtype=jnp.int32)
    size = jnp.int32(pools.block_size)
    table = requests.block_tables[requests.seq_ids[prompt.request]]
    blocks = table.at[lax.div(token, size)].get(mode="clip")
    offsets = lax.rem(token, size)
    # What lies behind the prompt's end may be NaN, and 0 * NaN is NaN.
    is_own = (token < prompt.length)[:, None, None]

    def gather(pool: jax.Array, scales: jax.Array | None) -> jax.Array:
        # A negative index would wrap.
        place = call.layer, jnp.maximum(blocks, 0), slice(None), offsets
        found = to_float32(pool.at[place].get(mode="clip"), pools.kv_dtype)
        if scales is not None:
            scale = to_float32(scales.at[place].get(mode="clip"), jnp.bfloat16)
            found *= scale[..., None]
        return jnp.where(is_own, found, 0.0).astype(queries.dtype)

    assert pools.values is not None and call.fixed_scale is not None
    keys = gather(pools.keys, pools.key_scales)
    values = gather(pools.values, pools.value_scales)
    return attend(queries, keys, values, call.fixed_scale)
