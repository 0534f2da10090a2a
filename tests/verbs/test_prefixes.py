"""Prefix caching by examples that can be checked by eye.

Blocks hold four tokens. `append_known` appends numbers that are both tokens and
contents.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import (
    allocate,
    append,
    fork,
    free,
    free_count,
    match,
    prompts,
    reorder,
    small_cache,
    stored_tokens,
    table,
    truncate,
    with_free_blocks,
    with_metadata,
    write_tokens,
)

import jkv

pytestmark = pytest.mark.one_end

PROMPT = list(range(10, 20))  # two and a half blocks


def reusing(**changes):
    return small_cache(**(dict(prefix_caching=True) | changes))


def append_known(cache, seq_id, numbers, commit=True):
    """Append and write numbers, and by default commit; return cache and batch."""
    cache, step = append(cache, seq_id, len(numbers), tokens=numbers)
    jkv.raise_for_status(step.status)
    committed = write_tokens(cache, step, numbers)
    if commit:
        return committed, step.batch
    return dataclasses.replace(committed, metadata=cache.metadata), step.batch


def started(*sequences, **changes):
    """Return a cache with these committed tokens in sequences 0, 1, ..."""
    cache = reusing(**changes)
    for seq_id, sequence in enumerate(sequences):
        cache, _ = allocate(cache, 0)
        cache, _ = append_known(cache, seq_id, sequence)
    jkv.check(cache)
    return cache


def found(cache, *rows, salts=0):
    return match(cache, rows, salts)


def test_prompts_hit_whole_and_partial_blocks():
    cache = started(PROMPT)
    for prompt, expected in (
        (PROMPT, 8),  # both full blocks; the last one was partial
        (PROMPT[:9], 8),
        (PROMPT[:8], 7),  # the last token of a prompt is always computed
        (PROMPT[:5], 4),
        (PROMPT[:4], 3),
        (PROMPT[:1], 0),
        ([], 0),
        (PROMPT[:6] + [99] * 4, 6),  # part of the second block
        ([*PROMPT[:3], 99, *PROMPT[4:]], 3),  # part of the first
        ([99, *PROMPT[1:]], 0),
        (PROMPT[4:8] + PROMPT[:4], 0),  # the same blocks at other positions
    ):
        assert found(cache, prompt) == [expected], prompt
    # In one call, as well as one by one.
    assert found(cache, PROMPT, PROMPT[:5], [99]) == [8, 4, 0]


def test_a_hit_shares_full_blocks_and_copies_a_partial_one():
    cache = started(PROMPT)
    sequence = [*PROMPT[:6], 90, 91, 92]
    cache, result = allocate(cache, len(sequence), tokens=[sequence])
    assert result.num_cached.tolist() == [6]
    assert table(cache, 0) == [0, 1, 2]
    assert table(cache, 1) == [0, 3, 4]  # the first is shared, the second copied
    assert stored_tokens(cache, 1) == PROMPT[:6]
    cache, _ = append_known(cache, 1, sequence[6:])
    assert stored_tokens(cache, 1) == sequence and stored_tokens(cache, 0) == PROMPT
    jkv.check(cache)
    # Both continuations of the first block are indexed now.
    assert found(cache, PROMPT, [*sequence, 1]) == [8, 8]


def test_nothing_is_found_before_its_commit():
    cache, _ = allocate(reusing(), 0)
    cache, batch = append_known(cache, 0, PROMPT, commit=False)
    assert found(cache, PROMPT) == [0]
    assert found(jkv.commit(cache, batch), PROMPT) == [8]
    # A sequence freed before its commit leaves nothing, even if its row is reused.
    dropped, _ = free(cache, 0)
    dropped, _ = allocate(dropped, [0] * 4)
    dropped, _ = append(dropped, range(4), 10)
    assert found(jkv.commit(dropped, batch), PROMPT) == [0]


def test_a_truncated_step_is_not_committed():
    cache, _ = allocate(reusing(), 0)
    cache, batch = append_known(cache, 0, PROMPT, commit=False)
    cache, _ = truncate(cache, 0, 0)
    cache, _ = append_known(cache, 0, [1] * 10, commit=False)
    assert found(jkv.commit(cache, batch), PROMPT, [1] * 10) == [0, 0]


def test_a_sequence_with_a_gap_commits_no_more():
    cache, _ = allocate(reusing(), 0)
    cache, _ = append_known(cache, 0, PROMPT[:4])
    cache, _ = append_known(cache, 0, PROMPT[4:6], commit=False)
    cache, _ = append_known(cache, 0, PROMPT[6:])
    assert found(cache, PROMPT) == [4]
    # Truncated to the visible part, it continues.
    cache, _ = truncate(cache, 0, 4)
    cache, _ = append_known(cache, 0, PROMPT[4:])
    assert found(cache, PROMPT) == [8]


def test_unknown_tokens_end_the_chain():
    cache, _ = allocate(reusing(), 0)
    cache, _ = append_known(cache, 0, [*PROMPT[:5], -1, *PROMPT[6:]])
    assert found(cache, PROMPT) == [4]
    assert jkv.tokens(cache, 0).tolist()[:10] == [*PROMPT[:5], -1, *PROMPT[6:]]
    cache, _ = append(cache, 0)  # without tokens
    assert jkv.tokens(cache, 0).tolist()[10:12] == [-1, -1]


def test_salts_share_nothing():
    cache = reusing()
    for seq_id, salt in enumerate((0, 7)):
        cache, _ = allocate(cache, 0, salts=salt)
        cache, _ = append_known(cache, seq_id, PROMPT)
    assert table(cache, 0)[:2] == [0, 1] and table(cache, 1)[:2] == [3, 4]
    assert found(cache, PROMPT, PROMPT, PROMPT, salts=[0, 7, 8]) == [8, 8, 0]
    cache = jkv.invalidate(cache, 7)
    assert found(cache, PROMPT, PROMPT, salts=[0, 7]) == [8, 0]
    # Open sequences with the cleared salt never become visible again.
    cache, _ = append_known(cache, 1, [1, 2, 3])
    assert found(cache, [*PROMPT, 1, 2, 3], salts=7) == [0]
    cache = jkv.clear_prefixes(cache)
    assert found(cache, PROMPT) == [0]
    jkv.check(cache)


def test_cached_blocks_are_evicted_in_lru_order_tails_first():
    first, second = PROMPT[:9], [50 + i for i in range(9)]
    cache = with_free_blocks(started(first, second), 0)
    cache, _ = free(cache, [0, 1])  # tables 0 1 2 and 3 4 5
    assert free_count(cache) == 6
    assert found(cache, first, second) == [8, 8]
    # A hit on the first prompt makes its blocks the most recently used.
    cache, result = allocate(cache, 0, tokens=[first])
    cache, _ = free(cache, result.seq_ids)
    sizes = []
    for _ in range(4):
        sizes.append((*found(cache, first, second), free_count(cache)))
        cache, _ = allocate(cache, 1)
        jkv.check(cache)
    # Blocks 2 and 5 were not full; then the second tail, its head, the first tail.
    assert sizes == [(8, 8, 6), (8, 8, 5), (8, 8, 4), (8, 4, 3)]


@pytest.mark.parametrize(
    "count, length, expected",
    [(3, 5, [[0, 1], [0, 3], [0, 5]]), (2, 8, [[0, 1], [0, 1]])],
)
def test_equal_prefixes_of_one_step_are_stored_once(count, length, expected):
    cache, _ = allocate(reusing(), [0] * count)
    sequence = PROMPT[:length]
    cache, step = append(cache, range(count), length, tokens=sequence * count)
    cache = write_tokens(cache, step, sequence * count)
    jkv.check(cache)
    assert [table(cache, seq_id) for seq_id in range(count)] == expected
    assert all(stored_tokens(cache, seq_id) == sequence for seq_id in range(count))
    assert free_count(cache) == 8 - len(set(sum(expected, [])))


def test_a_decoding_step_is_committed_like_any_other():
    """The decode path gives the same result as the path for runs of blocks."""
    cache = started(PROMPT[:3], PROMPT[:7], [*PROMPT[:2], 99], PROMPT[:3])
    last = [PROMPT[3], PROMPT[7], 5, PROMPT[3]]
    cache, batch = jkv.append(cache, list(range(4)), tokens=jnp.asarray(last))
    assert batch.is_decoding
    as_any = dataclasses.replace(batch, is_decoding=False)
    one_each = jkv.commit(cache, batch).metadata
    chex.assert_trees_all_equal(one_each, jkv.commit(cache, as_any).metadata)
    # Sequences 0 and 3 now share the first block of sequence 1; 2 has its own.
    shared, own = table(cache, 1)[0], table(cache, 2)[0]
    first = one_each.groups[0].block_tables[:4, 0]
    assert first.tolist() == [shared, shared, own, shared]


def test_a_write_never_reaches_a_shared_cached_block():
    cache, _ = fork(started(PROMPT), 0)
    cache, status = truncate(cache, 0, 6)
    assert status.tolist() == [0] and table(cache, 0) == [0, 4]
    cache, _ = append_known(cache, 0, [70, 71, 72])
    assert stored_tokens(cache, 0) == [*PROMPT[:6], 70, 71, 72]
    cache, result = allocate(cache, 0, tokens=[PROMPT])
    assert stored_tokens(cache, int(result.seq_ids[0])) == PROMPT[:8]
    jkv.check(cache)


def test_truncation_within_an_unshared_block_needs_no_other():
    """Rollback works in a full pool; cached blocks past the cut are removed."""
    cache = started(PROMPT)
    cache, result = allocate(cache, 0, tokens=[PROMPT[:8]])  # a cached branch
    cache, _ = append_known(cache, int(result.seq_ids[0]), [77, 78, 79, 80])
    cache, _ = free(cache, result.seq_ids)
    cache = with_free_blocks(cache, 0)
    cache, status = truncate(cache, 0, 6)
    assert status.tolist() == [0] and table(cache, 0) == [0, 1]
    jkv.check(cache)
    assert match(cache, [PROMPT]) == [4]
    cache, _ = append_known(cache, 0, [70, 71])
    assert stored_tokens(cache, 0) == [*PROMPT[:6], 70, 71]
    assert match(cache, [[*PROMPT[:6], 70, 71, 72]]) == [8]
    jkv.check(cache)


def test_truncation_removes_all_successors_from_the_index():
    """Cached continuations of other sequences after the truncated block are removed."""
    sequence = [*range(12), 12]
    cache = started(sequence)
    cache, result = allocate(cache, 0, tokens=[[*sequence[:8], 90]])
    cache, _ = append_known(cache, int(result.seq_ids[0]), [90, 91, 92, 93])
    cache, _ = free(cache, result.seq_ids)
    assert match(cache, [[*sequence[:8], 90, 91, 92, 93, 94], sequence]) == [12, 12]
    assert jkv.stats(cache).cached_blocks == 1
    cache, _ = truncate(cache, 0, 7)
    assert match(cache, [[*sequence[:8], 90, 91, 92, 93, 94], sequence]) == [4, 4]
    assert jkv.stats(cache).cached_blocks == 0
    jkv.check(cache)


def test_cached_blocks_are_pinned_before_any_is_allocated():
    cache = with_free_blocks(started(PROMPT[:9]), 0)
    cache, _ = free(cache, 0)
    # The second request would evict the cached blocks, but the first has pinned two.
    cache, result = allocate(cache, [12, 4], tokens=[PROMPT[:9], [99]])
    assert result.status.tolist() == [0, int(jkv.Status.OUT_OF_BLOCKS)]
    assert result.num_cached.tolist() == [8, 0]
    assert stored_tokens(cache, int(result.seq_ids[0])) == PROMPT[:8]
    # A request that needs only live blocks is served by an empty pool.
    cache, result = allocate(cache, 0, tokens=[PROMPT[:9]])
    assert result.status.tolist() == [0] and result.num_cached.tolist() == [8]


def test_evict_cached_removes_the_oldest():
    cache = started(PROMPT, [50 + i for i in range(9)])
    cache, _ = free(cache, [1, 0])
    sizes = []
    for _ in range(5):
        sizes.append(found(cache, PROMPT, [50 + i for i in range(9)]))
        cache = jkv.evict_cached(cache, 1)
        jkv.check(cache)
    assert sizes == [[8, 8], [8, 4], [8, 0], [4, 0], [0, 0]]
    assert free_count(cache) == 8


def test_forks_and_reordered_sequences_still_commit():
    cache = started(PROMPT[:6])
    cache, _ = fork(cache, 0)
    cache, _ = append_known(cache, 1, [30, 31])
    cache, _ = reorder(cache, 0, 1)
    cache, _ = append_known(cache, 0, [40, 41, 42, 43])
    sequence = [*PROMPT[:6], 30, 31, 40, 41, 42, 43]
    assert stored_tokens(cache, 0) == sequence
    assert found(cache, [*sequence, 1]) == [12]
    jkv.check(cache)


@pytest.mark.parametrize(
    ("num_tokens", "change", "cached"),
    [(2, 0, 80_000), (0, 0, 80_000), (10, 1, 0)],
    ids=["hits that grow", "hits alone", "new prompts"],
)
def test_ten_thousand_prompts_end_with_the_full_pool(num_tokens, change, cached):
    """Hits leave holes in the ring, and new prompts fill the index."""
    cache = started(PROMPT, num_blocks=NUM_TURNING)
    cache, _ = free(cache, 0)
    found = np.zeros(2, np.int32)
    cache, found = take_turns((cache, found), np.int32(num_tokens), np.int32(change))
    jkv.check(cache)
    assert found.tolist() == [cached, 80_000] and free_count(cache) == NUM_TURNING


NUM_TURNING = 46  # more blocks than a hash bucket has places


@jax.jit
def take_turns(carry, num_tokens, change):
    """Allocate prompts, grow each to ten tokens at most, commit and free it."""

    def turn(index, carry):
        cache, found = carry
        prompt = jnp.asarray(PROMPT) + (index + 1) * change
        cache, result = jkv.allocate(cache, 0, tokens=prompt[None])
        start = result.num_cached[0]
        tokens = jnp.roll(prompt, -start)
        count = jnp.minimum(num_tokens, 10 - start)[None]
        cache, batch = jkv.append(
            cache, result.seq_ids, count, capacity=10, tokens=tokens
        )
        cache = jkv.commit(cache, batch)
        matched = jkv.match(cache, prompt[None])[0]
        cache, _ = jkv.free(cache, result.seq_ids)
        return cache, found + jnp.stack([start, matched])

    return jax.lax.fori_loop(0, 10_000, turn, carry)


@pytest.mark.parametrize("name", ["salts", "parents", "tokens"])
def test_lookup_compares_tokens_not_only_hashes(name):
    """An index entry matches only with the prompt's salt, parent and tokens."""
    cache = started(PROMPT)
    assert found(cache, PROMPT) == [8]
    metadata, second = cache.metadata, table(cache, 0)[1]
    owner = metadata.groups[0] if name == "tokens" else metadata.index
    changed = {name: getattr(owner, name).at[second].set(5)}
    if name != "tokens":
        changed = dict(index=dataclasses.replace(owner, **changed))
    assert found(with_metadata(cache, **changed), PROMPT) == [4]


def test_one_trace_however_the_values_change():
    rng = np.random.default_rng(0)

    def step(cache, tokens, lengths, salts):
        found = jkv.match(cache, tokens, salts)
        cache, result = jkv.allocate(cache, lengths, tokens=tokens, salts=salts)
        cache, batch = jkv.append(cache, result.seq_ids, tokens=tokens[:, 0])
        cache = jkv.evict_cached(jkv.commit(cache, batch), lengths[0])
        cache = jkv.invalidate(cache, salts[0])
        return jkv.free(cache, result.seq_ids)[0], found

    step = jax.jit(chex.assert_max_traces(step, n=1))
    cache = reusing()
    for _ in range(5):
        tokens = rng.integers(-1, 4, size=(2, 9)).astype(np.int32)
        lengths, salts = rng.integers(9, size=(2, 2)).astype(np.int32)
        cache, _ = step(cache, tokens, lengths, salts)
    jkv.check(cache)


@pytest.mark.parametrize("verb", ["match", "evict_cached", "invalidate", "clear"])
def test_without_an_index_errors_suggest_prefix_caching(verb):
    cache = small_cache()
    with pytest.raises(ValueError, match="prefix_caching=True"):
        if verb == "match":
            jkv.match(cache, prompts([PROMPT]))
        elif verb == "clear":
            jkv.clear_prefixes(cache)
        else:
            getattr(jkv, verb)(cache, 1)


def test_prompts_and_salts_must_fit():
    cache = reusing()
    with pytest.raises(ValueError, match="tokens must be"):
        jkv.allocate(cache, [1], tokens=np.array(PROMPT))
    with pytest.raises(ValueError, match="tokens must be"):
        jkv.match(cache, np.ones((1, 4), np.float32))
    with pytest.raises(ValueError, match="one entry per request"):
        jkv.allocate(cache, [1, 2], tokens=np.array([PROMPT]))
    with pytest.raises(ValueError, match="one entry per request"):
        jkv.match(cache, np.array([PROMPT]), [0, 0])


def test_only_unreferenced_cached_blocks_are_evicted():
    first, second = list(range(9)), list(range(10, 19))
    cache, _ = free(started(first[:8], second[:8]), 1)
    cache = jkv.evict_cached(cache, 1)
    cached = [bool(jkv.block_info(cache, np.int32(b)).is_cached) for b in range(4)]
    assert cached == [False, False, True, False]
    cache = jkv.evict_cached(cache, 99)
    assert stored_tokens(cache, 0) == first[:8]
    assert found(cache, first, second) == [8, 0]  # live, still indexed


def test_an_empty_sequence_commits_after_clear_prefixes():
    cache, _ = allocate(started(PROMPT), 0)
    cache = jkv.invalidate(cache, 0)
    assert found(cache, PROMPT) == [0]
    cache, _ = append_known(cache, 1, PROMPT)
    assert found(cache, PROMPT) == [8]
    cache, _ = append_known(cache, 0, [20, 21])  # commits no more
    assert found(cache, [*PROMPT, 20, 21, 22]) == [8]
    jkv.check(cache)


def test_a_block_shared_before_commit_is_not_indexed():
    cache, _ = allocate(reusing(), 0)
    cache, batch = append_known(cache, 0, PROMPT[:8], commit=False)
    cache, _ = fork(cache, 0)
    cache = jkv.commit(cache, batch)
    assert found(cache, PROMPT) == [0]
    cache, _ = append_known(cache, 0, [30, 31, 32, 33])
    assert found(cache, [*PROMPT[:8], 30, 31, 32, 33, 34]) == [0]
    jkv.check(cache)


def test_hits_may_exceed_the_requested_tokens():
    cache, result = allocate(started(PROMPT), 3, tokens=[PROMPT])
    assert result.num_cached.tolist() == [8]
    assert table(cache, 1) == [0, 1] and stored_tokens(cache, 1) == PROMPT[:8]
    jkv.check(cache)
