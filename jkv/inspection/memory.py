"""memory_profile: the memory footprint of a cache."""

import dataclasses
import operator
from typing import Any

from jkv.config.counts import human_bytes
from jkv.inspection.recount import named_arrays
from jkv.inspection.statistics import num_held_tokens, tally
from jkv.state import Cache
from jkv.state.entry import takes_cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Memory footprint of a cache: Python ints; bytes are the arrays' `nbytes`.

    A sharded array counts in full.
    """

    total_bytes: int  # of all arrays
    array_bytes: dict[str, int]  # by name, as in `CacheConfig.arrays`
    storage_bytes: int  # keys and values
    metadata_bytes: int  # total = storage + metadata + states
    used_bytes: int  # storage of live blocks
    free_bytes: int  # storage of free blocks, cached ones included: storage - used
    cached_bytes: int  # storage of cached blocks
    bytes_per_token: int  # one token's keys and values in all layers
    cells: int  # slots of live blocks of all groups, reserved ones included
    # Slots with a token; a shared one counts once per group.
    tokens: int
    # Each device's memory statistics in bytes; None on devices without them (CPU).
    devices: dict[str, dict[str, int] | None]
    state_bytes: int = 0  # of recurrent-state layers, snapshots included

    @property
    def efficiency(self) -> float:
        """Tokens over cells; 1.0 for an empty pool."""
        return self.tokens / self.cells if self.cells else 1.0

    def report(self) -> str:
        """Format the profile in human units, one line each, arrays sorted by size.

        Example:
          >>> import jkv
          >>> cache = jkv.init(jkv.CacheConfig(
          ...     num_layers=2, num_kv_heads=4, head_dim=64, num_blocks=32,
          ...     max_sequences=8, max_context_length=256))
          >>> print(jkv.memory_profile(cache).report().split("arrays")[0])
          total       1.0 MiB
          storage     1.0 MiB: 0 B used, 1.0 MiB free (0 B of it cached)
          metadata    1.1 KiB
          per token   2.0 KiB
          efficiency  100%: 0 tokens in 0 cells
          device      cpu:0 keeps no account
          <BLANKLINE>
        """
        lines = [
            f"total       {human_bytes(self.total_bytes)}",
            f"storage     {human_bytes(self.storage_bytes)}: "
            f"{human_bytes(self.used_bytes)} used, {human_bytes(self.free_bytes)} free "
            f"({human_bytes(self.cached_bytes)} of it cached)",
            *[f"states      {human_bytes(self.state_bytes)}"] * bool(self.state_bytes),
            f"metadata    {human_bytes(self.metadata_bytes)}",
            f"per token   {human_bytes(self.bytes_per_token)}",
            f"efficiency  {self.efficiency:.0%}: {self.tokens:,} tokens in "
            f"{self.cells:,} cells",
        ]
        for device, account in self.devices.items():
            usage = "keeps no account"
            if account is not None:
                limit = account.get("bytes_limit")
                usage = f"{human_bytes(account.get('bytes_in_use', 0))} in use"
                usage += f" of {human_bytes(limit)}" if limit else ""
            lines.append(f"device      {device} {usage}")
        lines.append("arrays")
        by_size = sorted(self.array_bytes.items(), key=lambda item: item[1])
        for name, size in by_size:
            name = name.removeprefix("metadata.").removeprefix("sequences.")
            lines.append(f"  {name:28} {human_bytes(size):>10}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return all values as a dict for `json.dumps`."""
        return dataclasses.asdict(self) | {"efficiency": self.efficiency}


@takes_cache(on_host=True)
def memory_profile(cache: Cache) -> MemoryProfile:
    """Return the memory footprint of the cache. For the host, outside jit.

    Args:
      cache: a concrete cache.

    Returns:
      A `MemoryProfile`.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(num_layers=2)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, _ = jkv.append(cache, opened.seq_ids, [6], capacity=6)
      >>> profile = jkv.memory_profile(cache)
      >>> profile.total_bytes == config.bytes, profile.bytes_per_token
      (True, 64)
      >>> profile.used_bytes, profile.tokens, profile.cells, profile.efficiency
      (512, 6, 8, 0.75)
    """
    sums = tally(cache)
    arrays = {name: array.nbytes for name, array in named_arrays(cache).items()}
    total = sum(arrays.values())
    of_groups = [
        sum(pool.nbytes for pool in storage.arrays.values())
        for storage in cache.block_storage
    ]
    storage = sum(of_groups)
    states = sum(n for name, n in arrays.items() if name.startswith("storage."))
    states -= storage
    per_block = [
        pool // each.num_blocks
        for pool, each in zip(of_groups, cache.block_storage, strict=True)
    ]

    def storage_of(name: str) -> int:
        """Return the bytes of a `GroupTally` field's blocks, of all groups."""
        blocks = [getattr(each, name) for each in sums.groups]
        return sum(map(operator.mul, per_block, blocks))

    devices = sorted(cache.devices, key=lambda device: device.id)
    return MemoryProfile(
        total_bytes=total,
        array_bytes=arrays,
        storage_bytes=storage,
        metadata_bytes=total - storage - states,
        state_bytes=states,
        used_bytes=storage_of("live_blocks"),
        free_bytes=storage_of("free_blocks"),
        cached_bytes=storage_of("cached_blocks"),
        bytes_per_token=sum(per_block) // cache.block_size,
        cells=sum(each.live_blocks for each in sums.groups) * cache.block_size,
        tokens=num_held_tokens(cache, sums),
        devices={f"{d.platform}:{d.id}": d.memory_stats() for d in devices},
    )
