"""Contents of blocks, copied by block id between the device and the host.

Blocks are gathered and scattered on the device in pieces of 1, 2, 4, ... blocks. Any
number is a sum of these, so all transfers share a few compiled programs without
padding. Some accelerators access pinned host memory at the full speed of their bus;
there the pieces stay in such memory. Elsewhere they become numpy arrays.

The arrays of a group's storage are handled by name: each has layers on axis 0 and
blocks on axis 1.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.operations import gather, scatter
from jkv.sharding.processes import bring
from jkv.sharding.storage_sharding import (
    POOL_HEADS,
    StorageSharding,
    find_shared_mesh,
    with_copies_of_heads,
    without_copies_of_heads,
)
from jkv.state import Cache

HostArray = np.ndarray | jax.Array  # jax.Array: in pinned host memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Contents:
    """Contents of P blocks of a group, on the host."""

    # By field name of `BlockStorage`, [L, P, ...], divided along the blocks as by
    # `in_pieces`.
    storage: dict[str, tuple[HostArray, ...]]
    tokens: np.ndarray | None  # i32[P, T], recorded token ids


def in_pieces(num_blocks: int) -> Iterator[slice]:
    """Divide a range of blocks into pieces of powers of two, largest first."""
    start = 0
    while start < num_blocks:
        stop = start + (1 << ((num_blocks - start).bit_length() - 1))
        yield slice(start, stop)
        start = stop


def cut_array(array: np.ndarray) -> tuple[HostArray, ...]:
    """Divide an array, [L, P, ...], as in `Contents.storage`."""
    return tuple(array[:, piece] for piece in in_pieces(array.shape[1]))


def fetch(cache: Cache, number: int, blocks: np.ndarray) -> Contents:
    """Copy blocks of a group, i32[P], to the host, from a device or a file."""
    of_group, recorded = cache.storage[number], cache.metadata.groups[number].tokens
    arrays, sharding = of_group.arrays, of_group.sharding
    pieces = [blocks[piece] for piece in in_pieces(len(blocks))]
    if isinstance(of_group.key_pool, np.ndarray):  # a cache read from a file
        gathered = [({k: v[:, p] for k, v in arrays.items()}, None) for p in pieces]
        tokens = None if recorded is None else np.asarray(recorded)[blocks]
    else:
        gathered = [
            _gather_blocks(arrays, recorded, piece, sharding) for piece in pieces
        ]
        gathered = _to_host(gathered)
        empty = np.zeros((0, cache.block_size), np.int32)
        tokens = np.concatenate([empty, *(t for _, t in gathered if t is not None)])
    storage = {name: tuple(piece[name] for piece, _ in gathered) for name in arrays}
    return Contents(storage, None if recorded is None else tokens)


def put(
    cache: Cache, number: int, blocks: np.ndarray, contents: Contents, *, donate: bool
) -> Cache:
    """Write contents from the host to distinct blocks of a group, i32[P].

    With `donate` the old arrays are updated in place and become invalid. Missing tokens
    are set to -1.
    """
    if len(blocks) == 0:
        return cache
    of_group, group = cache.storage[number], cache.metadata.groups[number]
    arrays, tokens, sharding = of_group.arrays, group.tokens, of_group.sharding
    if not donate:
        arrays, tokens = jax.tree.map(jnp.copy, (arrays, tokens))
    rows = contents.tokens
    if rows is None:
        rows = np.full((len(blocks), cache.block_size), -1, np.int32)
    for part, piece in enumerate(in_pieces(len(blocks))):
        crossed = {
            name: _brought(pieces[part], arrays[name], sharding)
            for name, pieces in contents.storage.items()
        }
        arrays, tokens = _scatter(
            arrays, tokens, blocks[piece], crossed, rows[piece], sharding
        )
    cache = cache.with_metadata(cache.metadata.changed(number, tokens=tokens))
    return cache.with_group_storage(number, of_group.with_arrays(arrays))


@functools.partial(jax.jit, static_argnums=3)
def _gather_blocks(
    arrays: dict[str, jax.Array],
    tokens: jax.Array | None,
    blocks: jax.Array,
    sharding: StorageSharding | None,
) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """Gather blocks, i32[p], of the storage and the recorded tokens."""
    storage = {
        name: without_copies_of_heads(
            sharding, pool.at[:, blocks].get(mode="clip"), POOL_HEADS
        )
        for name, pool in arrays.items()
    }
    return storage, None if tokens is None else gather(tokens, blocks)


def _to_host(gathered: Any) -> Any:
    """Start the transfer of all arrays, then wait; use pinned memory if possible."""
    leaves = jax.tree.leaves(gathered)
    is_shared = find_shared_mesh(gathered) is not None
    if is_shared or not leaves or not _has_pinned_memory(leaves[0]):
        return bring(gathered)

    def pinned(array: jax.Array) -> jax.Array:
        return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))

    storage = [jax.tree.map(pinned, arrays) for arrays, _ in gathered]
    tokens = jax.device_get([tokens for _, tokens in gathered])
    return list(zip(jax.block_until_ready(storage), tokens, strict=True))


def _has_pinned_memory(array: jax.Array) -> bool:
    """Return True if an array's devices can address pinned host memory.

    False for CPUs, which report it although their memory is the host's.
    """
    return all(
        device.platform != "cpu"
        and any(m.kind == "pinned_host" for m in device.addressable_memories())
        for device in array.devices()
    )


def _brought(
    piece: HostArray, pool: jax.Array, sharding: StorageSharding | None
) -> HostArray:
    """Move a piece to the devices of its pool.

    jit moves numpy arrays itself. `device_put` commits its result, and everything
    computed from it, to a device: an uncommitted pool stays uncommitted, as otherwise
    every program that takes it would be compiled again.
    """
    if isinstance(piece, np.ndarray) and not pool.committed:
        return piece
    if sharding is not None and sharding.copies > 1:
        # Fewer heads than devices: each device gets all of them.
        return jax.device_put(
            piece,
            jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec()),
        )
    return jax.device_put(piece, pool.sharding)


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnums=5)
def _scatter(
    arrays: dict[str, jax.Array],
    tokens: jax.Array | None,
    blocks: jax.Array,
    contents: dict[str, HostArray],
    rows: jax.Array,
    sharding: StorageSharding | None,
) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """Write one piece to its distinct blocks, i32[p]."""
    import chex  # importing it takes longer than importing jkv

    chex.assert_rank(blocks, 1)
    chex.assert_trees_all_equal_dtypes(arrays, contents)
    contents = {
        name: with_copies_of_heads(sharding, jnp.asarray(piece), POOL_HEADS)
        for name, piece in contents.items()
    }
    for name, pool in arrays.items():
        chex.assert_shape(contents[name], (len(pool), len(blocks), *pool.shape[2:]))

    def fill(pool: jax.Array, piece: HostArray) -> jax.Array:
        return pool.at[:, blocks].set(piece, mode="drop", unique_indices=True)

    arrays = {name: fill(pool, contents[name]) for name, pool in arrays.items()}
    if tokens is not None:
        chex.assert_shape(rows, (len(blocks), tokens.shape[1]))
        tokens = scatter(tokens, blocks, rows, unique=True)
    return arrays, tokens
