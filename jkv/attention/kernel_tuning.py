"""Tile sizes by family of GPU, and which shapes the kernel takes."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one kernel is cut and compiled."""

    rows: int  # query rows of a tile, a power of two of at least 16
    tokens: int  # tokens of a tile, a power of two of at least 16
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class KernelTuning:
    decode: Tile
    prefill: Tile
    programs: int


JOIN = Tile(rows=1, tokens=1, num_warps=1, num_stages=1)
SAFE = KernelTuning(
    decode=Tile(rows=16, tokens=16, num_warps=1, num_stages=1),
    prefill=Tile(rows=64, tokens=32, num_warps=4, num_stages=1),
    programs=16,
)
