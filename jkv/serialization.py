"""What `jax.export` writes of our pytrees: a program that takes a cache can be kept.

`Exported.serialize` writes the trees of a program's arguments and results, so it must
know how each kind of node is written. Of ours the nodes are the classes below, and what
they carry beside arrays are sizes and dtypes: plain JSON, by name of the field. Reading
it runs no code of the file's.
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
from jkv.decoding.sampling.options import Sampling
from jkv.decoding.speculation.options import PromptLookup
from jkv.decoding.texts.results import (
    BeamSearch,
    BeamStatistics,
    Generation,
    Statistics,
)
from jkv.prefixes.arrays import Beside, Snapshots
from jkv.prefixes.index import PrefixIndex
from jkv.state.batch import StepSizes
from jkv.state.states import StateSizes
from jkv.state.storage import GroupSizes
from jkv.status import UsageError
from jkv.verbs.allocation import Allocation
from jkv.verbs.forking import Fork
from jkv.verbs.lookups import BlockInfo
from jkv.verbs.swapping import SwapIn

_PLANNED = [node for backend in BACKENDS for node in backend.plan_nodes]
DATACLASSES: tuple[type, ...] = (
    *(state.Cache, state.Metadata, state.Sequences, state.BlockGroup, state.Ring),
    *(state.NoIndex, PrefixIndex, Beside, Snapshots),
    *(state.Everything, state.SlidingWindow),
    *(state.States, state.BlockStorage, state.StateStorage),
    *(state.Batch, Sampling, PromptLookup),
    *filter(dataclasses.is_dataclass, _PLANNED),
)
NAMED_TUPLES: tuple[type, ...] = (
    *(state.Slots, Allocation, Fork, SwapIn, BlockInfo),
    *(Generation, Statistics, BeamSearch, BeamStatistics),
    *(node for node in _PLANNED if not dataclasses.is_dataclass(node)),
)
# Named tuples of numbers, as static fields hold them.
SIZES: dict[str, type] = {
    sizes.__name__: sizes
    for sizes in (
        *(StepSizes, GroupSizes, StateSizes),
        *(sizes for backend in BACKENDS for sizes in backend.plan_sizes),
    )
}
# The same of the parts of a cache, by where they are: they come with their first use.
PARTS = {"Blocks": "jkv.blocks.part", "OfStates": "jkv.states.part"}


def register() -> None:
    """Tell JAX how our pytrees are written."""
    for node in DATACLASSES:
        # A name is taken where a notebook has loaded jkv before.
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
    """Return what writes the values of a class's static fields."""
    names = _static_names(node)

    def write(values: tuple[Any, ...] | None) -> bytes:
        given = zip(names, values or (), strict=True)
        return json.dumps(
            {name: _as_json(name, value) for name, value in given}
        ).encode()

    return write


def _reader(node: type) -> Callable[[bytes], Any]:
    """Return what reads them."""
    names = _static_names(node)

    def read(written: bytes) -> tuple[Any, ...] | None:
        values = json.loads(written)
        if sorted(values) != sorted(names):
            raise UsageError(
                f"the program was exported with a {node.__name__} of {sorted(values)}, "
                f"and here it has {sorted(names)}: export it with this version of jkv"
            )
        if node is Sampling:  # which flattens itself, without static fields
            return None
        return tuple(_from_json(values[name]) for name in names)

    return read


def _as_json(name: str, value: Any) -> Any:
    """Return a static value as JSON has it."""
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
        f"{name} is a {type(value).__name__}, which no file can hold: of a cache on a "
        f"mesh, export a function of jax.tree.leaves(cache)"
    )


def _from_json(value: Any) -> Any:
    """Return a static value that was JSON."""
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
