"""Registration of our pytrees for `jax.export`, so that programs can be saved.

`Exported.serialize` writes the trees of arguments and results, and needs a serializer
for each node type: the classes below. Their static fields are sizes and dtypes, written
as JSON by field name. Reading them executes no code from the file.
"""

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import export

from jkv import state
from jkv.attention.choice import BACKENDS
from jkv.decoding.sampling.draws import Sampling
from jkv.decoding.sequences.results import (
    BeamSearch,
    BeamStatistics,
    Generation,
    Statistics,
)
from jkv.decoding.speculation.prompt_lookup import PromptLookup
from jkv.masks import CausalMask, MixedMask, SpanMask, StepMask, TreeMask
from jkv.prefixes.arrays import PairedBlocks, Snapshots
from jkv.prefixes.index import PrefixIndex
from jkv.state.batch import StepSizes
from jkv.state.cache import GroupSizes
from jkv.state.states import StateSizes
from jkv.status import UsageError
from jkv.verbs.allocation import Allocation
from jkv.verbs.branching import Fork
from jkv.verbs.lookups import BlockInfo
from jkv.verbs.swapping import SwapIn

_PLANNED = [node for backend in BACKENDS for node in backend.plan_nodes]
DATACLASSES: tuple[type, ...] = (
    *(state.Cache, state.Metadata, state.Sequences, state.BlockGroup, state.Ring),
    *(state.NoIndex, PrefixIndex, PairedBlocks, Snapshots),
    *(state.FullAttention, state.SlidingWindow),
    *(state.Pruned, state.Unpruned, state.ObservedQueries, state.Unobserved),
    *(state.States, state.BlockStorage, state.StateStorage),
    *(state.Batch, Sampling, PromptLookup, Statistics),
    *(StepMask, CausalMask, SpanMask, TreeMask, MixedMask),
    *filter(dataclasses.is_dataclass, _PLANNED),
)
NAMED_TUPLES: tuple[type, ...] = (
    *(state.Slots, Allocation, Fork, SwapIn, BlockInfo),
    *(Generation, BeamSearch, BeamStatistics),
    *(node for node in _PLANNED if not dataclasses.is_dataclass(node)),
)
# Named tuples of numbers in static fields.
SIZES: dict[str, type] = {
    sizes.__name__: sizes
    for sizes in (
        *(StepSizes, GroupSizes, StateSizes),
        *(sizes for backend in BACKENDS for sizes in backend.plan_sizes),
    )
}
# Parts of a cache in static fields, by module, which is imported on first use.
PARTS = {
    "Blocks": "jkv.blocks.part",
    "OfStates": "jkv.states.part",
    "Positions": "jkv.metadata.positions",
    "Observations": "jkv.metadata.observations",
}


def register() -> None:
    """Register the serializers of our pytrees with JAX."""
    for node in DATACLASSES:
        # Already registered if a notebook reloads jkv.
        with contextlib.suppress(ValueError):
            export.register_pytree_node_serialization(
                node,
                serialized_name=f"jkv.{node.__name__}",
                serialize_auxdata=_writer(node),
                deserialize_auxdata=_reader(node),
            )
    for node in NAMED_TUPLES:
        with contextlib.suppress(ValueError):
            export.register_namedtuple_serialization(
                node, serialized_name=f"jkv.{node.__name__}"
            )


def _static_names(node: type) -> list[str]:
    fields = dataclasses.fields(node)
    return [field.name for field in fields if field.metadata.get("static")]


def _writer(node: type) -> Callable[[Any], bytes]:
    """Return the serializer of a class's static fields."""
    names = _static_names(node)

    def write(values: tuple[Any, ...] | None) -> bytes:
        given = zip(names, values or (), strict=True)
        return json.dumps(
            {name: _as_json(name, value) for name, value in given}
        ).encode()

    return write


def _reader(node: type) -> Callable[[bytes], Any]:
    """Return the deserializer of a class's static fields."""
    names = _static_names(node)

    def read(written: bytes) -> tuple[Any, ...] | None:
        values = json.loads(written)
        if sorted(values) != sorted(names):
            raise UsageError(
                f"the exported {node.__name__} has fields {sorted(values)}, expected "
                f"{sorted(names)}; export the program again with this version of jkv"
            )
        if node is Sampling:  # flattens itself, without static fields
            return None
        return tuple(_from_json(values[name]) for name in names)

    return read


def _as_json(name: str, value: Any) -> Any:
    """Convert a static value to JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    kind = type(value)
    if kind in SIZES.values() or PARTS.get(kind.__name__) == kind.__module__:
        return {kind.__name__: [_as_json(name, each) for each in value]}
    if isinstance(value, tuple):
        return [_as_json(name, each) for each in value]
    raise UsageError(
        f"{name} cannot be serialized, got a {type(value).__name__}; for a cache on a "
        f"mesh, export a function of jax.tree.leaves(cache)"
    )


def _from_json(value: Any) -> Any:
    """Convert JSON to a static value."""
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dtype":
        return jnp.dtype(inner)
    if kind in PARTS:
        made = getattr(importlib.import_module(PARTS[kind]), kind)
    else:
        made = SIZES[kind]
    return made(*map(_from_json, inner))
