"""A third kind of group: layers that store a row of numbers per sequence.

It stands for future kinds and changes no file of the package: a configuration, the
storage, the data of sequences, the part with its plans, and the three names that
register them with `jkv.making.initialization` and `GroupedConfig`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config import grouped_config
from jkv.config.counts import ArrayLayout
from jkv.making import initialization
from jkv.metadata.part import Served


class Sizes(NamedTuple):
    num_layers: int
    max_sequences: int
    max_context_length: int
    block_size: int
    width: int

    kind = "marks"

    def with_copies(self, _copies):
        return self

    def divide(self, _mesh, _heads, _context):
        return None, {}

    def lay_out_group(self, _prefix_caching, _has_tokens):
        return {}

    def lay_out_storage(self, _prefix_caching=False):
        shape = self.num_layers, self.max_sequences, self.width
        return {"rows": ArrayLayout(shape, np.dtype(np.int32), fill=0)}

    @property
    def constants(self):
        return {"metadata.groups": {"width": self.width}, "storage": {}}

    def describe(self, _prefix_caching):
        return f"{self.num_layers} layers with marks", f"{self.width} a sequence"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkConfig:
    num_layers: int
    max_sequences: int
    max_context_length: int
    block_size: int
    width: int

    @property
    def sizes(self):
        return Sizes(**dataclasses.asdict(self))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Marks:
    kind = "marks"
    max_pending = 0
    width: int = dataclasses.field(metadata={"static": True})


class StepSizes(NamedTuple):
    num_layers: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MarkStorage:
    kind = "marks"
    sharding = None
    divided = {}
    rows: jax.Array  # i32[L, S, W]

    @property
    def arrays(self):
        return {"rows": self.rows}

    def with_arrays(self, arrays):
        return dataclasses.replace(self, **arrays)

    def with_sharding(self, _sharding):
        return self

    def encoded_dtype(self, _path):
        return None

    def divide(self, _mesh, _heads, _context):
        return None, {}

    @property
    def num_layers(self):
        return self.rows.shape[0]

    @property
    def sizes(self):
        return StepSizes(self.num_layers)

    def implied_sizes(self, metadata, group):
        most, size = metadata.max_context_length, metadata.block_size
        return Sizes(self.num_layers, metadata.max_sequences, most, size, group.width)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SwappedMarks:
    kind = "marks"
    num_blocks = num_filled_blocks = 0
    rows: np.ndarray  # i32[L, B, W]

    def encoded_dtype(self, _path):
        return None

    def fits(self, _columns):
        return True

    def to_enter(self, _columns):
        return None

    def compare(self, cache, number, _lengths):
        here = cache.storage[number].rows
        return {"marks": (self.rows.shape[::2], here.shape[::2])}

    def put(self, cache, number, seq_ids, _tables, **_):
        rows = cache.storage[number].rows.at[:, seq_ids].set(self.rows, mode="drop")
        return cache.with_group_storage(number, MarkStorage(rows=rows))


class Moves(NamedTuple):
    target: jax.Array  # i32[B], S for none
    source: jax.Array  # i32[B], S for zeros


class OfMarks(NamedTuple):
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, numbers):
        return (cls(numbers),)

    def open(self, _metadata, _found, num_tokens, _eligible):
        return Plan(jnp.full_like(num_tokens, jnp.iinfo(jnp.int32).max))

    def grow(self, *_):
        return Growing()

    def share(self, _metadata, parents, _length):
        return Plan(parents)

    def cut(self, *_):
        return Plan(None)

    def exchange(self, _metadata, _seq_ids, parents, _length):
        return Plan(parents)

    def close(self, metadata, _seq_ids, _closable):
        return metadata

    def enter(self, _metadata, _brought):
        return Growing()

    def follow(self, storage, moves):
        rows = storage.rows.at[:, moves.source].get(mode="fill", fill_value=0)
        return MarkStorage(rows=storage.rows.at[:, moves.target].set(rows, mode="drop"))

    def keep(self, _rows, _places):
        return None

    def leave(self, _metadata, _seq_ids):
        return ()

    def fetch(self, cache, seq_ids, _lengths, _left):
        found = ((i, np.asarray(cache.storage[i].rows)) for i in self.numbers)
        return {i: SwappedMarks(rows=rows[:, seq_ids]) for i, rows in found}

    def num_free(self, _metadata):
        return ()


class Plan(NamedTuple):
    parents: jax.Array | None
    wrongs: tuple[()] = ()
    lacks: tuple[()] = ()

    def judge(self, _eligible):
        return self

    def pin(self, metadata, _row):
        return metadata

    def release(self, metadata, _served):
        return metadata

    def apply(self, metadata, done: Served):
        if self.parents is None:
            return metadata, None
        return metadata, Moves(done.rows(metadata), self.parents)


class Growing(NamedTuple):
    lacks: tuple[()] = ()

    def apply(self, metadata, *_):
        return metadata, None


def make_known(monkeypatch):
    """Register groups with marks for the duration of a test."""
    groups = (*grouped_config.KINDS, MarkConfig)
    monkeypatch.setattr(grouped_config, "KINDS", groups)
    monkeypatch.setitem(initialization.PARTS, Marks, OfMarks)
    for path, kind in {
        "metadata.groups": Marks,
        "storage": MarkStorage,
        "groups": SwappedMarks,
    }.items():
        monkeypatch.setitem(
            initialization.KINDS, path, (*initialization.KINDS[path], kind)
        )
