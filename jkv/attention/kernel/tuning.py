"""How the kernel is cut on each family of GPU, and which calls it does not take.

Nothing is tuned at run time. A row of the table holds up to a head dim; where there is
no row, the plain path serves. All rows were chosen by compiling them: no vector
register may be spilled, shared memory must fit, matrix instructions must be used
(`tests/test_kernel_machine_code.py` compiles each row for its family's targets, and
`benchmarks/results/kernel_code.json` holds what came out). No row was timed on an AMD
card yet.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention.elements import ONE_BYTE_DTYPES
from jkv.attention.pools import Pools


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one kernel is cut and compiled."""

    rows: int  # query rows of a tile, a power of two of at least 16
    tokens: int  # tokens of a tile, a power of two from 16 to 64
    num_warps: int
    num_stages: int  # tiles of K/V in flight; 1 leaves that to the occupancy
    has_full_loop: bool = False  # prefill: a loop without mask before the one with it
    is_carried: bool = False  # the next tile of K/V is loaded before this one is used


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What one call is compiled with."""

    decode: Tile
    prefill: Tile
    programs: int  # wanted in a decode call


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table: tiles for head dims up to a size."""

    max_head_dim: int
    decode: Tile
    prefill: Tile
    kinds: tuple[str, ...] = ("half", "byte")  # of calls, as `find_kind` names them
    # Decode programs for each compute unit: more than fit at a time would leave more
    # partial results, and read no faster.
    programs: int = 8

    def tuned_for(self, units: int) -> Tuning:
        """Return what a call is compiled with on cards of so many compute units."""
        return Tuning(self.decode, self.prefill, self.programs * units)


@dataclasses.dataclass(frozen=True)
class Family:
    """GPUs that are cut alike."""

    targets: tuple[str, ...]  # where the rows were compiled
    units: int  # compute units of the largest card
    rows: tuple[Row, ...]  # the first that suits is taken
    # Head dims by kind that spill in every tile that was tried.
    spilling: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def _full(rows: int, tokens: int, num_warps: int, num_stages: int) -> Tile:
    return Tile(rows, tokens, num_warps, num_stages, has_full_loop=True)


def _carried(rows: int, tokens: int, num_warps: int) -> Tile:
    return Tile(rows, tokens, num_warps, 1, is_carried=True)


TABLE = {
    # One wave and 16 tokens a step: 120 to 130 registers at head dim 128, so four waves
    # per SIMD hide the latency of each other's loads without a barrier; 32 tokens on
    # two waves take twice the vector instructions and leave fewer programs. From 192 on
    # a second wave halves what each holds of the values. With 64 rows of prefill 64
    # tokens need over 240 registers, 32 need 190. Float32 has matrix instructions here,
    # and half as many elements in a register. As many programs as registers leave room
    # for, 170 to 250 of 512 for two waves on each of four SIMDs; twice as many for
    # latent caches, so that one short context is cut small enough.
    "cdna": Family(
        targets=("gfx90a", "gfx942", "gfx950"),
        units=304,
        rows=(
            Row(128, _carried(16, 16, 1), _full(64, 32, 4, 1)),
            Row(256, _carried(16, 16, 2), _full(64, 32, 4, 1), programs=4),
            Row(576, _carried(32, 16, 4), _full(32, 16, 4, 1), programs=4),
            Row(128, Tile(16, 16, 1, 1), _full(64, 16, 4, 1), ("float32",)),
            Row(256, _carried(16, 16, 2), _full(32, 16, 4, 1), ("float32",), 2),
            Row(576, _carried(16, 16, 4), Tile(16, 16, 4, 1), ("float32",), 1),
        ),
    ),
    # gfx11 keeps each operand of a matrix instruction twice, in 256 registers: more
    # waves for wider heads, and one loop in prefill (two spill 84 registers at head dim
    # 128). 64 tokens on 4 waves spill hundreds. Latent caches do not fit at all, and
    # float32 has no matrix instructions. Bytes need more registers on their way to
    # operands: twice the waves in prefill, four to carry the next tile when decoding
    # (converted where they are multiplied, they take a fifth to a third fewer vector
    # instructions on gfx11, which bound them), and nothing wider than 128. These rows
    # fit CDNA too, so programs for an unknown card, exported on a machine without one,
    # have them.
    "rdna": Family(
        targets=("gfx1100", "gfx1201", "gfx1250"),
        units=96,
        rows=(
            Row(96, Tile(16, 16, 1, 1), Tile(64, 16, 4, 1), ("half",)),
            Row(128, Tile(16, 16, 2, 1), Tile(64, 16, 4, 1), ("half",)),
            Row(208, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), ("half",)),
            Row(224, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), ("half",)),
            Row(256, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), ("half",)),
            Row(128, _carried(16, 16, 4), Tile(64, 16, 8, 1), ("byte",)),
        ),
        spilling={"half": (240,)},
    ),
    # 64 tokens in five stages: the block table stands between a tile and its address,
    # and with fewer stages the pipeline holds one tile of K/V only. Three stages of 256
    # wide heads take 74 of 227 KiB and leave room for two more programs. Bytes of wide
    # heads take all registers in tiles of this size, so theirs are smaller. Heads of
    # three pieces, one of them 16 wide, spill; the smallest tile on eight warps holds
    # 176. Float32 would be rounded to tf32, or miss the matrix units.
    "hopper": Family(
        targets=("sm_90",),
        units=132,
        rows=(
            Row(96, Tile(16, 64, 4, 5), _full(64, 64, 4, 2)),
            Row(112, Tile(16, 32, 4, 3), _full(64, 64, 4, 2), ("byte",)),
            Row(128, Tile(16, 64, 4, 5), _full(64, 64, 4, 2)),
            Row(160, Tile(16, 64, 4, 3), _full(64, 32, 8, 2), ("half",)),
            Row(176, Tile(16, 16, 8, 2), _full(64, 32, 8, 2), ("half",)),
            Row(256, Tile(16, 64, 4, 3), _full(64, 32, 8, 2), ("half",)),
            Row(256, Tile(16, 32, 4, 3), _full(64, 32, 8, 2), ("byte",)),
            Row(576, Tile(32, 16, 8, 2), _full(32, 16, 8, 2), programs=4),
        ),
        spilling={"half": (208, 240), "byte": (176, 208, 240)},
    ),
    # What fits all cards from sm_80 on, the ones with 99 KiB of shared memory included.
    "other": Family(
        targets=("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
        units=108,
        rows=(
            Row(256, Tile(16, 32, 4, 2), _full(32, 32, 4, 2)),
            Row(576, Tile(16, 16, 8, 1), _full(32, 16, 8, 2), programs=4),
        ),
    ),
}


_CDNA = ("gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")


# With the digit of the model after it. gfx1250 has matrix instructions like RDNA's.
_RDNA = ("gfx110", "gfx115", "gfx120", "gfx125")


_MAX_BLOCK_SIZE = 256


_OPERANDS = (jnp.dtype("float32"), jnp.dtype("float16"), jnp.dtype("bfloat16"))


_ELEMENTS = (*_OPERANDS, *ONE_BYTE_DTYPES)


def find_target(platform: str) -> str | None:
    """Name the GPU at hand, such as gfx942 or sm_90, as far as it is of a platform.

    Args:
      platform: "rocm" or "cuda".

    Returns:
      None if the program is to run on some other machine, and the card not known.
    """
    device = jax.devices()[0]
    # From JAX 0.11 on a program may be meant for a card that is not here but named
    # (`use_abstract_mesh`); only AMD's names are those of targets.
    mesh = jax.sharding.get_abstract_mesh()
    named = getattr(mesh, "abstract_device", None)
    if named is not None and named.device_kind != device.device_kind:
        is_target = platform == "rocm" and named.device_kind.startswith("gfx")
        return named.device_kind if is_target else None
    name = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or name.startswith("gfx") != (platform == "rocm"):
        return None
    return name.split(":")[0] if platform == "rocm" else f"sm_{name.replace('.', '')}"


def find_family(platform: str, target: str | None) -> str | None:
    """Return a key of the table; None for cards without the instructions it needs."""
    if platform == "rocm":
        if target is None or target[:-1] in _RDNA:
            return "rdna"
        return "cdna" if target in _CDNA else None
    if target is not None and int(target.removeprefix("sm_")) < 80:
        return None
    return "hopper" if target == "sm_90" else "other"


def find_tuning(
    queries: jax.Array, pools: Pools, platform: str, target: str | None
) -> Tuning | None:
    """Return how a call is cut on a target, None if the table has no row for it."""
    name = find_family(platform, target)
    if name is None:
        return None
    family, kind = TABLE[name], find_kind(queries, pools)
    dims = pools.keys.shape[4], pools.value_dim
    if set(dims) & set(family.spilling.get(kind, ())):
        return None
    for row in family.rows:
        if kind in row.kinds and max(dims) <= row.max_head_dim:
            return row.tuned_for(family.units)
    return None


def find_kind(queries: jax.Array, pools: Pools) -> str:
    """Tell calls apart that need other tiles: "float32", "half" or "byte"."""
    if find_operand_dtype(queries, pools) == jnp.float32:
        return "float32"
    return "byte" if pools.dtypes & set(ONE_BYTE_DTYPES) else "half"


def find_operand_dtype(queries: jax.Array, pools: Pools) -> np.dtype[Any]:
    """Return what queries and keys are multiplied in: neither loses a bit.

    Elements of one byte fit whatever the queries are.
    """
    dtypes = {queries.dtype, *(pools.dtypes - set(ONE_BYTE_DTYPES))}
    return dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)


def find_weight_dtype(queries: jax.Array, pools: Pools) -> np.dtype[Any]:
    """Return what weights and values are multiplied in.

    A weight times the scale of its token can be too small for float16.
    """
    dtype = find_operand_dtype(queries, pools)
    is_scaled = pools.key_scales is not None or pools.value_scales is not None
    return jnp.dtype(jnp.bfloat16) if is_scaled and dtype == jnp.float16 else dtype


def why_not(
    queries: jax.Array, pools: Pools, platform: str, target: str | None
) -> str | None:
    """Say why the kernel cannot serve a call on a target, None if it can.

    Args:
      queries: [R, H, D]; only shape and dtype matter.
      pools: likewise.
      platform: "rocm" or "cuda".
      target: as `find_target` names it, None for a card that is not known.
    """
    reason = why_never(queries, pools)
    if reason is not None or find_tuning(queries, pools, platform, target):
        return reason
    width = max(pools.keys.shape[4], pools.value_dim)
    dtypes = sorted({str(queries.dtype), *map(str, pools.dtypes)})
    return (
        f"there is no tile for head dim {width} with {' and '.join(dtypes)} on "
        f"{target or f'an unknown {platform} card'}"
    )


def why_never(queries: jax.Array, pools: Pools) -> str | None:
    """Say why the kernel cannot serve a call on any target, None if it can."""
    block_size = pools.block_size
    if block_size & (block_size - 1) or block_size > _MAX_BLOCK_SIZE:
        return f"the block size must be a power of two up to 256, it is {block_size}"
    for name, dim in {"key": pools.keys.shape[4], "value": pools.value_dim}.items():
        # The dots take no tile narrower than 16.
        if dim % 16 or dim > 576:
            return f"the {name} head dim must be a multiple of 16 up to 576, not {dim}"
    for name, pool in {"key": pools.keys, "value": pools.values}.items():
        # Offsets are 32 bits wide, counted in elements, up to this many bytes.
        if pool is None or pool.size <= 2**31:
            continue
        if (num_bytes := pool.size * pool.dtype.itemsize) <= 2**32:
            return (
                f"the {name} pool has {pool.size} elements in {num_bytes} bytes, "
                "which the compiler would address with 32 bits; have less than 2**31 "
                "elements or more than 2**32 bytes"
            )
    if queries.dtype not in _OPERANDS:
        return f"it multiplies float32, float16 and bfloat16, not {queries.dtype}"
    for dtype in pools.dtypes:
        if dtype not in _ELEMENTS:
            return f"it reads {', '.join(map(str, _ELEMENTS))}, not {dtype}"
    return None
