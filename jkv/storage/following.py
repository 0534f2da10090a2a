"""What storage follows after a call has changed the metadata."""

from jkv.metadata.part import Moves
from jkv.metadata.states import SnapshotCopies, StateMoves
from jkv.metadata.tails import BlockCopies
from jkv.state import Cache, Metadata
from jkv.storage.copies import copy_blocks
from jkv.storage.state_copies import copy_to_snapshots, move_states


def follow(cache: Cache, metadata: Metadata, moves: tuple[Moves, ...]) -> Cache:
    """Return the cache with new metadata, and its storage as the call says.

    Outside jit there is no pass over storage of which nothing is to be moved.

    Args:
      cache: the cache.
      metadata: what it is to have.
      moves: of each part, in the order of `jkv.metadata.parts`; or of the index.
    """
    cache = cache.with_metadata(metadata)
    for number, of_part in enumerate(moves):
        if isinstance(of_part, BlockCopies):
            cache = copy_blocks(cache, number, of_part)
        elif isinstance(of_part, StateMoves):
            cache = move_states(cache, of_part)
        elif isinstance(of_part, SnapshotCopies):
            cache = copy_to_snapshots(cache, of_part)
    return cache
