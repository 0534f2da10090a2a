"""A walk over a loop of AMD's machine code: how long one wave waits in it, and why.

A model, not a measurement: instructions of one wave in order, each with the cycles in
which its unit takes it (gfx9: a vector instruction of 64 lanes takes 4 cycles of a SIMD
of 16), loads that answer after a latency, and waits as they stand in the code. On gfx11
and gfx12 only the round trips mean something: their waits are read, their cycles are
gfx9's.
"""

import re
from typing import NamedTuple

# Cycles until an answer.
SHARED_LATENCY, SCALAR_LATENCY = 100, 200
# Assumed throughput of a unit's shared memory in a cycle, in banks.
SHARED_BYTES, BANK_BYTES, LANES = 128, 4, 64
# Products that the matrix unit of a SIMD of gfx942 adds in a cycle: a unit's 2,048
# operations of 16-bit numbers, which make 1,307 TFLOP/s, and 256 of float32, for each
# of four.
MATRIX_RATE = {"f32": 32, "other": 256}
# gfx12 waits for loads, shared memory and scalars apart; the walk has one queue for the
# last two.
_GFX12_WAITS = (
    *("s_wait_loadcnt", "s_wait_dscnt", "s_wait_kmcnt"),
    "s_wait_loadcnt_dscnt",  # of loads in the upper byte
)
_STEPS = 6  # until one is like the one before


class Step(NamedTuple):
    """One trip of a loop, in cycles."""

    cycles: int  # from one to the next, waits included
    issue_cycles: int  # in which instructions are issued, waits left out
    matrix_cycles: int  # of the matrix unit
    vector_cycles: int  # in which the SIMD takes vector and matrix instructions
    shared_cycles: int  # in which the unit's shared memory serves the wave


def walk(loop: list[str], memory_latency: int) -> Step:
    """Walk over the instructions of a loop until its trips are alike.

    Args:
      loop: its lines, labels and comments too.
      memory_latency: cycles from a load of the GPU's memory to its answer.
    """
    instructions = [
        line.split(";")[0].split(None, 1)
        for line in loop
        if re.match(r"\s+[a-z]", line.split(";")[0])
    ]
    now, matrix_free, before = 0, 0, 0
    vector: list[int] = []  # when loads answer, in order
    local: list[int] = []
    issue = matrix = issued = shared = 0
    for _ in range(_STEPS):
        before = now
        issue = matrix = issued = shared = 0
        for name, *rest in instructions:
            operands = rest[0] if rest else ""
            if name == "s_waitcnt":
                now = _wait(operands, "vmcnt", vector, now)
                now = _wait(operands, "lgkmcnt", local, now) + 1
                continue
            if name in _GFX12_WAITS:
                for queue, allowed in _allowed(name, operands, vector, local):
                    now = _wait(f"count({allowed})", "count", queue, now) + 1
                continue
            cycles = _cycles(name, operands)
            if name.startswith(("global_load", "buffer_load")):
                vector.append(now + memory_latency)
            elif name.startswith("s_load"):
                local.append(now + SCALAR_LATENCY)
            elif name.startswith("ds_"):
                local.append(now + SHARED_LATENCY)
                shared += _shared_cycles(name)
            elif name.startswith("v_mfma"):
                now = max(now, matrix_free)
                matrix_free = now + _matrix_cycles(name)
                matrix += _matrix_cycles(name)
            now += cycles
            if name.startswith("v_"):
                issued += cycles
            if name != "s_nop":
                is_matrix = name.startswith("v_mfma")
                issue += _matrix_cycles(name) if is_matrix else cycles
    return Step(now - before, issue, matrix, issued, shared)


def count_round_trips(loop: list[str]) -> float:
    """Return how often a trip of a loop waits for the GPU's memory, one after another.

    With a latency so long that nothing else counts, a trip takes so many of them.
    """
    endless = 10_000_000
    return round(walk(loop, endless).cycles / endless, 1)


def _allowed(
    name: str, operands: str, vector: list[int], local: list[int]
) -> list[tuple[list[int], int]]:
    """Return for each queue of a waiting instruction of gfx12 the number left open."""
    count = int(operands.split()[0], 0)
    if name == "s_wait_loadcnt_dscnt":
        return [(vector, count >> 8), (local, count & 0xFF)]
    return [(vector if name == "s_wait_loadcnt" else local, count)]


def _wait(operands: str, counter: str, answers: list[int], now: int) -> int:
    """Complete answers until no more are out than the instruction allows."""
    allowed = re.search(rf"{counter}\((\d+)\)", operands)
    while allowed and len(answers) > int(allowed.group(1)):
        now = max(now, answers.pop(0))
    return now


def _matrix_cycles(name: str) -> int:
    """Return the cycles until the matrix unit takes the next instruction."""
    shape = re.match(r"v_mfma_\w+?_(\d+)x(\d+)x(\d+)_?(\w+)", name)
    assert shape is not None, name
    rows, columns, depth = map(int, shape.groups()[:3])
    rate = MATRIX_RATE.get(shape.group(4), MATRIX_RATE["other"])
    return rows * columns * depth // rate


def _shared_cycles(name: str) -> int:
    """Return the cycles in which shared memory serves a wave's access."""
    width = re.search(r"_[bui](\d+)", name)
    num_bytes = int(width.group(1)) // 8 if width else BANK_BYTES
    num_bytes *= 2 if "read2" in name or "write2" in name else 1
    return LANES * max(num_bytes, BANK_BYTES) // SHARED_BYTES


def _cycles(name: str, operands: str) -> int:
    """Return the cycles in which an instruction is issued."""
    if name == "s_nop":
        return 4 * (1 + int(operands or 0))
    if name.startswith(("v_exp", "v_log", "v_rcp")):
        return 16
    if name.startswith("ds_"):
        return 8
    if name.startswith(("global_load", "buffer_load")):
        return 16 if "x4" in name else 4
    return 4 if name.startswith(("v_", "s_load")) else 1
