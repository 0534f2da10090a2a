"""Cycle model of a loop in AMD machine code: stalls of one wave, and their causes.

A model, not a measurement: the instructions of one wave in order, each with the cycles
that its unit needs (gfx9: a vector instruction of 64 lanes takes 4 cycles of a SIMD of
16), loads that complete after a latency, and the waits in the code. On gfx11 and gfx12
only the round trips are meaningful: waits are read from the code, cycles are gfx9's.
"""

import re
from typing import NamedTuple

# Latency in cycles.
SHARED_LATENCY, SCALAR_LATENCY = 100, 200
# Assumed shared-memory throughput of a compute unit: bytes per cycle, by banks.
SHARED_BYTES, BANK_BYTES, LANES = 128, 4, 64
# Products per cycle of the matrix unit of one SIMD of gfx942: a compute unit does 2,048
# operations on 16-bit numbers (1,307 TFLOP/s in all) and 256 on float32; it has four
# SIMDs.
MATRIX_RATE = {"f32": 32, "other": 256}
# gfx12 waits for loads, shared memory and scalars separately; the model has one queue
# for the last two.
_GFX12_WAITS = (
    *("s_wait_loadcnt", "s_wait_dscnt", "s_wait_kmcnt"),
    "s_wait_loadcnt_dscnt",  # loads in the upper byte
)
_STEPS = 6  # enough for two equal trips in a row


class Step(NamedTuple):
    """Cycles of one trip of a loop."""

    cycles: int  # per trip, waits included
    issue_cycles: int  # spent issuing instructions, without waits
    matrix_cycles: int  # of the matrix unit
    vector_cycles: int  # the SIMD is busy with vector and matrix instructions
    shared_cycles: int  # the compute unit's shared memory serves the wave


def walk(loop: list[str], memory_latency: int) -> Step:
    """Simulate the instructions of a loop until two trips are alike.

    Args:
        loop: its lines, with labels and comments.
        memory_latency: cycles from a load of GPU memory to its completion.
    """
    instructions = [
        line.split(";")[0].split(None, 1)
        for line in loop
        if re.match(r"\s+[a-z]", line.split(";")[0])
    ]
    now, matrix_free, before = 0, 0, 0
    vector: list[int] = []  # completion times of loads, in order
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
    """Return the number of serial waits for GPU memory in one trip of a loop.

    With a latency that dwarfs everything else, a trip takes that many latencies.
    """
    endless = 10_000_000
    return round(walk(loop, endless).cycles / endless, 1)


def _allowed(
    name: str, operands: str, vector: list[int], local: list[int]
) -> list[tuple[list[int], int]]:
    """Return (queue, number left open) of the queues that a gfx12 wait names."""
    count = int(operands.split()[0], 0)
    if name == "s_wait_loadcnt_dscnt":
        return [(vector, count >> 8), (local, count & 0xFF)]
    return [(vector if name == "s_wait_loadcnt" else local, count)]


def _wait(operands: str, counter: str, answers: list[int], now: int) -> int:
    """Advance `now` until no more loads are outstanding than the instruction allows."""
    allowed = re.search(rf"{counter}\((\d+)\)", operands)
    while allowed and len(answers) > int(allowed.group(1)):
        now = max(now, answers.pop(0))
    return now


def _matrix_cycles(name: str) -> int:
    """Return the cycles until the matrix unit accepts the next instruction."""
    shape = re.match(r"v_mfma_\w+?_(\d+)x(\d+)x(\d+)_?(\w+)", name)
    assert shape is not None, name
    rows, columns, depth = map(int, shape.groups()[:3])
    rate = MATRIX_RATE.get(shape.group(4), MATRIX_RATE["other"])
    return rows * columns * depth // rate


def _shared_cycles(name: str) -> int:
    """Return the cycles in which shared memory serves an access of one wave."""
    width = re.search(r"_[bui](\d+)", name)
    num_bytes = int(width.group(1)) // 8 if width else BANK_BYTES
    num_bytes *= 2 if "read2" in name or "write2" in name else 1
    return LANES * max(num_bytes, BANK_BYTES) // SHARED_BYTES


def _cycles(name: str, operands: str) -> int:
    """Return the cycles needed to issue an instruction."""
    if name == "s_nop":
        return 4 * (1 + int(operands or 0))
    if name.startswith(("v_exp", "v_log", "v_rcp")):
        return 16
    if name.startswith("ds_"):
        return 8
    if name.startswith(("global_load", "buffer_load")):
        return 16 if "x4" in name else 4
    return 4 if name.startswith(("v_", "s_load")) else 1
