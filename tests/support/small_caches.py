"""Small caches, and verbs with requests of one shape.

Compilation takes most of these tests' time, and a verb is compiled once per shape of
its cache and requests. So nearly all tests share `small_config`; the verbs here pad a
call to WIDTH requests with -1, the rows of a step to ROWS and prompts to PROMPT tokens,
and strip the padding from the results. A small pool is a large one that other sequences
fill (`with_free_blocks`). Tests of numbers of requests or rows call `jkv` directly.

Caches are values, so `small_cache` and `opened` create each one once; a test that
donates one takes it `copied`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.storage.leaves import put

WIDTH, ROWS, PROMPT = 4, 16, 16


def small_config(**changes):
    """Eight blocks of four tokens, four sequences of at most 14 tokens, float32."""
    fields = dict(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        num_blocks=8,
        block_size=4,
        max_sequences=4,
        max_context_length=14,
        dtype=jnp.float32,
    )
    return jkv.CacheConfig(**(fields | changes))


@functools.cache
def small_cache(**changes):
    """Create a cache of `small_config`, its storage full of NaN."""
    return filled_cache(small_config(**changes))


@functools.cache
def filled_cache(config):
    """Create a cache, its storage full of NaN."""
    cache = with_storage_filled(jkv.init(config), np.nan)
    leaves = jax.tree.leaves(cache)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves), "not in jit"
    return cache


@functools.cache
def opened(*lengths, **changes):
    """Return a small cache with `lengths` tokens in sequences 0, 1, ...

    Token p of sequence s is the number 100 * s + p.
    """
    cache = small_cache(**changes)
    for seq_id, length in enumerate(lengths):
        cache, result = allocate(cache, 0)
        jkv.raise_for_status(result.status)
        if length:
            cache = grow(cache, seq_id, range(100 * seq_id, 100 * seq_id + length))
    return cache


def copied(cache):
    """Return a cache with arrays of its own, to be donated."""
    return put(jax.device_get(cache), None)


def with_free_blocks(cache, count):
    """Reserve all free blocks except `count` for other sequences."""
    surplus = free_count(cache) - count
    most = cache.metadata.max_blocks_per_sequence
    kept = cache.metadata.groups[0].window.most_blocks(cache.block_size, 1)
    most = min(most, kept or most)  # a window reserves the blocks it keeps
    shares = [min(most, surplus - start) for start in range(0, surplus, most)]
    tokens = [min(cache.max_context_length, n * cache.block_size) for n in shares]
    cache, result = allocate(cache, tokens)
    jkv.raise_for_status(result.status)
    assert free_count(cache) == count
    return cache


def with_free_rows(cache, count):
    """Open empty sequences in all rows except `count`."""
    rows = cache.max_sequences - int(np.asarray(cache.metadata.is_open).sum())
    cache, result = allocate(cache, [0] * (rows - count))
    jkv.raise_for_status(result.status)
    return cache


def with_storage_filled(cache, value, blocks=None, group=None):
    """Fill the K/V arrays with one value, such as the NaN of recycled memory.

    With scales, these are filled and the elements are ones. `blocks` and `group`
    restrict the blocks and the groups of layers.
    """
    for number, storage in enumerate(cache.storage):
        if storage.kind == "blocks" and group in (None, number):
            filled = {
                name: _filled(pool, _bits_of(name, pool, storage, value), blocks)
                for name, pool in storage.arrays.items()
            }
            cache = cache.with_group_storage(number, storage.with_arrays(filled))
    return cache


def _bits_of(name, pool, storage, value):
    """Return the bits of a value in one of a group's arrays."""
    if storage.key_scales is not None and name in ("key_pool", "value_pool"):
        return np.ones((), storage.dtype).view(pool.dtype)
    if pool.dtype == np.uint16:
        # bfloat16 is stored in uint16: the upper half of float32's bits.
        return int(np.float32(value).view(np.uint32)) >> 16
    return value


def _filled(pool, bits, blocks):
    array = np.array(pool)
    array[:, slice(None) if blocks is None else blocks] = bits
    return put(array, pool.sharding if pool.committed else None)


COLUMNS = "context_lengths", "is_open", "created", "last_used", "num_uses"


def with_metadata(cache, group=0, **changes):
    """Return a cache with other metadata arrays, in numpy's layout.

    Names are those of the sequences, of a group of layers, or of the index.
    """
    metadata = cache.metadata
    for name, value in jax.tree.map(jnp.asarray, changes).items():
        if name in COLUMNS:
            column = COLUMNS.index(name)
            value = value.astype(jnp.int32)
            rows = metadata.sequences.rows.at[..., column].set(value)
            metadata = metadata.with_sequences(rows=rows)
        elif hasattr(metadata.sequences, name):
            sequences = dataclasses.replace(metadata.sequences, **{name: value})
            metadata = dataclasses.replace(metadata, sequences=sequences)
        elif hasattr(metadata.groups[group], name):
            changed = dataclasses.replace(metadata.groups[group], **{name: value})
            metadata = metadata.with_group(group, changed)
        else:
            metadata = dataclasses.replace(metadata, **{name: value})
    return cache.with_metadata(metadata)


# Verbs with padded requests.


class Step(NamedTuple):
    """The results of `append` without the padding, and the batch itself."""

    status: np.ndarray  # i32[B], as all up to `context_lengths`
    query_starts: np.ndarray
    query_lengths: np.ndarray
    context_lengths: np.ndarray
    valid: np.ndarray  # bool[R], R rows of the requests, as all below
    positions: np.ndarray
    block_ids: np.ndarray  # of the first group of layers
    offsets: np.ndarray
    batch: jkv.Batch


def allocate(cache, num_tokens, tokens=None, salts=0, keep_free=0):
    """Call `jkv.allocate` with prompts as lists."""
    num_tokens = np.atleast_1d(num_tokens)
    count = len(num_tokens if tokens is None else tokens)
    num_tokens = np.broadcast_to(num_tokens, count)
    options: dict[str, Any] = dict(keep_free=keep_free)
    if cache.metadata.index.is_there:
        options |= dict(tokens=prompts(tokens or []), salts=_padded(salts, count, 0))
    cache, result = jkv.allocate(cache, _padded(num_tokens, count, -1), **options)
    return cache, _without_padding(result, count)


def match(cache, tokens, salts=0):
    """Call `jkv.match` with prompts as lists."""
    found = jkv.match(cache, prompts(tokens), _padded(salts, len(tokens), 0))
    return found.tolist()[: len(tokens)]


def append(cache, seq_ids, num_tokens=1, tokens=None):
    """Call `jkv.append` with the tokens of all rows as a list."""
    seq_ids = np.atleast_1d(seq_ids)
    count = len(seq_ids)
    counts = _padded(num_tokens, count, 0)
    rows = int(np.clip(counts, 0, ROWS).sum())
    if cache.metadata.tokens is not None:
        tokens = _padded([] if tokens is None else tokens, None, -1, ROWS)
    cache, batch = jkv.append(
        cache, _padded(seq_ids, count, -1), counts, capacity=ROWS, tokens=tokens
    )
    found = jax.device_get(batch)
    of_rows = found.valid, found.positions, found.blocks_of_groups[0], found.offsets
    fields = [
        *(getattr(found, name)[:count] for name in Step._fields[:4]),
        *(array[:rows] for array in of_rows),
    ]
    return cache, Step(*fields, batch)


def fork(cache, seq_ids, lengths=None):
    """`jkv.fork`."""
    return _call(jkv.fork, cache, seq_ids, *([] if lengths is None else [lengths]))


def free(cache, seq_ids):
    """`jkv.free`."""
    return _call(jkv.free, cache, seq_ids)


def touch(cache, seq_ids):
    """`jkv.touch`."""
    return _call(jkv.touch, cache, seq_ids)


def truncate(cache, seq_ids, lengths):
    """`jkv.truncate`."""
    return _call(jkv.truncate, cache, seq_ids, lengths)


def reorder(cache, seq_ids, parents):
    """`jkv.reorder`."""
    return _call(jkv.reorder, cache, seq_ids, parents)


def prompts(rows):
    """Return padded prompts, i32[WIDTH, PROMPT]."""
    padded = [_padded(row, None, -1, PROMPT) for row in rows]
    return np.array(padded + [[-1] * PROMPT] * (WIDTH - len(rows)), np.int32)


def _call(verb, cache, seq_ids, *others):
    count = len(np.atleast_1d(seq_ids))
    others = [_padded(other, count, 0) for other in others]
    cache, result = verb(cache, _padded(seq_ids, count, -1), *others)
    return cache, _without_padding(result, count)


def _padded(values, count, padding, width=WIDTH):
    """Return values as i32[width]; a scalar applies to the first `count`."""
    values = np.asarray(values, np.int64)
    if values.ndim == 0:
        values = np.broadcast_to(values, count)
    assert len(values) <= width, "call jkv itself"
    rest = [padding] * (width - len(values))
    return np.concatenate([values, rest]).astype(np.int32)


def _without_padding(result, count):
    return jax.tree.map(lambda array: np.asarray(array)[:count], result)


# Contents.


def write_tokens(cache, step, contents):
    """Write rows of one number each: keys are +number, values -number.

    `step` is a result of `append` above or of `jkv.append`, and may be traced. Rows
    past `contents` are zeros.
    """
    batch = step.batch if isinstance(step, Step) else step
    xp = jnp if isinstance(contents, jax.Array) else np
    rows = xp.asarray(contents, xp.float32)
    missing = batch.num_rows - rows.shape[0]
    rows = xp.concatenate([rows, xp.zeros(missing, xp.float32)])[:, None, None]
    for layer in range(cache.num_layers):
        storage = cache.storage[cache.find_layer(layer).group]
        shape = batch.num_rows, storage.num_kv_heads
        keys = xp.broadcast_to(rows, (*shape, storage.head_dim))
        values = xp.broadcast_to(-rows, (*shape, storage.value_head_dim))
        cache = jkv.write(cache, layer, batch, keys, values)
    return jkv.commit(cache, batch)


def grow(cache, seq_id, contents):
    """Append and write the given numbers to one sequence, without refusal."""
    cache, step = append(cache, seq_id, len(contents))
    jkv.raise_for_status(step.status)
    return write_tokens(cache, step, contents)


def stored_tokens(cache, seq_id):
    """Return the numbers that `write_tokens` stored, checked in every layer."""
    numbers = None
    for layer in range(cache.num_layers):
        keys, values, length = jax.device_get(jkv.read(cache, layer, seq_id))
        keys, values = keys[:length], values[:length]
        assert (keys == keys[:, :1, :1]).all() and (values == -keys[:, :, :1]).all()
        found = [int(number) for number in keys[:, 0, 0]]
        assert numbers is None or numbers == found
        numbers = found
    return numbers


def table(cache, seq_id, group=0):
    """Return the block ids of a sequence in a group of layers, as a list."""
    blocks = jkv.block_ids(cache, seq_id, group=group).tolist()
    nothing = cache.metadata.groups[group].num_blocks
    return [block for block in blocks if block != nothing]


def tables(cache):
    """Return the block ids of all sequences."""
    return [table(cache, seq_id) for seq_id in range(cache.max_sequences)]


def ring_order(cache, group=0):
    """Return the free blocks in allocation order."""
    found = []
    for ring in jax.device_get(cache.metadata.block_groups[group].free_blocks).by_class:
        head, span = ring.bounds[:2].tolist()
        places = (head + np.arange(span)) % ring.ids.size
        blocks = ring.ids[places]
        if ring.indices is not None:  # without holes
            blocks = blocks[ring.indices[blocks] == places]
        found += blocks.tolist()
    return found


def free_count(cache, group=None):
    """Return the number of free blocks in a group of layers, or in each."""
    if group is None:
        return int(jkv.num_free_blocks(cache))
    return int(cache.metadata.groups[group].free_blocks.count)


def lengths(cache):
    """Return the context lengths of all sequences."""
    return cache.metadata.context_lengths.tolist()


def names(status):
    """Return the names of statuses."""
    return [jkv.Status(code).name for code in np.asarray(status).tolist()]


def refusal_counts(cache):
    """Return the refusal count of each status, as Python ints."""
    words = np.asarray(cache.metadata.refusals).astype(np.uint32)
    return [int(low) + (int(high) << 32) for low, high in words]


def without_refusals(cache):
    """Return all leaves as bytes on the host, without the refusal counters."""
    metadata, storage = jax.device_get((cache.metadata, cache.storage))
    counters = metadata.sequences.counters.copy()
    counters[: len(jkv.Status)] = 0
    sequences = dataclasses.replace(metadata.sequences, counters=counters)
    metadata = dataclasses.replace(metadata, sequences=sequences)
    return [leaf.tobytes() for leaf in jax.tree.leaves((metadata, storage))]


def assert_unchanged(before, after):
    """Assert that all leaves except the refusal counters are bit-identical."""
    assert without_refusals(before) == without_refusals(after)


def assert_refused(before, answer, *statuses):
    """Assert that a verb refused with these statuses and changed nothing."""
    after, result = answer
    assert names(getattr(result, "status", result)) == list(statuses)
    assert_unchanged(before, after)
