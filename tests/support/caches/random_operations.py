"""Random operations on a cache, each compared with the plain-Python oracle.

Every call is a batch of requests, many of them invalid on purpose: padding, closed,
repeated and unknown ids, negative and huge counts, more blocks than the pool has. After
each call the statuses, the results, and the tables, counts and contents of every open
sequence in each group must equal the oracle's, and `jkv.check` must pass.
"""

import functools
from collections import Counter
from typing import NamedTuple

import chex
import jax
import numpy as np
import pytest

import jkv
from jkv.attention.backend import Requests
from jkv.attention.shared_prefixes import find_shared_prefixes
from support.attention import formats
from support.caches.plain_prefixes import check_prefixes
from support.oracle.cache import BATCH_FULL, OK, PADDING
from support.oracle.groups import held
from support.oracle.moving import Oracle
from support.small_caches import (
    refusal_counts,
    ring_order,
    with_storage_filled,
    without_refusals,
)

BATCH_SIZE = 5
QUERY_LENGTH = 2  # rows per request of a padded append
FEWEST_SHARING = 2  # requests with a common prefix
CAPACITY = BATCH_SIZE * QUERY_LENGTH  # rows of both layouts
NUM_KV_HEADS, NUM_HEADS, HEAD_DIM, VALUE_HEAD_DIM = 1, 2, 3, 2
NUM_CONTENTS = 4096
FAR_IDS = [-2, -7, -(2**31), 2**31 - 1]
FAR_COUNTS = [-1, -2, -(2**31), 2**31 - 1, 2**31 - 2, 2**30]

# Stored dtypes; all other storage is float32.
DTYPES = {
    "few blocks": ("int8", "int4"),
    "blocks of one": "fp8",
    "many sequences": "int4",
    "full and window": ("int4", "int8"),  # with windows in groups
    "three": ("int8", "int4"),
}
# (num_blocks, block_size, max_sequences, max_context_length)
SHAPES = {
    "one cell": (1, 1, 1, 1),
    "one block": (1, 4, 2, 3),
    "few blocks": (7, 3, 4, 10),
    "roomy": (12, 4, 6, 23),
    "blocks of one": (13, 1, 5, 7),
    "many sequences": (9, 4, 9, 18),
    "blocks of 16": (4, 16, 5, 37),
}
# A shape whose sequences outgrow the pool, a window, and sink tokens.
WINDOWED = {
    "window": ((7, 3, 4, 31), (4, 0)),
    "window and sinks": ((12, 4, 6, 47), (6, 3)),
    "window of one": ((13, 1, 5, 19), (1, 2)),
}


class Pool(NamedTuple):
    """Sizes of a group of layers."""

    num_blocks: int
    window: int | None = None
    num_sink_tokens: int = 0
    head_dim: int = HEAD_DIM


# Groups of layers; block size, sequences and tokens are shared.
GROUPED = {
    "full and window": (
        (Pool(24, head_dim=4), Pool(9, 4, head_dim=4)),
        (3, 4, 31),
    ),
    "two windows": ((Pool(12, 3), Pool(9, 8)), (2, 4, 23)),
    "two full": ((Pool(8), Pool(11, head_dim=5)), (4, 5, 22)),
    "three": ((Pool(9, 5, 3), Pool(24), Pool(10, 3)), (2, 4, 27)),
}


# The verbs as a user jits them: one trace each, whatever the values.


def allocate(cache, num_tokens):
    return jkv.allocate(cache, num_tokens)


def append_packed(cache, seq_ids, num_tokens, tokens):
    return jkv.append(cache, seq_ids, num_tokens, capacity=CAPACITY, tokens=tokens)


def append_padded(cache, seq_ids, num_tokens, tokens):
    return jkv.append(
        cache, seq_ids, num_tokens, max_query_length=QUERY_LENGTH, tokens=tokens
    )


def write(cache, batch, keys, values):
    for layer, rows in enumerate(zip(keys, values, strict=True)):
        cache = jkv.write(cache, layer, batch, *rows)
    return cache


def commit(cache, batch):
    return jkv.commit(cache, batch)


def fork(cache, seq_ids):
    return jkv.fork(cache, seq_ids)


def fork_part(cache, seq_ids, lengths):
    return jkv.fork(cache, seq_ids, lengths)


def free(cache, seq_ids):
    return jkv.free(cache, seq_ids)


def truncate(cache, seq_ids, lengths):
    return jkv.truncate(cache, seq_ids, lengths)


def reorder(cache, seq_ids, parents):
    return jkv.reorder(cache, seq_ids, parents)


def compact(cache):
    return jkv.compact(cache)


def touch(cache, seq_ids):
    return jkv.touch(cache, seq_ids)


def evict(cache, num_blocks, protect):
    return jkv.evict(cache, num_blocks, protect=protect)


def evict_older_than(cache, age, protect):
    return jkv.evict_older_than(cache, age, protect=protect)


def can_allocate(cache, num_tokens):
    return jkv.can_allocate(cache, num_tokens)


def read(cache, seq_id):
    """Return `read`'s results for a sequence in each layer, and its recorded tokens."""
    recorded = cache.metadata.tokens is not None
    tokens = jkv.tokens(cache, seq_id) if recorded else None
    return tokens, [
        jkv.read(cache, layer, seq_id, return_start=True)
        for layer in layers_with_blocks(cache)
    ]


def layers_with_blocks(cache):
    """Return the layers that store keys and values."""
    layers = enumerate(cache.layer_groups) if cache.num_layers else ()
    numbers = {*cache.metadata.block_numbers}
    return [i for i, of in layers if numbers & {*of}]


def read_all(cache, seq_ids):
    """Return the same for several sequences, [S, ...]."""
    return jax.vmap(read, (None, 0))(cache, seq_ids)


def attend(cache, batch, queries):
    """Return each layer's attention, with its window."""
    outputs = []
    for layer in layers_with_blocks(cache):
        group = cache.find_layer(layer).group
        outputs.append(
            jkv.attend(
                cache,
                layer,
                batch,
                queries[..., : cache.storage[group].head_dim],
                window=cache.metadata.groups[group].window.length,
            )
        )
    return outputs


CHANGING = [
    allocate,
    append_packed,
    append_padded,
    write,
    commit,
    fork,
    fork_part,
    free,
    truncate,
    reorder,
    compact,
    touch,
    evict,
    evict_older_than,
]
LOOKING = [can_allocate, read, attend]


def make_verbs(mode, changing=CHANGING, looking=LOOKING):
    """Return the verbs: eager, jitted, or jitted with a donated cache."""
    verbs = {}
    for verb in [*changing, *looking]:
        donate = (0,) if mode == "donated" and verb in changing else ()
        traced_once = chex.assert_max_traces(verb, n=1)
        verbs[verb.__name__] = (
            verb if mode == "eager" else jax.jit(traced_once, donate_argnums=donate)
        )
    # Called after every operation, so jitted in all modes.
    verbs["least_recently_used"] = jax.jit(
        lambda cache: jkv.least_recently_used(cache, cache.max_sequences)
    )
    verbs["read_all"] = jax.jit(chex.assert_max_traces(read_all, n=1))
    return verbs


@functools.partial(jax.jit, static_argnums=1)
def stored(rows, dtype):
    """Return rows as they are read back, quantized or not."""
    return formats.restore(*formats.quantize(rows, dtype), dtype)


class Game:
    """A cache and an oracle that receive the same calls."""

    prefix_caching = False
    keep_classes = 1
    pruning = False
    num_kv_heads = NUM_KV_HEADS

    def __init__(
        self,
        shape,
        verbs,
        seed,
        storage=True,
        record_tokens=False,
        donate=False,
        folder=None,
        dtype="float32",
        where=None,
        window=(None, 0),
        groups=None,
        states=None,
    ):
        """Take a shape of `SHAPES`; with several groups, without num_blocks."""
        if groups is None:
            num_blocks, *shape = shape
            head_dim = HEAD_DIM + (dtype == "int4")  # int4 needs an even one
            groups = (Pool(num_blocks, *window)._replace(head_dim=head_dim),)
        # One dtype, or a pair for keys and values.
        dtype, value_dtype = dtype if isinstance(dtype, tuple) else (dtype, None)
        self.pools, (block_size, max_sequences, max_context) = groups, shape
        self.sizes = shape
        # Group of each layer: two layers of the first group, one of each other.
        self.layer_groups = (*reversed(range(len(groups))), 0) if groups else ()
        configs = tuple(
            jkv.CacheConfig(
                num_layers=self.layer_groups.count(g),
                num_kv_heads=self.num_kv_heads,
                head_dim=pool.head_dim,
                value_head_dim=VALUE_HEAD_DIM,
                num_blocks=pool.num_blocks,
                block_size=block_size,
                max_sequences=max_sequences,
                max_context_length=max_context,
                dtype=dtype,
                value_dtype=value_dtype,
                record_tokens=record_tokens,
                prefix_caching=self.prefix_caching and len(groups) == 1 and not states,
                keep_classes=self.keep_classes if len(groups) == 1 else 1,
                sliding_window=pool.window,
                num_sink_tokens=pool.num_sink_tokens,
                pruning=self.pruning,
            )
            for g, pool in enumerate(groups)
        )
        config = self.make_config(configs)
        # Device placement, as `init` and `load` take it.
        self.where = where or {}
        fresh = jkv.init(config, storage=storage, **self.where)
        self.cache = with_storage_filled(fresh, np.nan)
        self.has_storage = storage
        self.has_tokens = record_tokens or self.prefix_caching
        self.donate = donate
        # Swapped-out sequences and saved caches, each with the oracle's copy.
        self.outside, self.saved = [], []
        self.folder = folder  # folder of saved caches, None to save nothing
        self.oracle = Oracle(
            [pool[:3] for pool in groups],
            block_size=block_size,
            max_sequences=max_sequences,
            max_context_length=max_context,
            states=states,
        )
        self.oracle.pruning = self.pruning
        self.verbs = verbs
        self.rng = np.random.default_rng(seed)
        # A token stores a row of each layer's tables; all rows differ.
        self.keys, self.values = (
            [
                self.rng.standard_normal(
                    (NUM_CONTENTS, self.num_kv_heads, width), np.float32
                )
                for width in widths
            ]
            for widths in (
                [groups[g].head_dim for g in self.layer_groups],
                [VALUE_HEAD_DIM for _ in self.layer_groups],
            )
        )
        # The rows as they are read back.
        storage = self.cache.block_storage[0] if groups else None
        kept = (
            (storage.dtype, storage.value_dtype) if groups else (np.dtype(dtype),) * 2
        )
        self.stored_keys, self.stored_values = (
            [np.asarray(stored(rows, each)) for rows in tables]
            for tables, each in zip((self.keys, self.values), kept, strict=True)
        )
        self.num_contents_used = 0
        self.num_requests = Counter()  # by status
        self.num_shared = 0  # blocks shared by requests of a step

    def make_config(self, configs):
        """Return the argument of `init` for the configurations of the groups."""
        if len(configs) == 1:
            return configs[0]
        return jkv.GroupedConfig(
            groups=configs,
            layer_groups=self.layer_groups,
            prefix_caching=self.prefix_caching,
            keep_classes=self.keep_classes,
        )

    def number_of(self, g):
        """Return the index of a group with blocks in the configuration."""
        return g

    # Random arguments.

    def pick_seq_id(self):
        """Return mostly an open sequence, else padding, a closed or an invalid id."""
        kind = self.rng.choice(4, p=[0.7, 0.1, 0.1, 0.1])
        if kind == 0 and self.oracle.open:
            return int(self.rng.choice(list(self.oracle.open)))
        if kind == 1:
            return PADDING
        if kind == 2:
            return int(self.rng.integers(self.oracle.max_sequences))
        beyond = self.oracle.max_sequences + int(self.rng.integers(2))
        return int(self.rng.choice([*FAR_IDS, beyond]))

    def pick_seq_ids(self):
        return [self.pick_seq_id() for _ in range(BATCH_SIZE)]

    def pick_count(self):
        """Return mostly a small count, else a long or an invalid one."""
        kind = self.rng.choice(3, p=[0.75, 0.15, 0.1])
        if kind == 0:
            return int(self.rng.integers(self.oracle.block_size + 3))
        if kind == 1:
            return int(self.rng.integers(self.oracle.max_context + 3))
        return int(self.rng.choice(FAR_COUNTS))

    def pick_counts(self):
        return [self.pick_count() for _ in range(BATCH_SIZE)]

    def pick_lengths(self, seq_ids):
        """Return lengths of sequences, often a rollback of a few tokens."""
        lengths = self.pick_counts()
        for i, seq_id in enumerate(seq_ids):
            if seq_id in self.oracle.open and self.rng.random() < 0.6:
                lengths[i] = len(self.oracle.tokens(seq_id)) - int(self.rng.integers(4))
        return lengths

    def pick_contents(self):
        """Return a distinct token for each row of a step."""
        start, self.num_contents_used = self.num_contents_used, CAPACITY
        self.num_contents_used += start
        return [(start + row) % NUM_CONTENTS for row in range(CAPACITY)]

    # Operations; each compares its own results.

    def play_allocate(self):
        counts = self.pick_counts()
        # Sometimes open few or none, so that sequences do not always run out.
        counts[int(self.rng.integers(BATCH_SIZE + 1)) :] = []
        counts += [PADDING] * (BATCH_SIZE - len(counts))
        seq_ids, status, *_ = self.oracle.allocate(counts)
        self.cache, result = self.call("allocate", counts)
        same(result.seq_ids, seq_ids)
        same(result.num_cached, [0] * BATCH_SIZE)
        self.compare_status(result.status, status)

    def play_append(self, name, max_query_length):
        seq_ids, counts = self.pick_seq_ids(), self.pick_counts()
        self.play_step(name, max_query_length, seq_ids, counts, self.pick_contents())

    def play_step(self, name, max_query_length, seq_ids, counts, contents):
        """Append, write, and perhaps commit and attend."""
        expected = self.oracle.append(seq_ids, counts, contents, max_query_length)
        # A token's stored row also stands for its id.
        tokens = i32(contents) if self.has_tokens else None
        self.cache, batch = self.verbs[name](
            self.cache, i32(seq_ids), i32(counts), tokens
        )
        self.compare_batch(batch, expected, seq_ids)
        if self.has_storage:
            rows = [
                [table[contents] for table in tables]
                for tables in (self.keys, self.values)
            ]
            self.cache = self.verbs["write"](self.cache, batch, *rows)
        self.compare_status(batch.status, expected.status)
        self.play_commit(batch, expected)
        if self.has_storage and self.rng.random() < 0.3:
            self.compare_attention(batch, expected)

    def play_commit(self, batch, _):
        self.cache = self.verbs["commit"](self.cache, batch)

    def play_append_packed(self):
        self.play_append("append_packed", None)

    def play_append_padded(self):
        self.play_append("append_padded", QUERY_LENGTH)

    def play_fork(self):
        parents = self.pick_seq_ids()
        if self.rng.random() < 0.5:
            parents[1:] = [PADDING] * (BATCH_SIZE - 1)
        if self.rng.random() < 0.6:
            seq_ids, status = self.oracle.fork(parents)
            self.cache, result = self.call("fork", parents)
        else:
            lengths = self.pick_lengths(parents)
            seq_ids, status = self.oracle.fork(parents, lengths)
            self.cache, result = self.call("fork_part", parents, lengths)
        same(result.seq_ids, seq_ids)
        self.compare_status(result.status, status)

    def play_free(self):
        seq_ids = self.pick_seq_ids()
        if self.rng.random() < 0.7:
            seq_ids[2:] = [PADDING] * (BATCH_SIZE - 2)
        expected = self.oracle.free(seq_ids)
        self.cache, status = self.call("free", seq_ids)
        self.compare_status(status, expected)

    def play_truncate(self):
        seq_ids = self.pick_seq_ids()
        lengths = self.pick_lengths(seq_ids)
        expected = self.oracle.truncate(seq_ids, lengths)
        self.cache, status = self.call("truncate", seq_ids, lengths)
        self.compare_status(status, expected)

    def play_reorder(self):
        seq_ids, parents = self.pick_seq_ids(), self.pick_seq_ids()
        if self.rng.random() < 0.5 and self.oracle.open:  # reorder all beams
            beams = self.rng.permutation(list(self.oracle.open))[:BATCH_SIZE]
            parents = self.rng.choice(beams, BATCH_SIZE).tolist()
            seq_ids = beams.tolist() + [PADDING] * (BATCH_SIZE - len(beams))
        expected = self.oracle.reorder(seq_ids, parents)
        self.cache, status = self.call("reorder", seq_ids, parents)
        self.compare_status(status, expected)

    def play_compact(self):
        self.oracle.compact()
        self.cache = self.call("compact")
        for group in self.oracle.groups:
            assert group.order == sorted(group.order)

    def play_swap_out(self):
        """Swap out sequences; an invalid id raises."""
        seq_ids = self.pick_seq_ids()[: int(self.rng.integers(1, 4))]
        expected = self.oracle.swap_out(seq_ids)
        if expected is None:
            with pytest.raises(jkv.InvalidSequence):
                jkv.swap_out(self.cache, i32(seq_ids))
            return
        self.cache, swapped = jkv.swap_out(self.cache, i32(seq_ids))
        assert swapped.num_sequences == len(expected)
        tables = [(g, t) for each in expected for g, t in enumerate(each.tables)]
        blocks = {(g, block) for g, table in tables for block in held(table)}
        assert swapped.num_blocks == len(blocks)
        self.outside.append((expected, swapped))

    def play_swap_in(self):
        """Swap in sequences, often once, sometimes repeatedly."""
        if not self.outside:
            return
        number = int(self.rng.integers(len(self.outside)))
        expected, swapped = self.outside[number]
        seq_ids, status = self.oracle.swap_in(expected)
        self.cache, result = jkv.swap_in(self.cache, swapped, donate=self.donate)
        same(result.seq_ids, seq_ids)
        self.compare_status(result.status, status)
        if status and status[0] == OK and self.rng.random() < 0.7:
            del self.outside[number]

    def play_save(self):
        """Save some sequences, or the whole cache."""
        if self.folder is None:
            return
        path = self.folder / f"{self.rng.integers(4)}.safetensors"
        self.saved = [entry for entry in self.saved if entry[1] != path]
        if self.rng.random() < 0.5:
            jkv.save(path, self.cache)
            self.saved.append((self.oracle.copy(), path))
            return
        # Saved sequences stay open: a copy of the oracle swaps them out.
        seq_ids = self.pick_seq_ids()[:2]
        expected = self.oracle.copy().swap_out(seq_ids)
        if expected is None:
            with pytest.raises(jkv.InvalidSequence):
                jkv.save(path, self.cache, i32(seq_ids))
            path.unlink(missing_ok=True)
        else:
            jkv.save(path, self.cache, i32(seq_ids))
            self.saved.append((expected, path))

    def play_load(self):
        """Replace the cache by a saved one, or open saved sequences in it."""
        if not self.saved:
            return
        expected, path = self.saved[int(self.rng.integers(len(self.saved)))]
        if isinstance(expected, Oracle) and self.rng.random() < 0.5:
            self.oracle, self.cache = expected.copy(), jkv.load(path, **self.where)
            return
        if isinstance(expected, Oracle):  # the sequences of a whole cache
            expected = expected.copy().swap_out(sorted(expected.open))
        seq_ids, status = self.oracle.swap_in(expected)
        self.cache, result = jkv.load(path, self.cache, donate=self.donate)
        same(result.seq_ids, seq_ids)
        self.compare_status(result.status, status)

    def play_lifetime(self):
        """Touch some sequences, or evict some."""
        seq_ids = self.pick_seq_ids()
        kind = int(self.rng.integers(3))
        if kind == 0:
            expected = self.oracle.touch(seq_ids)
            self.cache, status = self.call("touch", seq_ids)
            self.compare_status(status, expected)
            return
        if kind == 1:
            most = min((pool.num_blocks for pool in self.pools), default=1)
            wanted = int(self.rng.integers(-1, most + 2))
            gone = self.oracle.evict(wanted, seq_ids)
            self.cache, evicted = self.call("evict", wanted, seq_ids)
        else:
            age = int(self.rng.integers(12))
            gone = self.oracle.evict_older_than(age, seq_ids)
            self.cache, evicted = self.call("evict_older_than", age, seq_ids)
        same(evicted, gone + [PADDING] * (self.oracle.max_sequences - len(gone)))

    def play_can_allocate(self):
        counts = self.pick_counts()
        fits = self.call("can_allocate", counts)
        same(fits, self.oracle.can_allocate(counts))

    def play_look_up(self):
        """Compare block lists, slots and blocks of valid and invalid ids."""
        seq_ids = self.pick_seq_ids()
        positions = self.pick_counts()
        if not self.pools:
            return
        g = int(self.rng.integers(len(self.pools)))
        nothing = self.oracle.groups[g].num_blocks
        slots = jkv.slots(
            self.cache, i32(seq_ids), i32(positions), group=self.number_of(g)
        )
        slots = jax.device_get(slots)
        for i, (seq_id, position) in enumerate(zip(seq_ids, positions, strict=True)):
            slot = self.oracle.slot(seq_id, position, g)
            assert int(slots.block_ids[i]) == (slot[0] if slot else nothing)
            assert slot is None or int(slots.offsets[i]) == slot[1]
        for seq_id in set(seq_ids):
            table = self.table_of(seq_id, g)
            rest = self.cache.max_blocks_per_sequence - len(table)
            found = jkv.block_ids(self.cache, i32(seq_id), group=self.number_of(g))
            same(found, table + [nothing] * rest)
            if self.has_storage:
                self.compare_contents(
                    seq_id, *jax.device_get(self.call("read", seq_id))
                )
        block = int(self.rng.integers(nothing))
        info = jkv.block_info(self.cache, i32(block), group=self.number_of(g))
        assert int(info.reference_count) == self.oracle.reference_count(block, g)
        is_free = block in self.oracle.groups[g].free
        assert bool(info.is_free) == is_free
        is_cached = is_free and block in self.oracle.known(g)
        assert bool(info.is_cached) == is_cached

    def call(self, name, *arguments):
        return self.verbs[name](self.cache, *map(i32, arguments))

    def plays(self):
        """Return the operations and their frequencies."""
        return [
            (self.play_allocate, 5),
            (self.play_append_packed, 6),
            (self.play_append_padded, 4),
            (self.play_fork, 3),
            (self.play_free, 3),
            (self.play_truncate, 3),
            (self.play_reorder, 3),
            (self.play_compact, 1),
            (self.play_swap_out, 1),
            (self.play_swap_in, 1),
            (self.play_save, 0.5),
            (self.play_load, 0.5),
            (self.play_lifetime, 1),
            (self.play_can_allocate, 1),
            (self.play_look_up, 1),
        ]

    def play(self, num_operations):
        """Play random operations, and compare everything after each."""
        plays = self.plays()
        weights = np.array([weight for _, weight in plays], np.float64)
        if any(pool.window for pool in self.pools):  # grow sequences beyond the window
            grows = [play.__name__.startswith("play_append") for play, _ in plays]
            weights[grows] *= 5
        for _ in range(num_operations):
            self.before = without_refusals(self.cache)
            play = plays[self.rng.choice(len(plays), p=weights / weights.sum())][0]
            play()
            self.compare_state()

    # Comparisons.

    def compare_status(self, found, expected):
        """Assert equal statuses; a call that serves no request changes no bit."""
        same(found, expected)
        self.num_requests.update(expected)
        if all(status != OK for status in expected):
            assert without_refusals(self.cache) == self.before

    def compare_batch(self, batch, expected, seq_ids):
        same(batch.seq_ids, seq_ids)
        same(batch.status, expected.status)
        same(batch.query_lengths, expected.query_lengths)
        same(batch.context_lengths, expected.context_lengths)
        # The first row saturates if a request's rows would start past the end.
        starts = np.minimum(np.asarray(batch.query_starts), CAPACITY)
        same(starts, np.minimum(expected.query_starts, CAPACITY))
        valid = [row is not None for row in expected.rows]
        same(batch.valid, valid)
        rows = [row for row in expected.rows if row is not None]
        same(np.asarray(batch.positions)[valid], [row.position for row in rows])
        same(np.asarray(batch.offsets)[valid], [row.offset for row in rows])
        for g, group in enumerate(self.oracle.groups):
            blocks = [
                row.blocks[g] if row else group.num_blocks for row in expected.rows
            ]
            same(batch.slots_of(self.number_of(g)).block_ids, blocks)
        for i, length in enumerate(expected.query_lengths):
            last_row = expected.query_starts[i] + length - 1
            assert length == 0 or int(batch.last_rows[i]) == last_row

    def compare_prefixes(self):
        """Assert that shared prefixes of a step of all sequences match the tables."""
        oracle, size = self.oracle, self.oracle.block_size
        # A generator of its own, so that the operations do not depend on this check.
        rng = np.random.default_rng(oracle.clock)
        seq_ids = rng.permutation(oracle.max_sequences).astype(np.int32)
        lengths = [
            len(oracle.tokens(each)) if each in oracle.open else 0 for each in seq_ids
        ]
        for g, group in enumerate(self.cache.metadata.block_groups):
            if group.window.length is not None:
                continue
            # Some requests have several rows and are excluded.
            rows = (rng.random(len(seq_ids)) < 0.1) + 1
            found = find_shared_prefixes(
                Requests(group.block_tables, seq_ids, *map(i32, (rows, rows, lengths))),
                group.reference_counts,
                block_size=size,
                fewest=FEWEST_SHARING,
            )
            tables = [
                self.table_of(seq_id, g)[: (length - 1) // size]
                if length and row == 1
                else None
                for seq_id, row, length in zip(seq_ids, rows, lengths, strict=True)
            ]
            self.num_shared += check_prefixes(found, tables, FEWEST_SHARING)

    def tables(self, g):
        """Return the tables of all open sequences in a group."""
        return [each.tables[g] for each in self.oracle.open.values()]

    def table_of(self, seq_id, g):
        """Return the blocks of a sequence as a group's table lists them."""
        nothing = self.oracle.groups[g].num_blocks
        return [nothing if b is None else b for b in self.oracle.table(seq_id, g)]

    def compare_state(self):
        """Assert that tables, counts and contents equal the oracle's; call `check`."""
        jkv.check(self.cache)
        self.compare_prefixes()
        cache, oracle = self.cache, self.oracle
        metadata = jax.device_get(cache.metadata)
        for seq_id in range(oracle.max_sequences):
            assert bool(metadata.is_open[seq_id]) == (seq_id in oracle.open)
            length = len(oracle.tokens(seq_id))
            assert int(metadata.context_lengths[seq_id]) == length
            if seq_id in oracle.open:
                expected = oracle.open[seq_id]
                assert int(metadata.sequences.created[seq_id]) == expected.created
                assert int(metadata.sequences.last_used[seq_id]) == expected.last_used
        assert int(jkv.clock(cache)) == oracle.clock
        order = oracle.least_recently_used()
        rest = [PADDING] * (oracle.max_sequences - len(order))
        same(self.verbs["least_recently_used"](cache), order + rest)
        refusals = [oracle.refusals[status] for status in range(BATCH_FULL + 3)]
        assert refusal_counts(cache) == refusals
        assert int(jkv.num_free_blocks(cache)) == oracle.num_free_blocks()
        for g in range(len(oracle.groups)):
            self.compare_group(metadata.block_groups[g], g)
        if self.has_storage:
            self.compare_all_contents()

    def compare_group(self, found, g):
        """Compare a group's sequences, and its free blocks in order."""
        oracle, group = self.oracle, self.oracle.groups[g]
        for seq_id in range(oracle.max_sequences):
            table = self.table_of(seq_id, g)
            assert int(found.num_mapped_blocks[seq_id]) == len(table)
            same(found.block_tables[seq_id, : len(table)], table)
        same(ring_order(self.cache, g), group.order)
        assert int(found.free_blocks.count) == len(group.free)
        blocks = range(group.num_blocks)
        counts = [oracle.reference_count(block, g) for block in blocks]
        same(found.reference_counts, counts)

    def compare_all_contents(self):
        """Compare `read` of all sequences, and of two invalid ids."""
        seq_ids = [*range(self.oracle.max_sequences + 1), -1]
        tokens, layers = jax.device_get(self.call("read_all", seq_ids))
        for i, seq_id in enumerate(seq_ids):
            of_one = [[array[i] for array in layer] for layer in layers]
            reported = None if tokens is None else tokens[i]
            self.compare_contents(seq_id, reported, of_one)

    def compare_contents(self, seq_id, tokens, layers):
        """Compare keys, values, length, start and tokens with the results of `read`."""
        oracle, contents = self.oracle, self.oracle.tokens(seq_id)
        places = range(len(contents))
        kept = [  # by group
            np.array([oracle.slot(seq_id, p, g) is not None for p in places], bool)
            for g in range(len(self.pools))
        ]
        if self.has_tokens and self.pools:
            reported = np.where(kept[oracle.leader], contents, -1)
            rest = tokens[len(contents) :]
            same(rest, np.full_like(rest, -1))
            _, is_known = self.rows_of(seq_id, self.layer_groups.index(oracle.leader))
            same(tokens[: len(contents)][is_known], reported[is_known])
        for layer, (keys, values, length, start) in enumerate(layers):
            g = self.layer_groups[layer]
            assert int(length) == len(contents)
            assert int(start) == oracle.groups[g].kept_from(oracle.table(seq_id, g))
            is_kept = kept[g][:, None, None]
            rows, is_set = self.rows_of(seq_id, layer)
            for found, stored in (
                (keys, self.stored_keys),
                (values, self.stored_values),
            ):
                expected = np.where(is_kept, pick(stored[layer], rows), 0)
                same(found[: len(contents)][is_set], expected[is_set])

    def rows_of(self, seq_id, layer):
        """Return a layer's stored tokens, [n, K], and bool[n] where all are known."""
        heads = [
            self.oracle.contents(seq_id, (layer, head))
            for head in range(self.num_kv_heads)
        ]
        rows = np.array(heads, object).reshape(self.num_kv_heads, -1).T
        is_set = rows != None  # noqa: E711
        return np.where(is_set, rows, 0).astype(np.int64), is_set.all(axis=1)

    def compare_attention(self, batch, expected):
        """Compare with textbook attention over the oracle's tokens."""
        widest = max(pool.head_dim for pool in self.pools)
        queries = self.rng.standard_normal((CAPACITY, NUM_HEADS, widest), np.float32)
        for g, pool in enumerate(self.pools):
            if pool.window:  # released blocks must not be read
                free = set(self.oracle.groups[g].free) - self.oracle.known(g)
                free = sorted(free)
                number = self.number_of(g)
                self.cache = with_storage_filled(self.cache, np.nan, free, group=number)
        outputs = self.verbs["attend"](self.cache, batch, queries)
        for layer, found in enumerate(outputs):
            pool = self.pools[self.layer_groups[layer]]
            wanted = np.zeros((CAPACITY, NUM_HEADS, VALUE_HEAD_DIM), np.float32)
            for row, slot in enumerate(expected.rows):
                if slot is not None:
                    past, _ = self.rows_of(slot.seq_id, layer)
                    past = past[: slot.slot + 1][-(pool.window or len(past)) :]
                    group = NUM_HEADS // self.num_kv_heads
                    keys, values = (
                        pick(stored[layer], past).repeat(group, axis=1)
                        for stored in (self.stored_keys, self.stored_values)
                    )
                    with np.errstate(invalid="ignore"):
                        logits = np.einsum(
                            "hd,nhd->hn", queries[row, :, : pool.head_dim], keys
                        )
                    logits /= np.sqrt(pool.head_dim)
                    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
                    weights /= weights.sum(axis=-1, keepdims=True)
                    # numpy may warn of a NaN that is not there; a real NaN fails the
                    # comparison.
                    with np.errstate(invalid="ignore"):
                        wanted[row] = np.einsum("hn,nhd->hd", weights, values)
            np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5)


def pick(table, rows):
    """Return rows of a table [P, K, D] for each slot and head, [n, K]."""
    return table[rows, np.arange(rows.shape[1])]


def i32(values):
    return np.asarray(values, np.int32)


def same(found, expected):
    found = np.asarray(found)
    np.testing.assert_array_equal(found, np.asarray(expected).reshape(found.shape))
