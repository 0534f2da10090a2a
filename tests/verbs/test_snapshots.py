"""State snapshots: taken at multiples, found by tokens, evicted in LRU order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.prefixes import hashing
from jkv.status import Status

pytestmark = pytest.mark.one_end

EVERY, WIDTH = 4, 13


def make_cache(num_snapshots=3, max_context_length=16):
    """Create a cache with recurrent states only, which sum the tokens."""
    state = jkv.StateConfig(
        num_layers=1,
        arrays={"sum": ((), "int32")},
        num_snapshots=num_snapshots,
        snapshot_every=EVERY,
        max_sequences=3,
        max_context_length=max_context_length,
        block_size=2,
    )
    return jkv.init(
        jkv.GroupedConfig(groups=(state,), layer_groups=(0,), prefix_caching=True)
    )


@jax.jit
def feed(cache, seq_id, tokens):
    """Append tokens up to the first -1, add them to the sum, and commit."""
    count = jnp.sum((tokens >= 0).astype(jnp.int32))
    cache, batch = jkv.append(
        cache, seq_id[None], count[None], capacity=WIDTH, tokens=tokens
    )
    total = jkv.read_state(cache, 0, batch)["sum"]
    total += jnp.sum(jnp.where(tokens >= 0, tokens, 0))
    cache = jkv.write_state(cache, 0, batch, {"sum": total})
    return jkv.commit(cache, batch), batch.status[0], total[0]


def padded(tokens):
    row = np.full(WIDTH, -1, np.int32)
    row[: len(tokens)] = tokens
    return row


match = jax.jit(jkv.match)
allocate = jax.jit(lambda cache, row: jkv.allocate(cache, 0, tokens=row[None]))


def found(cache, prompt):
    return int(match(cache, padded(prompt)[None])[0])


def open_and_feed(cache, prompt):
    """Open a sequence for a prompt and feed its uncached tokens."""
    cache, opened = allocate(cache, padded(prompt))
    seq_id, start = opened.seq_ids[0], int(opened.num_cached[0])
    cache, status, total = feed(cache, seq_id, padded(prompt[start:]))
    assert int(status) == Status.OK and int(total) == sum(prompt)
    jkv.check(cache)
    return cache, seq_id, start


def close(cache, *seq_ids):
    return jkv.free(cache, jnp.stack(seq_ids))[0]


def test_two_sequences_share_a_snapshot_and_diverge():
    cache, first, start = open_and_feed(make_cache(), [5, 1, 2, 3])
    assert start == 0 and jnp.flatnonzero(jkv.snapshots(cache, first)).tolist() == [4]
    cache, second, start = open_and_feed(cache, [5, 1, 2, 3, 9])
    cache, third, other = open_and_feed(cache, [5, 1, 2, 3, 7, 7])
    assert start == other == EVERY
    cache, status, total = feed(cache, second, padded([4]))
    assert int(status) == Status.OK and int(total) == 5 + 1 + 2 + 3 + 9 + 4
    # The first can be truncated to the snapshot, the others to their shared part.
    cache, status = jkv.truncate(cache, jnp.stack([first, second, third]), [4, 4, 5])
    assert status.tolist() == [Status.OK, Status.OK, Status.INVALID_ARGUMENT]
    cache, _, total = feed(cache, second, padded([1]))
    assert int(total) == 5 + 1 + 2 + 3 + 1


def test_the_least_recently_used_snapshot_is_evicted():
    sequences = [[n, 1, 1, 1] for n in range(2, 6)]
    cache, used = make_cache(), []
    for sequence in sequences[:3]:
        cache, seq_id, _ = open_and_feed(cache, sequence)
        cache = close(cache, seq_id)
    # A lookup for a waiting prompt is not a use.
    assert found(cache, [*sequences[1], 0]) == EVERY
    cache, seq_id, start = open_and_feed(cache, [*sequences[0], 8])
    assert start == EVERY
    cache = close(cache, seq_id)
    cache, seq_id, _ = open_and_feed(cache, sequences[3])
    used = [found(cache, [*sequence, 0]) for sequence in sequences]
    assert used == [EVERY, 0, EVERY, EVERY]
    # Truncation to a snapshot is a use.
    cache = close(cache, seq_id)
    cache, seq_id, _ = open_and_feed(cache, [*sequences[2], 6])
    cache, status = jkv.truncate(cache, seq_id[None], EVERY)
    assert int(status[0]) == Status.OK
    cache = jkv.evict_cached(cache, 2)
    assert [found(cache, [*sequence, 0]) for sequence in sequences] == [0, 0, EVERY, 0]
    assert found(jkv.invalidate(cache, 1), [*sequences[2], 0]) == EVERY
    assert found(jkv.invalidate(cache, 0), [*sequences[2], 0]) == 0
    cache = jkv.clear_prefixes(cache)
    assert [found(cache, [*sequence, 0]) for sequence in sequences] == [0, 0, 0, 0]


def spilled_snapshots(*sequences, cache=None):
    """Return the spilled snapshots of sequences, in the order of computation."""
    cache = cache or make_cache(num_snapshots=8, max_context_length=32)
    for sequence in sequences:
        cache, seq_id, _ = open_and_feed(cache, sequence)
        cache = close(cache, seq_id)
    return jkv.spill(cache, 8)[1]


def test_restore_renews_existing_snapshots_and_evicts_none_of_them():
    a, b, c, d = ([n, 1, 1, 1] for n in range(2, 6))
    cache, _ = jkv.restore(make_cache(2), spilled_snapshots(a, c))
    # The first is least recently used but named, so c is evicted for b.
    cache, num = jkv.restore(cache, spilled_snapshots(a, b))
    assert num == 1
    assert [found(cache, [*sequence, 0]) for sequence in (a, b, c)] == [EVERY, EVERY, 0]
    cache, seq_id, start = open_and_feed(cache, [*a, 7])
    assert start == EVERY  # with the right sum
    cache = close(cache, seq_id)
    # Naming a snapshot is a use, although nothing is written.
    cache, num = jkv.restore(cache, spilled_snapshots(b))
    cache, other = jkv.restore(cache, spilled_snapshots(d))
    assert (num, other) == (0, 1)
    assert [found(cache, [*sequence, 0]) for sequence in (a, b, d)] == [0, EVERY, EVERY]
    # If there are too many, the last and longest ones are restored.
    cache, num = jkv.restore(make_cache(2), spilled_snapshots(a, b, c))
    assert num == 2
    assert [found(cache, [*sequence, 0]) for sequence in (a, b, c)] == [0, EVERY, EVERY]


def test_a_smaller_context_restores_only_reachable_snapshots():
    sequence = [2, 1, 1, 1, 3, 1, 1, 1]
    spilled = spilled_snapshots(sequence[:4], sequence)
    for length, expected in ((8, 8), (7, 4), (3, 0)):
        cache = make_cache(max_context_length=length)
        cache, num = jkv.restore(cache, spilled)
        assert num == expected // EVERY
        jkv.check(cache)
        prompt = np.full((1, length), -1, np.int32)
        short = [*sequence, 0][:length]
        prompt[0, : len(short)] = short
        assert int(jkv.match(cache, prompt)[0]) == min(expected, 4)


def test_sequences_with_equal_hashes_are_distinguished(monkeypatch):
    """Hashes select candidates; tokens are compared."""
    for name in ("column_hash", "salt_hash"):
        poor = jax.jit(lambda *given: jnp.zeros(given[-1].shape, jnp.uint32))
        monkeypatch.setattr(hashing, name, poor)
    # A cache size of its own, so that no compiled program is shared with other tests.
    cache = make_cache(num_snapshots=2, max_context_length=15)
    cache, first, _ = open_and_feed(cache, [1, 2, 3, 4])
    assert found(cache, [4, 3, 2, 1, 0]) == 0
    cache, second, start = open_and_feed(cache, [4, 3, 2, 1, 0])
    assert start == 0
    assert found(cache, [1, 2, 3, 4, 0]) == EVERY
    assert found(cache, [1, 2, 3, 4, 0, 0, 0, 0, 0]) == EVERY
