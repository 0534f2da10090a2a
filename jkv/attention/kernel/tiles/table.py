"""The table of tile sizes for each GPU family, with a reason for each row.

Nothing is tuned at run time. A row serves head dims up to its own; without a row, plain
XLA serves the call. All rows were chosen by compiling them: no spilled vector
registers, fitting shared memory, and use of matrix instructions
(`tests/attention/kernel/test_kernel_machine_code.py` compiles each row for its family's
targets, with results in `benchmarks/results/kernel_code.json`). Only Hopper's rows were
timed; no row was timed on an AMD GPU yet.
"""

import dataclasses
import enum
import functools


class Techniques(enum.Flag):
    """Optional techniques of a kernel."""

    # The loop.
    FULL_FIRST = enum.auto()  # prefill: a loop without mask before the one with it
    CARRIED = enum.auto()  # the next tile of K/V is loaded before this one is used
    RELOADED = enum.auto()  # a loop's tokens are loaded in each trip, to save registers
    # Loading.
    WORDS = enum.auto()  # one-byte elements are loaded and carried in words of four
    # With WORDS, e4m3 too: on CDNA in fewer registers, but more instructions.
    E4M3_WORDS = enum.auto()
    # Prefill: block ids of a whole tile are scalars, selected by lane.
    SCALAR_IDS = enum.auto()
    # Numbers. Float32 as two tf32, in three products: accurate to 22 bits.
    SPLIT = enum.auto()
    EXP2_IN_PAIRS = enum.auto()  # prefill: 2^x by a polynomial, two at a time
    ROUNDED_BY_BITS = enum.auto()  # prefill: weights are rounded by integer addition


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile sizes and compilation parameters of one kernel."""

    rows: int  # query rows of a tile, a power of two of at least 16
    tokens: int  # tokens of a tile, a power of two from 16 to 64
    num_warps: int
    num_stages: int  # pipelined tiles of K/V; 1 relies on occupancy
    ways: Techniques = Techniques(0)
    section: int = 512  # most columns of a head dim per product


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The tiles of one call on one GPU."""

    decode: Tile
    prefill: Tile
    programs: int  # target number in a decode call
    # By position: least tokens of a piece, and most pieces of a context.
    piece_tokens: int = 256
    max_pieces: int = 16
    # Replace `decode` with a soft cap, and by position.
    capped: Tile | None = None
    position: Tile | None = None

    def decode_tile(self, soft_cap: float | None) -> Tile:
        """Return the tile for decoding."""
        if soft_cap is None or self.capped is None:
            return self.decode
        return self.capped

    def position_tile(self, soft_cap: float | None) -> Tile:
        """Return the tile by position; its rows are independent of the cap."""
        return self.position or self.decode_tile(soft_cap)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: tiles for head dims up to a maximum."""

    max_head_dim: int
    decode: Tile
    prefill: Tile
    kinds: tuple[str, ...] = ("half", "byte")  # of calls, see `find_kind`
    # Decode programs per compute unit: more than run at a time would add partial
    # results without reading faster.
    programs: int = 8
    # Replaces `decode`, with as many rows, if a soft cap would spill registers.
    capped: Tile | None = None
    # By position, if `decode` spills with a mask per row.
    position: Tile | None = None
    # Only if operands of both products have one dtype, else two conversions spill.
    has_one_dtype: bool = False

    def tuned_for(self, units: int) -> Tuning:
        """Return the tuning for GPUs with `units` compute units."""
        return Tuning(
            self.decode,
            self.prefill,
            self.programs * units,
            capped=self.capped,
            position=self.position,
        )


@dataclasses.dataclass(frozen=True)
class Backward:
    """A row of the table of derivatives: tiles for head dims up to a maximum.

    As for the forward kernels, the largest tiles that do not spill and leave room for
    several programs; none was timed. The token kernel, which holds two gradients and
    two operand tiles, is the critical one. On gfx11, which stores operands twice, it
    reloads its own tile in each trip. On NVIDIA GPUs, heads with a section of 16 use
    the smallest tiles, or none.
    """

    max_head_dim: int
    queries: Tile  # of rows, walking over tokens
    tokens: Tile  # of tokens of one block (at most), walking over rows
    kinds: tuple[str, ...] = ("half",)
    multiple: int = 16  # required divisor of the head dims, as others spill


@dataclasses.dataclass(frozen=True)
class Family:
    """GPUs that share tiles."""

    targets: tuple[str, ...]  # compilation targets of the rows
    units: int  # compute units of the largest GPU
    rows: tuple[Row, ...]  # in order of preference
    backward: tuple[Backward, ...] = ()  # likewise, of derivatives
    # Head dims, by kind, that spill in every tile that was tried.
    spilling: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


# Words of all one-byte elements.
_WORDS = Techniques.WORDS | Techniques.E4M3_WORDS

_full = functools.partial(Tile, ways=Techniques.FULL_FIRST)
_full_scalar = functools.partial(
    Tile, ways=Techniques.FULL_FIRST | Techniques.SCALAR_IDS
)
_carried = functools.partial(Tile, num_stages=1, ways=Techniques.CARRIED)
_words = functools.partial(
    Tile, num_stages=1, ways=Techniques.CARRIED | Techniques.WORDS
)
_reloaded = functools.partial(Tile, num_stages=1, ways=Techniques.RELOADED)
_split = functools.partial(Tile, ways=Techniques.SPLIT)
_full_split = functools.partial(Tile, ways=Techniques.FULL_FIRST | Techniques.SPLIT)


# Kinds with float32 operands of matrix instructions, for any pool.
_FLOAT32 = ("float32", "mixed")


# Float32 derivatives on NVIDIA GPUs: the fewest instructions per row and token of all
# tiles without spills, at head dim 128 0.4 times as many as in tiles of 16 x 16.
_split_backward = functools.partial(Backward, kinds=("float32",))
_SPLIT_BACKWARD = (
    _split_backward(64, _split(32, 32, 4, 1), _split(32, 32, 4, 1), multiple=64),
    _split_backward(96, _split(16, 32, 4, 1), _split(64, 16, 8, 1), multiple=32),
)


# 16-bit elements on RDNA: more waves for wider heads, and one loop in prefill (two
# would spill 84 registers on gfx11 at head dim 128). 64 tokens on 4 waves spill
# hundreds. Latent caches do not fit.
_RDNA_HALVES = (
    Row(96, Tile(16, 16, 1, 1), Tile(64, 16, 4, 1), ("half",)),
    Row(128, Tile(16, 16, 2, 1), Tile(64, 16, 4, 1), ("half",)),
    Row(208, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), ("half",)),
    Row(224, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), ("half",)),
    Row(256, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), ("half",)),
)


def _cdna_rows(rounded: Techniques) -> tuple[Row, ...]:
    """Return the rows of CDNA GPUs with the given rounding of weights."""
    # Fewer vector instructions for the weights of prefill.
    few = Techniques.FULL_FIRST | Techniques.SCALAR_IDS | rounded
    in_pairs = few | Techniques.EXP2_IN_PAIRS
    carried_words = Techniques.CARRIED | _WORDS
    short = functools.partial(Tile, num_warps=4, ways=in_pairs)
    carried = functools.partial(
        Tile, num_warps=4, num_stages=1, ways=in_pairs | carried_words
    )
    in_sections = carried(128, 32, section=64)

    def fours(num_warps: int) -> Tile:
        return Tile(16, 16, num_warps, 2, Techniques.WORDS | rounded)

    return (
        Row(128, _carried(16, 16, 1), short(128, 32, num_stages=2), ("half",)),
        Row(96, _words(16, 16, 1), in_sections, ("byte",)),
        Row(112, _words(16, 16, 1), carried(128, 16), ("byte",)),  # in three sections
        Row(128, _words(16, 16, 1), in_sections, ("byte",)),
        # Four bits: loaded elements pass shared memory encoded and are converted after
        # it. Two stages leave one memory wait per step, and 160 registers allow three
        # waves per SIMD, each of which waits longer.
        Row(96, fours(1), in_sections, ("four",), programs=12),
        Row(112, fours(1), carried(128, 16), ("four",), programs=12),
        Row(128, fours(1), in_sections, ("four",), programs=12),
        Row(256, fours(2), carried(64, 16), ("four",), programs=4),
        Row(256, _carried(16, 16, 2), short(64, 16, num_stages=2), ("half",), 4),
        Row(256, _words(16, 16, 2), carried(64, 16), ("byte",), programs=4),
        # Two weights per lane: checking for NaN would cost the gain of pairs.
        Row(
            576,
            _words(32, 16, 4),
            Tile(32, 16, 4, 1, few | carried_words),
            programs=4,
        ),
        Row(128, Tile(16, 16, 1, 1), _full(64, 16, 4, 1), _FLOAT32),
        Row(256, _carried(16, 16, 2), _full(32, 16, 4, 1), _FLOAT32, 2),
        Row(576, _carried(16, 16, 4), Tile(16, 16, 4, 1), _FLOAT32, 1),
    )


_CDNA_BACKWARD = (
    Backward(128, Tile(64, 16, 4, 1), Tile(32, 16, 4, 1)),
    Backward(256, Tile(64, 16, 4, 1), Tile(16, 16, 4, 1)),
    Backward(576, Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
    Backward(128, Tile(64, 16, 4, 1), Tile(16, 16, 4, 1), _FLOAT32),
    Backward(256, Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), _FLOAT32),
)


TABLE = {
    # One wave and 16 tokens per step: 120 to 130 registers at head dim 128, so four
    # waves per SIMD hide each other's load latency without a barrier; 32 tokens on two
    # waves take twice the vector instructions and leave fewer programs. From 192 on, a
    # second wave halves the values per wave. Float32 has matrix instructions here, and
    # half as many elements per register. As many programs as registers allow, 170 to
    # 250 of 512 for two waves on each of four SIMDs; twice as many for latent caches,
    # to split a single short context enough.
    #
    # Prefill by `benchmarks/kernel_model.py`: 32 rows per wave, so that no scores are
    # computed twice, and at most 256 registers, for two waves per SIMD. Bytes are
    # carried: the previous trip's tile is converted before shared memory, by one wave
    # for all.
    "cdna": Family(
        targets=("gfx90a", "gfx942"),
        units=304,
        rows=_cdna_rows(Techniques.ROUNDED_BY_BITS),
        backward=_CDNA_BACKWARD,
    ),
    # Has an instruction that rounds two numbers to bfloat16.
    "cdna4": Family(
        targets=("gfx950",),
        units=304,
        rows=_cdna_rows(Techniques(0)),
        backward=_CDNA_BACKWARD,
    ),
    # gfx11 stores each operand of a matrix instruction twice, in 256 registers. Bytes
    # need more registers during conversion: twice the waves in prefill, four to carry
    # the next tile in decoding (conversion at the product would take a fifth to a third
    # fewer vector instructions, the bottleneck), and no head dim above 128. These rows
    # also fit CDNA, so programs exported for an unknown GPU use them.
    "rdna": Family(
        targets=("gfx1100", "gfx1250"),
        units=96,
        rows=(
            *_RDNA_HALVES,
            Row(128, _carried(16, 16, 4), Tile(64, 16, 8, 1), ("byte",)),
            Row(128, _carried(16, 16, 4), _carried(32, 16, 4), ("four",)),
        ),
        backward=(
            Backward(64, Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
            Backward(96, Tile(16, 16, 8, 1), _reloaded(16, 16, 8)),
            Backward(128, Tile(16, 16, 8, 1), _reloaded(16, 16, 8), multiple=32),
        ),
        spilling={"half": (240,)},
    ),
    # gfx12 stores operands once: a carried tile of bytes fits in fewer waves, with a
    # third to a half fewer vector instructions in total than four. A soft cap together
    # with a window spills 59 to 94 registers at head dim 128: not carried it fits, with
    # 15% more vector instructions.
    "rdna4": Family(
        targets=("gfx1201",),
        units=64,
        rows=(
            *_RDNA_HALVES,
            Row(64, _carried(16, 16, 1), Tile(64, 16, 8, 1), ("byte", "four")),
            Row(112, _carried(16, 16, 2), Tile(64, 16, 8, 1), ("byte", "four")),
            Row(
                128,
                _carried(16, 16, 2),
                Tile(64, 16, 8, 1),
                ("byte", "four"),
                capped=Tile(16, 16, 2, 1),
            ),
        ),
        backward=(
            Backward(64, Tile(64, 16, 8, 1), Tile(32, 16, 4, 1)),
            Backward(128, Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
            Backward(256, Tile(16, 16, 8, 1), _reloaded(16, 16, 8)),
        ),
        spilling={"half": (240,)},
    ),
    # Timed on an H100 (`benchmarks/results/tiles.json`): the fastest that do not spill.
    # Five stages: a tile's address depends on the block table, and with fewer stages
    # the pipeline holds one tile of K/V only; narrow heads are small enough for three.
    # Prefill needs several programs per SM, to alternate matrix and other units: few
    # tokens up to 128, and above it 128 rows, two warp groups. Bytes are bound by their
    # conversion, best in 64 tokens; wide ones take all registers in such tiles. Triton
    # converts bytes once for each operand's layout, but parts of words once in all: of
    # latent bytes, and of heads that were not timed. Latent ones in sections leave
    # registers for two programs. Block ids of few small blocks are scalars. Heads
    # of three sections, one of them 16 wide, spill; the smallest tile on eight warps
    # holds 176. With a window and a soft cap, in blocks that hold a tile, 128 spills in
    # five stages. Float32 is split into two tf32 numbers, and heads above 64 with a
    # section of 16 spill.
    "hopper": Family(
        targets=("sm_90",),
        units=132,
        rows=(
            Row(64, Tile(16, 64, 4, 3), _full_scalar(64, 64, 4, 2), ("half",)),
            Row(
                64,
                Tile(16, 64, 4, 3),
                _full(64, 64, 4, 2),
                ("byte",),
                position=Tile(16, 32, 4, 3),
            ),
            Row(
                128,
                Tile(16, 64, 4, 5),
                _full_scalar(64, 32, 4, 2),
                ("half",),
                capped=Tile(16, 64, 4, 4),
            ),
            Row(160, Tile(16, 64, 4, 3), _full(128, 64, 8, 2), ("half",)),
            Row(176, Tile(16, 16, 8, 2), _full(128, 64, 8, 2), ("half",)),
            Row(256, Tile(16, 64, 4, 3), _full(128, 64, 8, 2), ("half",)),
            Row(
                576,
                Tile(32, 64, 8, 5),
                _full(32, 64, 8, 2),
                ("half",),
                programs=2,
                position=Tile(16, 32, 8, 2),
            ),
            Row(
                96,
                Tile(16, 64, 4, 5),
                _full(64, 64, 4, 2),
                ("byte",),
                position=Tile(16, 32, 4, 3),
            ),
            Row(112, Tile(16, 32, 4, 3, _WORDS), _full(64, 64, 4, 2), ("byte",)),
            Row(
                128,
                Tile(16, 64, 4, 5),
                _full(64, 64, 4, 2),
                ("byte",),
                position=Tile(16, 32, 4, 3),
            ),
            Row(
                256,
                Tile(16, 32, 4, 3),
                _full(64, 32, 8, 2),
                ("byte",),
                position=Tile(16, 32, 8, 2),
            ),
            Row(128, Tile(16, 32, 4, 2, _WORDS), _full(64, 64, 4, 2), ("four",)),
            Row(256, Tile(16, 16, 4, 2), _full(64, 32, 8, 2), ("four",)),
            Row(
                576,
                Tile(32, 64, 4, 1, _WORDS, section=128),
                Tile(32, 64, 8, 1, Techniques.FULL_FIRST | _WORDS, section=128),
                ("byte",),
                programs=4,
                position=Tile(32, 32, 8, 5),
                has_one_dtype=True,
            ),
            Row(576, Tile(32, 32, 8, 5), _full(32, 32, 8, 1), ("byte",), 4),
            Row(64, _split(16, 32, 4, 5), _full_split(32, 32, 4, 1), ("float32",)),
            Row(96, _split(16, 32, 4, 5), _full_split(16, 32, 8, 1), ("float32",)),
            Row(128, _split(16, 32, 4, 5), _full_split(32, 32, 4, 1), ("float32",)),
            Row(256, _split(16, 32, 8, 3), _full_split(16, 32, 8, 1), ("float32",)),
            Row(128, _split(16, 32, 4, 5), _full_split(16, 32, 8, 1), ("mixed",)),
        ),
        backward=(
            Backward(32, Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), multiple=32),
            Backward(64, Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), multiple=64),
            Backward(96, Tile(64, 32, 4, 2), Tile(64, 16, 4, 2), multiple=32),
            Backward(128, Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), multiple=32),
            Backward(112, Tile(64, 32, 4, 2), Tile(16, 16, 8, 1)),
            Backward(192, Tile(64, 32, 8, 2), Tile(32, 16, 4, 1), multiple=64),
            Backward(256, Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), multiple=64),
            Backward(576, Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), multiple=64),
            *_SPLIT_BACKWARD,
            # Half the reads of keys and values of 16 rows, 13% more instructions.
            _split_backward(
                128, _split(32, 32, 8, 1), _split(64, 16, 8, 1), multiple=32
            ),
        ),
        spilling={
            "half": (208, 240),
            "byte": (176, 208, 240),
            "four": (176, 208, 224, 240),
            "float32": (80, 112, 144, 176, 208, 240),
            "mixed": (16, 80, 112),
        },
    ),
    # Fits all GPUs from sm_80 on, including the ones with 99 KiB of shared memory.
    "other": Family(
        targets=("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
        units=108,
        rows=(
            Row(256, Tile(16, 32, 4, 2), _full(32, 32, 4, 2)),
            Row(128, Tile(16, 32, 4, 2), _full(32, 32, 4, 2), ("four",)),
            Row(576, Tile(16, 16, 8, 1), _full(32, 16, 8, 1), programs=4),
        ),
        backward=(
            Backward(64, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), multiple=32),
            Backward(96, Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), multiple=32),
            Backward(128, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), multiple=32),
            Backward(112, Tile(32, 16, 4, 1), Tile(16, 16, 8, 1)),
            Backward(256, Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), multiple=64),
            *_SPLIT_BACKWARD,
            _split_backward(
                128, _split(16, 32, 4, 1), _split(64, 16, 8, 1), multiple=32
            ),
        ),
    ),
}

# Interpret mode checks numbers: small tiles, so that every loop has several trips.
INTERPRETED = Tuning(
    decode=Tile(rows=16, tokens=16, num_warps=1, num_stages=1),
    prefill=_full(rows=32, tokens=16, num_warps=1, num_stages=1),
    programs=16,
    piece_tokens=16,
    max_pieces=8,
)
INTERPRETED_BACKWARD = Backward(
    576,
    queries=Tile(rows=32, tokens=16, num_warps=1, num_stages=1),
    tokens=Tile(rows=32, tokens=32, num_warps=1, num_stages=1),
)
