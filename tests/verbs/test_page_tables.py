"""Tests of page_table: ops with FlashInfer's and AITER's arguments on a jkv pool.

Stand-ins in plain JAX take only these arrays, named as in FlashInfer's
`BatchPrefillWithPagedKVCacheWrapper` (layout HND) and AITER's `reshape_and_cache`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv

HEADS, KV_HEADS, DIM = 4, 2, 8


def make_config(**changes):
    fields = dict(
        num_layers=2,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        num_blocks=24,
        block_size=4,
        max_sequences=6,
        max_context_length=32,
        dtype=jnp.float32,
    )
    return jkv.CacheConfig(**(fields | changes))


def batch_prefill(
    queries,
    pages,
    qo_indptr,
    paged_kv_indptr,
    paged_kv_indices,
    paged_kv_last_page_len,
    window_left=-1,
):
    """Compute causal attention over pages, as FlashInfer defines it: [R, H, D]."""
    keys, values = pages
    size, most = keys.shape[2], paged_kv_indices.shape[0]
    row = jnp.arange(queries.shape[0])
    request = jnp.searchsorted(qo_indptr[1:], row, side="right")
    request = jnp.minimum(request, paged_kv_last_page_len.shape[0] - 1)
    start, end = paged_kv_indptr[request], paged_kv_indptr[request + 1]
    kv_len = (end - start - 1) * size + paged_kv_last_page_len[request]
    page = start[:, None] + jnp.arange(most)[None]
    block = paged_kv_indices[jnp.minimum(page, most - 1)]  # [R, P]

    def tokens_of(pool):
        rows = jnp.swapaxes(pool[block], 2, 3)  # [R, P, T, K, D]
        return rows.reshape(rows.shape[0], -1, *rows.shape[3:])

    distance = (qo_indptr[request + 1] - 1 - row)[:, None]  # rows before the last one
    place = jnp.arange(most * size)[None]
    own = kv_len[:, None] - 1 - distance
    seen = place <= own
    if window_left >= 0:
        seen &= place >= own - window_left
    group = queries.shape[1] // keys.shape[1]
    keys, values = (jnp.repeat(tokens_of(each), group, 2) for each in (keys, values))
    scores = jnp.einsum("rhd,rthd->rht", queries, keys) / np.sqrt(DIM)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
    values = jnp.where(seen[..., None, None], values, 0)  # unwritten slots hold NaN
    return jnp.einsum("rht,rthd->rhd", weights, values)


def reshape_and_cache(rows, pool, slot_mapping):
    """Store rows [R, K, D] in the slots of a pool [N, K, T, D]; -1 stores nothing."""
    size = pool.shape[2]
    block = jnp.where(slot_mapping < 0, pool.shape[0], slot_mapping // size)
    return pool.at[block, :, slot_mapping % size].set(rows, mode="drop")


@functools.partial(jax.jit, static_argnames="window")
def both(cache, batch, queries, keys, values, window):
    """Return attention and pools of the stand-ins, and of jkv."""
    layer = 1
    pages = jkv.page_table(cache, batch)
    storage = cache.storage[0]
    pools = [
        reshape_and_cache(rows, pool[layer], pages.slot_mapping)
        for rows, pool in ((keys, storage.key_pool), (values, storage.value_pool))
    ]
    theirs = batch_prefill(
        queries,
        pools,
        pages.query_indptr,
        pages.indptr,
        pages.indices,
        pages.last_page_lens,
        window_left=-1 if window is None else window - 1,
    )
    cache = jkv.write(cache, layer, batch, keys, values)
    ours = jkv.attend(cache, layer, batch, queries, window=window)
    storage = cache.storage[0]
    stored = [pool[layer] for pool in (storage.key_pool, storage.value_pool)]
    return (theirs, pools), (ours, stored), cache


def step(cache, seq_ids, lengths, seed, capacity, window=None):
    """Append random rows, compare both, and return the new cache."""
    cache, batch = jkv.append(cache, np.int32(seq_ids), lengths, capacity=capacity)
    draw = np.random.default_rng(seed).standard_normal
    queries = np.float32(draw((capacity, HEADS, DIM)))
    keys, values = np.float32(draw((2, capacity, KV_HEADS, DIM)))
    theirs, ours, cache = both(cache, batch, queries, keys, values, window)
    served = np.asarray(batch.valid)
    assert served.sum() == np.sum(lengths)
    (theirs, their_pools), (ours, our_pools) = jax.device_get((theirs, ours))
    np.testing.assert_allclose(theirs[served], ours[served], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(their_pools, our_pools)
    return jkv.commit(cache, batch)


@pytest.mark.newest_further
@pytest.mark.parametrize("window", [None, 8])
def test_other_ops_on_a_pool(window):
    cache = jkv.init(make_config(sliding_window=window))
    cache, opened = jkv.allocate(cache, [0, 0, 0])
    ids = [*opened.seq_ids.tolist(), -1]
    cache = step(cache, ids, np.int32([9, 1, 4, 0]), 0, 16, window)  # prompts
    cache, forked = jkv.fork(cache, np.int32([0]))
    ids[3] = int(forked.seq_ids[0])  # shares blocks with sequence 0
    for seed in range(1, 9):  # decode steps, beside a prefill chunk
        lengths = np.int32([1, 2 if seed % 2 else 1, 1, 1])
        cache = step(cache, ids, lengths, seed, 8, window)
    if window is not None:
        assert int(jkv.kept_from(cache)[0]) > 0


@pytest.mark.newest_further
def test_refused_requests_and_padding():
    cache, opened = jkv.allocate(jkv.init(make_config()), [0, 0])
    cache = step(cache, [0, 1], np.int32([4, 6]), 0, 12)
    # Sequence 0 would exceed the maximum context length; 5 is not open.
    cache, batch = jkv.append(
        cache, np.int32([0, 5, 1, -1]), np.int32([30, 1, 2, 1]), capacity=40
    )
    assert batch.status.tolist()[2] == jkv.Status.OK
    pages = jkv.page_table(cache, batch)
    assert np.diff(pages.indptr).tolist() == [1, 0, 2, 0]
    assert pages.last_page_lens.tolist() == [4, 0, 4, 0]
    assert int(jnp.sum(pages.slot_mapping >= 0)) == 2
    assert int(pages.query_indptr[-1]) <= 40


def test_invalid_arguments_raise():
    cache, _ = jkv.allocate(jkv.init(make_config()), 0)
    _, batch = jkv.append(cache, 0)
    other = jkv.init(make_config(num_blocks=8))
    with pytest.raises(ValueError, match="batch"):
        jkv.page_table(other, batch)
    with pytest.raises(jkv.UsageError, match="group must be in"):
        jkv.page_table(cache, batch, group=1)
