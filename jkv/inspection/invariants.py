"""check: recompute the metadata on the host and report contradictions.

`Metadata` lists the invariants. The recount is plain numpy over the tables
(`jkv.inspection.recount`), group by group.
"""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from jkv.config.counts import ArrayLayout
from jkv.config.layout import lay_out
from jkv.inspection import block_invariants as blocks
from jkv.inspection import index_invariants as prefixes
from jkv.inspection.recount import Recount, named_arrays, recount
from jkv.prefixes.index import PrefixIndex
from jkv.state import Cache, Metadata
from jkv.state.cache import Role
from jkv.state.entry import takes_cache
from jkv.status import InvariantError


@takes_cache(on_host=True, role=Role.CHECKS)
def check(cache: Cache) -> None:
    """Raise if an invariant of the cache is violated. For the host, outside jit.

    Args:
      cache: a concrete cache; its metadata is copied to the host.

    Raises:
      InvariantError: the message starts with the invariant's name in `Metadata`, and
        the group if there are several.

    Example:
      >>> import jkv
      >>> jkv.check(jkv.init(jkv.CacheConfig.toy()))
    """
    for broken in _find_broken(cache):
        raise InvariantError(broken)


# Tables first: the other checks index with their entries.
_OF_A_GROUP: tuple[tuple[str, Callable[[Recount], Iterator[str]]], ...] = (
    ("block_tables", blocks.check_tables),
    ("mapped_blocks", blocks.check_mapped),
    ("closed_rows", blocks.check_closed_tables),
    ("reference_counts", blocks.check_counts),
    ("partition", blocks.check_partition),
    ("free_blocks", blocks.check_free_blocks),
    ("private_tail", blocks.check_private_tails),
    ("released", blocks.check_released),
)
_OF_SEQUENCES: tuple[tuple[str, Callable[[Metadata], Iterator[str]]], ...] = (
    ("mapped_blocks", blocks.check_lengths),
    ("closed_rows", blocks.check_closed_lengths),
    ("free_sequences", blocks.check_free_rows),
    ("pending_rows", blocks.check_pending),
    ("pruned", blocks.check_pruned),
)


def _find_broken(cache: Cache) -> Iterator[str]:
    """Yield all violations; later checks rely on earlier ones."""
    yield from _named("shapes: ", _shapes(cache))
    metadata: Metadata = jax.device_get(cache.metadata)
    groups = {i: recount(metadata, i) for i in metadata.block_numbers}
    for found in groups.values():
        for invariant, find in _OF_A_GROUP:
            yield from _named(f"{invariant}: {found.name}", find(found))
    for invariant, find_in_all in _OF_SEQUENCES:
        yield from _named(f"{invariant}: ", find_in_all(metadata))
    if isinstance(metadata.index, PrefixIndex):
        yield from _find_broken_index(metadata, metadata.index, groups)


def _find_broken_index(
    metadata: Metadata, index: PrefixIndex, groups: dict[int, Recount]
) -> Iterator[str]:
    """Yield the violations of the prefix index."""
    if index.snapshots is not None:
        wrong = prefixes.check_snapshots(index.snapshots, metadata.max_pending)
        yield from _named("snapshots: ", wrong)
    if not groups:
        return
    leader = groups[metadata.leader]
    yield from _named(
        f"prefix_index: {leader.name}", prefixes.check_indexed(index, leader)
    )
    yield from _named(
        f"committed: {leader.name}", prefixes.check_committed(index, leader)
    )
    for number, beside in zip(metadata.followers, index.followers, strict=True):
        found = groups[number]
        wrong = prefixes.check_pairs(index, leader, found, beside)
        yield from _named(f"prefix_index: {found.name}", wrong)


def _named(beginning: str, texts: Iterator[str]) -> Iterator[str]:
    return (beginning + text for text in texts)


def _shapes(cache: Cache) -> Iterator[str]:
    try:
        sizes = tuple(
            storage.implied_sizes(cache.metadata, group)
            for storage, group in zip(cache.storage, cache.metadata.groups, strict=True)
        )
        expected = lay_out(sizes, cache.metadata.index.is_there)
    except IndexError:
        yield "the block tables, reference counts or pools of a group lack an axis"
        return
    found = named_arrays(cache)
    for name in expected | found:
        if name not in found:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} does not belong to this cache"
        elif (kind := _kind(found[name])) != (wanted := _kind(expected[name])):
            yield f"{name} is {kind}, expected {wanted}"


def _kind(array: jax.Array | ArrayLayout) -> str:
    return f"{np.dtype(array.dtype)}{list(array.shape)}"
