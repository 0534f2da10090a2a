"""Each verb beside open sequences: the rows of the table of verbs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from support.caches.kept_sequences import OTHER, PENDING, SEQUENCE
from support.states.folding_model import attend, fold_tokens, make_config, number_of

SNAPSHOT = 16


def append(kept):
    kept.feed(0, [1])
    kept.feed(0, [2, 0, 3, 1, 1, 4], num_pending=2)
    kept.feed(0, [3])


def read(kept):
    layer = 1 if len(kept.cache.layer_groups) == 3 else 0

    def run(cache):
        return jkv.read(cache, layer, 0, return_start=True)

    _, values, length, start = kept.evaluate(run)
    sequence, start = kept.sequences[0], int(start)
    assert int(length) == len(sequence)
    wanted = [number_of(token, place) for place, token in enumerate(sequence)]
    np.testing.assert_array_equal(values[start : len(sequence), 0, 0], wanted[start:])


def read_state(kept):
    def run(cache):
        _, batch = jkv.append(cache, [0])
        state = jkv.read_state(cache, 0, batch)
        return state, jkv.read_pending(cache, 0, batch), batch.pending_before

    state, pending, count = jax.device_get(kept.evaluate(run))
    sequence = kept.sequences[0]
    base = len(sequence) - int(count[0])
    np.testing.assert_array_equal(state["fold"][0], fold_tokens(sequence[:base]))
    rest = [*sequence[base:], *[0] * PENDING][:PENDING]
    np.testing.assert_array_equal(pending["token"][0], rest)


def write_state(kept):
    after = fold_tokens([*kept.sequences[0], 3]).astype(np.int32)[None]

    def run(cache):
        cache, batch = jkv.append(cache, [0], tokens=[3], num_pending=0)
        tokens = np.array([3], np.int32)
        for layer in range(len(cache.layer_groups)):
            if layer == 1 and cache.block_storage:
                window = cache.metadata.block_groups[0].window.length
                _, cache = attend(cache, layer, batch, tokens, window=window)
                continue
            cache = jkv.write_state(
                cache, layer, batch, {"fold": after}, {"token": tokens}
            )
        return jkv.commit(cache, batch)

    kept.call(run)
    kept.sequences[0].append(3)


def fork(kept):
    _fork(kept, len(kept.sequences[0]))


def fork_at_snapshot(kept):
    _fork(kept, SNAPSHOT)


def _fork(kept, length):
    forked = kept.call(jkv.fork, [0], [length])
    jkv.raise_for_status(forked.status)
    child = int(forked.seq_ids[0])
    kept.sequences[child] = kept.sequences[0][:length]
    kept.feed(0, [1])
    kept.step({child: [3, 3], 1: [0]})


def truncate_by_two(kept):
    _truncate(kept, len(kept.sequences[0]) - 2)


def truncate_to_snapshot(kept):
    _truncate(kept, SNAPSHOT)


def truncate_to_nothing(kept):
    _truncate(kept, 0)


def _truncate(kept, length):
    jkv.raise_for_status(kept.call(jkv.truncate, [0], [length]))
    del kept.sequences[0][length:]
    kept.check()
    kept.feed(0, [4, 0])


def reorder(kept):
    jkv.raise_for_status(kept.call(jkv.reorder, [0, 1], [1, 0]))
    kept.sequences = {0: kept.sequences[1], 1: kept.sequences[0]}


def free(kept):
    """Free a sequence; a new one in its row sees no old contents."""
    jkv.raise_for_status(kept.call(jkv.free, [0]))
    del kept.sequences[0]
    kept.check()
    assert kept.open_anew(0) == 0
    kept.feed(0, OTHER)


def match(kept):
    prompt = [*SEQUENCE[:20], 3, 3]
    expected = SNAPSHOT if kept.has_state else 20
    assert kept.evaluate(jkv.match, _row(prompt)).tolist() == [expected]
    seq_id, found = kept.open(prompt)
    assert found == expected
    kept.feed(seq_id, prompt[found:])


def evict_cached(kept):
    _forget(kept, lambda cache: jkv.evict_cached(cache, 100))


def invalidate(kept):
    _forget(kept, lambda cache: jkv.invalidate(cache, 0))


def clear_prefixes(kept):
    _forget(kept, jkv.clear_prefixes)


def _forget(kept, verb):
    """Assert that only unused blocks are removed from the index."""
    jkv.raise_for_status(kept.call(jkv.free, [0]))
    del kept.sequences[0]
    assert int(kept.evaluate(jkv.match, _row(SEQUENCE))[0]) > 0
    kept.call(verb)
    assert int(kept.evaluate(jkv.match, _row(SEQUENCE))[0]) == 0


def evict(kept):
    """Evict the least recently used sequence; without blocks none is evicted."""

    def run(cache):
        return jkv.evict(cache, jkv.num_free_blocks(cache) + 1)

    kept.feed(0, [1])
    gone = kept.call(run).tolist()
    if kept.kind == "state":
        assert set(gone) == {-1}
    else:
        assert gone[0] == 1 and set(gone[1:]) == {-1}
        del kept.sequences[1]


def evict_older_than(kept):
    kept.feed(0, [1])
    gone = kept.call(jkv.evict_older_than, np.uint32(0)).tolist()
    assert gone[0] == 1 and set(gone[1:]) == {-1}
    del kept.sequences[1]


def swap_out_and_in(kept):
    """Swap into another cache, the second sequence first."""
    kept.cache, swapped = jkv.swap_out(kept.cache, [1, 0])
    assert not kept.cache.metadata.is_open.any()
    other = jkv.init(make_config(kept.kind, pending=PENDING))
    kept.cache, back = jkv.swap_in(other, swapped)
    kept.sequences = dict(
        zip(back.seq_ids.tolist(), (kept.sequences[1], kept.sequences[0]), strict=True)
    )


def save_and_load(kept, folder):
    """Save the first sequence and load it into the same cache: it is there twice."""
    jkv.save(folder / "sequence", kept.cache, [0])
    kept.cache, back = jkv.load(folder / "sequence", kept.cache)
    jkv.raise_for_status(back.status)
    kept.sequences[int(back.seq_ids[0])] = [*kept.sequences[0]]


def compact(kept):
    jkv.raise_for_status(kept.call(jkv.free, [0]))
    del kept.sequences[0]
    kept.call(jkv.compact)


def resize(kept):
    kept.cache = jkv.resize(kept.cache, [24] * len(kept.cache.block_storage))
    kept.cache = jkv.resize(kept.cache, [96] * len(kept.cache.block_storage))


def debug(kept):
    """Assert that debug mode accepts a valid step."""
    copied = jkv.debug(jax.tree.map(jnp.copy, kept.cache))
    watched = dataclasses.replace(kept.copy(), cache=copied, donates=True)
    watched.feed(0, [1])
    jkv.check(watched.cache)
    assert jkv.stats(watched.cache).live_sequences == len(kept.sequences)


def _row(prompt):
    return np.array([[*prompt, *[-1] * (32 - len(prompt))]], np.int32)
