"""What storage follows after a call has changed the metadata."""

from jkv.metadata.part import Moves
from jkv.state import Cache, Metadata


def follow(cache: Cache, metadata: Metadata, moves: tuple[Moves, ...]) -> Cache:
    """Return the cache with new metadata, and its storage as the call says.

    That is the moves of each part; of none where nothing is to be moved. Outside jit
    there is no pass over storage of which nothing is.
    """
    storage = list(cache.storage)
    for part, of_part in zip(metadata.parts, moves, strict=bool(moves)):
        for number in () if of_part is None else part.numbers:
            storage[number] = part.follow(storage[number], of_part)
    return cache.with_metadata(metadata).with_storage(tuple(storage))
