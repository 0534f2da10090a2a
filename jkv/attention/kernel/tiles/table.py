"""The table: how the kernel is cut on each family of GPU, with a reason for each row.

Nothing is tuned at run time. A row holds up to a head dim; where there is no row, the
plain path serves. All rows were chosen by compiling them: no vector register may be
spilled, shared memory must fit, matrix instructions must be used
(`tests/attention/kernel/test_kernel_machine_code.py` compiles each row for its
family's targets, and `benchmarks/results/kernel_code.json` holds what came out).
Hopper's were timed, too; no row was timed on an AMD card yet.
"""

import dataclasses
import enum
import functools


class Ways(enum.Flag):
    """What kernels do in other than the plain way."""

    # The loop.
    FULL_FIRST = enum.auto()  # prefill: a loop without mask before the one with it
    CARRIED = enum.auto()  # the next tile of K/V is loaded before this one is used
    RELOADED = enum.auto()  # tokens are not kept in registers, where a loop has them
    # Loading.
    WORDS = enum.auto()  # elements of one byte are loaded and carried in fours
    # Of prefill: the ids of a whole tile's blocks are scalars, of which lanes select.
    SCALAR_IDS = enum.auto()
    # Numbers. Float32 is two of tf32, in three products: good to 22 bits.
    SPLIT = enum.auto()
    EXP2_IN_PAIRS = enum.auto()  # of prefill: 2^x as a polynomial, two at a time
    ROUNDED_BY_BITS = enum.auto()  # of prefill: weights, by adding to bits


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one kernel is cut and compiled."""

    rows: int  # query rows of a tile, a power of two of at least 16
    tokens: int  # tokens of a tile, a power of two from 16 to 64
    num_warps: int
    num_stages: int  # tiles of K/V in flight; 1 leaves that to the occupancy
    ways: Ways = Ways(0)
    section: int = 512  # columns of a head dim that are multiplied at a time, at most


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What one call is compiled with."""

    decode: Tile
    prefill: Tile
    programs: int  # wanted in a decode call
    # By position: pieces of a context are no shorter, and no more than there may be.
    piece_tokens: int = 256
    max_pieces: int = 16
    # Instead of `decode`: where scores have a soft cap, and by position.
    capped: Tile | None = None
    position: Tile | None = None

    def decode_tile(self, soft_cap: float | None) -> Tile:
        """Return the tile that decodes."""
        if soft_cap is None or self.capped is None:
            return self.decode
        return self.capped

    def position_tile(self, soft_cap: float | None) -> Tile:
        """Return the tile by position; its rows do not depend on the cap."""
        return self.position or self.decode_tile(soft_cap)


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
    # Of as many rows as `decode`, where a soft cap takes registers that it has not.
    capped: Tile | None = None
    # For pieces by position, where `decode` spills when each row sees other tokens.
    position: Tile | None = None

    def tuned_for(self, units: int) -> Tuning:
        """Return what a call is compiled with on cards of so many compute units."""
        return Tuning(
            self.decode,
            self.prefill,
            self.programs * units,
            capped=self.capped,
            position=self.position,
        )


@dataclasses.dataclass(frozen=True)
class Backward:
    """One row of the table of derivatives: tiles for head dims up to a size.

    Chosen as those of the forward kernels are, the largest that do not spill among
    those that leave room for several programs; none was timed. The kernel of tokens
    holds two gradients and two tiles of operands, so it is the one that spills. On
    gfx11, which keeps operands twice, it reads its own tile again in each trip. On
    NVIDIA's cards heads with a section of 16 take the smallest tiles, or none.
    """

    max_head_dim: int
    queries: Tile  # of rows, which walk over tokens
    tokens: Tile  # of tokens of one block, at most so many, which walk over rows
    kinds: tuple[str, ...] = ("half",)
    multiple: int = 16  # of which the head dims are; others spill


@dataclasses.dataclass(frozen=True)
class Family:
    """GPUs that are cut alike."""

    targets: tuple[str, ...]  # where the rows were compiled
    units: int  # compute units of the largest card
    rows: tuple[Row, ...]  # the first that suits is taken
    backward: tuple[Backward, ...] = ()  # likewise, of derivatives
    # Head dims by kind that spill in every tile that was tried.
    spilling: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


_full = functools.partial(Tile, ways=Ways.FULL_FIRST)
_carried = functools.partial(Tile, num_stages=1, ways=Ways.CARRIED)
_words = functools.partial(Tile, num_stages=1, ways=Ways.CARRIED | Ways.WORDS)
_reloaded = functools.partial(Tile, num_stages=1, ways=Ways.RELOADED)
_split = functools.partial(Tile, ways=Ways.SPLIT)
_full_split = functools.partial(Tile, ways=Ways.FULL_FIRST | Ways.SPLIT)


# Where matrix instructions take float32, whatever the pool holds.
_FLOAT32 = ("float32", "mixed")


# Of derivatives on NVIDIA's cards.
_SPLIT = _split(16, 16, 8, 1)


# 16-bit elements on RDNA: more waves for wider heads, and one loop in prefill (two
# spill 84 registers on gfx11 at head dim 128). 64 tokens on 4 waves spill hundreds.
# Latent caches do not fit at all.
_RDNA_HALVES = (
    Row(96, Tile(16, 16, 1, 1), Tile(64, 16, 4, 1), ("half",)),
    Row(128, Tile(16, 16, 2, 1), Tile(64, 16, 4, 1), ("half",)),
    Row(208, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), ("half",)),
    Row(224, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), ("half",)),
    Row(256, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), ("half",)),
)


def _cdna_rows(rounded: Ways) -> tuple[Row, ...]:
    """Return the rows of a card whose weights are rounded in a way."""
    # Few vector instructions for the weights of prefill.
    few = Ways.FULL_FIRST | Ways.SCALAR_IDS | rounded
    in_pairs, carried_words = few | Ways.EXP2_IN_PAIRS, Ways.CARRIED | Ways.WORDS
    short = functools.partial(Tile, num_warps=4, ways=in_pairs)
    carried = functools.partial(
        Tile, num_warps=4, num_stages=1, ways=in_pairs | carried_words
    )
    in_sections = carried(128, 32, section=64)

    def fours(num_warps: int) -> Tile:
        return Tile(16, 16, num_warps, 2, Ways.WORDS | rounded)

    return (
        Row(128, _carried(16, 16, 1), short(128, 32, num_stages=2), ("half",)),
        Row(96, _words(16, 16, 1), in_sections, ("byte",)),
        Row(112, _words(16, 16, 1), carried(128, 16), ("byte",)),  # in three sections
        Row(128, _words(16, 16, 1), in_sections, ("byte",)),
        # Four bits: what is loaded in the loop goes through shared memory as it is, and
        # becomes operands behind it. Two stages leave one wait for memory a step, and
        # 160 registers room for three waves on a SIMD, each of which waits longer.
        Row(96, fours(1), in_sections, ("four",), programs=12),
        Row(112, fours(1), carried(128, 16), ("four",), programs=12),
        Row(128, fours(1), in_sections, ("four",), programs=12),
        Row(256, fours(2), carried(64, 16), ("four",), programs=4),
        Row(256, _carried(16, 16, 2), short(64, 16, num_stages=2), ("half",), 4),
        Row(256, _words(16, 16, 2), carried(64, 16), ("byte",), programs=4),
        # Two weights a lane: looking for NaN among them takes what pairs would save.
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
    # One wave and 16 tokens a step: 120 to 130 registers at head dim 128, so four waves
    # per SIMD hide the latency of each other's loads without a barrier; 32 tokens on
    # two waves take twice the vector instructions and leave fewer programs. From 192 on
    # a second wave halves what each holds of the values. Float32 has matrix
    # instructions here, and half as many elements in a register. As many programs as
    # registers leave room for, 170 to 250 of 512 for two waves on each of four SIMDs;
    # twice as many for latent caches, so that one short context is cut small enough.
    #
    # Prefill by `benchmarks/kernel_model.py`: 32 rows for each wave, so that none
    # computes scores which another has, too; and no more than 256 registers, for two
    # waves a SIMD. Bytes are carried: what comes from the trip before is converted
    # before it goes to shared memory, by one wave for all.
    "cdna": Family(
        targets=("gfx90a", "gfx942"),
        units=304,
        rows=_cdna_rows(Ways.ROUNDED_BY_BITS),
        backward=_CDNA_BACKWARD,
    ),
    # With an instruction that rounds two numbers to bfloat16.
    "cdna4": Family(
        targets=("gfx950",),
        units=304,
        rows=_cdna_rows(Ways(0)),
        backward=_CDNA_BACKWARD,
    ),
    # gfx11 keeps each operand of a matrix instruction twice, in 256 registers. Bytes
    # need more registers on their way to operands: twice the waves in prefill, four to
    # carry the next tile when decoding (converted where they are multiplied, they take
    # a fifth to a third fewer vector instructions, which bound them), and nothing wider
    # than 128. These rows fit CDNA too, so programs for an unknown card, exported on a
    # machine without one, have them.
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
    # gfx12 keeps operands once: the tile of bytes that is carried fits in fewer waves,
    # which take a third to a half fewer vector instructions in all than four do. A soft
    # cap and a window beside it spill 59 to 94 registers of 128 wide ones: not carried
    # they fit, in 15% more vector instructions.
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
    # Five stages: the block table stands between a tile and its address, and with fewer
    # the pipeline holds one tile of K/V only; narrow heads are small enough for three.
    # Prefill wants several programs on a unit, whose matrix and other units take turns:
    # few tokens up to 128, and from there 128 rows, which are two warp groups. Bytes
    # are bound by their conversion, 64 tokens at a time at best; wide ones take all
    # registers in such tiles. Heads of three pieces, one of them 16 wide, spill; the
    # smallest tile on eight warps holds 176. With a window and a soft cap, in blocks
    # that hold a tile, 128 spills in five stages. Float32 is split into two numbers of
    # tf32, and heads of more than 64 with a piece of 16 spill.
    "hopper": Family(
        targets=("sm_90",),
        units=132,
        rows=(
            Row(64, Tile(16, 64, 4, 3), _full(64, 64, 4, 2), ("half",)),
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
                _full(64, 32, 4, 2),
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
            Row(112, Tile(16, 32, 4, 3), _full(64, 64, 4, 2), ("byte",)),
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
            Row(128, Tile(16, 32, 4, 2), _full(64, 64, 4, 2), ("four",)),
            Row(256, Tile(16, 16, 4, 2), _full(64, 32, 8, 2), ("four",)),
            Row(576, Tile(32, 32, 8, 5), _full(32, 32, 8, 1), ("byte",), 4),
            Row(64, _split(16, 32, 4, 5), _full_split(32, 32, 4, 1), ("float32",)),
            Row(96, _split(16, 32, 4, 5), _full_split(16, 32, 8, 1), ("float32",)),
            Row(128, _split(16, 32, 4, 5), _full_split(32, 32, 4, 1), ("float32",)),
            Row(256, _split(16, 32, 8, 3), _full_split(16, 32, 8, 1), ("float32",)),
            Row(128, _split(16, 32, 4, 5), _full_split(16, 32, 8, 1), ("mixed",)),
        ),
        backward=(
            Backward(128, Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), multiple=32),
            Backward(112, Tile(64, 32, 4, 2), Tile(16, 16, 8, 1)),
            Backward(192, Tile(64, 32, 8, 2), Tile(32, 16, 4, 1), multiple=64),
            Backward(256, Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), multiple=64),
            Backward(576, Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), multiple=64),
            Backward(128, _SPLIT, _SPLIT, ("float32",), multiple=32),
        ),
        spilling={
            "half": (208, 240),
            "byte": (176, 208, 240),
            "four": (176, 208, 224, 240),
            "float32": (80, 112, 144, 176, 208, 240),
            "mixed": (16, 80, 112),
        },
    ),
    # What fits all cards from sm_80 on, the ones with 99 KiB of shared memory included.
    "other": Family(
        targets=("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
        units=108,
        rows=(
            Row(256, Tile(16, 32, 4, 2), _full(32, 32, 4, 2)),
            Row(128, Tile(16, 32, 4, 2), _full(32, 32, 4, 2), ("four",)),
            Row(576, Tile(16, 16, 8, 1), _full(32, 16, 8, 1), programs=4),
        ),
        backward=(
            Backward(128, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), multiple=32),
            Backward(112, Tile(32, 16, 4, 1), Tile(16, 16, 8, 1)),
            Backward(256, Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), multiple=64),
            Backward(128, _SPLIT, _SPLIT, ("float32",), multiple=32),
        ),
    ),
}

# Interpreting is for checking numbers: small tiles, to have several of everything.
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
