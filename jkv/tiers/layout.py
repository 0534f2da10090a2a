"""How rows lie in blocks and states: what a value outside a cache must know of it."""

from typing import Any, NamedTuple, Self

from jkv.state import Cache


class Layout(NamedTuple):
    """Of a cache."""

    block_size: int
    num_groups: int  # with blocks
    num_states: int  # groups with a state
    # Of each array its path, as `Held` names it, its dtype, layers, and the shape of
    # one block or one state; of blocks also what the bits mean.
    arrays: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, cache: Cache) -> Self:
        with_state = [each for each in cache.storage if each.kind == "states"]
        kinds: list[tuple[Any, ...]] = []
        for number, storage in enumerate(cache.block_storage):
            meant = str(storage.dtype), str(storage.value_dtype)
            kinds += (
                (f"block.{number}.{name}", str(pool.dtype), pool.shape[0])
                + (storage.num_kv_heads, *pool.shape[3:], *meant)
                for name, pool in storage.arrays.items()
            )
        for number, states in enumerate(with_state):
            parts = {"rows": states.snapshot_rows, "inputs": states.snapshot_inputs}
            kinds += (
                (f"snapshot.{part}.{number}.{name}", str(array.dtype))
                + (array.shape[0], *array.shape[2:])
                for part, arrays in parts.items()
                for name, array in sorted(arrays.items())
            )
        num_groups = len(cache.block_storage)
        return cls(cache.block_size, num_groups, len(with_state), tuple(kinds))

    @classmethod
    def of_json(cls, found: Any) -> Self:
        block_size, num_groups, num_states, arrays = found
        return cls(block_size, num_groups, num_states, tuple(map(tuple, arrays)))

    def differences(self, other: Self) -> list[str]:
        """Say in what this layout differs from another, that of a cache."""
        mine, theirs = (
            {
                "block_size": each.block_size,
                "the number of groups with blocks": each.num_groups,
                "the number of groups with a state": each.num_states,
                **{path: str(kind) for path, *kind in each.arrays},
            }
            for each in (self, other)
        )
        return [
            f"{name} is {mine.get(name)}, in this cache {theirs.get(name)}"
            for name in mine | theirs
            if mine.get(name) != theirs.get(name)
        ]
