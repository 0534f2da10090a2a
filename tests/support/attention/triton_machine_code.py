"""Compile Triton modules to machine code with the `triton` wheel, without a GPU.

XLA embeds another revision of the same compiler, so registers and spills are close to a
GPU's, and instructions can be counted.
"""

import functools
import os
import re
import subprocess
import tempfile
from typing import NamedTuple

os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="triton-"))
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # XLA's default

import triton  # noqa: E402
from triton._C.libtriton import ir  # noqa: E402
from triton.backends.compiler import GPUTarget, Language  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402

from support.attention.amd_instruction_walk import count_round_trips  # noqa: E402

# Shared memory of a compute unit that one program may use, in bytes.
SHARED_LIMIT = {
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), 64 * 1024),
    **dict.fromkeys(("gfx1100", "gfx1201", "gfx1250"), 64 * 1024),
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}

_AMD_KINDS = {
    "matrix": r"v_mfma|v_wmma|v_smfmac|v_swmmac",
    "global load": r"global_load|buffer_load|flat_load",
    "scalar load": r"s_load|s_buffer_load",
    "shared": r"ds_",
    "exp": r"v_exp",
    "vector": r"v_",
    "barrier": r"s_barrier",
    "wait": r"s_wait",
    "scalar": r"s_",
}
_PTX_KINDS = {
    "matrix": r"wgmma\.mma_async|mma\.sync",
    "global load": r"ld\.global|cp\.async\.c",
    "shared": r"ld\.shared|st\.shared|ldmatrix|stmatrix",
    "exp": r"ex2",
    "barrier": r"bar\.",
    "other": r"",
}


# Patterns of labels and of branches back to them.
_AMD_LOOPS = r"^(\.\w+):", r"s_c?branch\w*\s+(\S+)"
_PTX_LOOPS = r"^(\$\w+):", r"\bbra(?:\.uni)?\s+(\$\w+)"


class Code(NamedTuple):
    """Properties of one kernel's code on one target."""

    registers: int  # per lane; on AMD including accumulation registers
    # Vector registers that do not fit, and bytes of private memory; on NVIDIA 0 if no
    # loop accesses them.
    spills: int
    scalar_spills: int  # AMD: scalars kept in lanes of vector registers, without memory
    shared_bytes: int
    matrix: int  # matrix instructions in total
    step: dict[str, int]  # instructions of the longest loop by kind
    round_trips: float | None  # memory waits per trip of it, by the model (AMD)


@functools.cache  # calls of several shapes share a join kernel
def compile_kernel(kernel, target):
    """Compile a `kernel_lowering.Kernel` for a target such as gfx942 or sm_90."""
    stages, shared = _run_backend(kernel, target)
    if "amdgcn" in stages:
        assembly = stages["amdgcn"]
        loop = find_loop(assembly, *_AMD_LOOPS, _AMD_KINDS)
        return Code(
            registers=_number(r"\.vgpr_count:\s+(\d+)", assembly),
            spills=_number(r"\.vgpr_spill_count:\s+(\d+)", assembly)
            + _number(r"\.private_segment_fixed_size:\s+(\d+)", assembly),
            scalar_spills=_number(r"\.sgpr_spill_count:\s+(\d+)", assembly),
            shared_bytes=shared,
            matrix=len(re.findall(r"^\s+v_(?:mfma|wmma)", assembly, re.M)),
            step=_count(loop, _AMD_KINDS),
            round_trips=count_round_trips(loop),
        )
    ptx = stages["ptx"]
    usage = _read_cubin(stages["cubin"], "-res-usage")
    spills = _number(r"LOCAL:(\d+)", usage) + _number(r"STACK:(\d+)", usage)
    if spills and not _has_spilling_loop(_read_cubin(stages["cubin"], "-sass")):
        spills = 0
    return Code(
        registers=_number(r"REG:(\d+)", usage),
        spills=spills,
        scalar_spills=0,
        shared_bytes=shared,
        matrix=len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
        step=_count(find_loop(ptx, *_PTX_LOOPS, _PTX_KINDS), _PTX_KINDS),
        round_trips=None,
    )


def assembly_of(kernel, target):
    """Return a kernel's AMD assembly or NVIDIA PTX."""
    stages, _ = _run_backend(kernel, target)
    return stages.get("amdgcn") or stages["ptx"]


def attention_loop(kernel, target):
    """Return the lines of a kernel's attention loop on an AMD GPU."""
    stages, _ = _run_backend(kernel, target)
    return find_loop(stages["amdgcn"], *_AMD_LOOPS, _AMD_KINDS)


@functools.lru_cache(maxsize=1)
def _run_backend(kernel, target):
    """Return the text or bytes of each stage, and the shared memory in bytes."""
    if target.startswith("sm_"):
        gpu = GPUTarget("cuda", int(target[3:]), 32)
    else:
        gpu = GPUTarget("hip", target, 32 if target.startswith("gfx1") else 64)
    backend = make_backend(gpu)
    options = backend.parse_options(
        {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(kernel.text)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    passes: dict = {}
    backend.add_stages(passes, options, Language.TRITON)
    metadata = {"target": gpu, **options.__dict__}
    stages = {}
    for name, run in passes.items():
        module = run(module, metadata)
        stages[name] = module if isinstance(module, str | bytes) else str(module)
    return stages, metadata["shared"]


def _number(pattern, text):
    match = re.search(pattern, text)
    return int(match.group(1)) if match else 0


def find_loop(assembly, label_pattern, branch_pattern, kinds):
    """Return the lines of the attention loop.

    A loop extends from a label to a branch back to it. Of the loops with the most
    matrix instructions (without any: exponentials) outside nested loops, take the
    shortest.
    """
    lines = assembly.splitlines()
    labels, loops = {}, []
    for number, line in enumerate(lines):
        if label := re.match(label_pattern, line):
            labels[label.group(1)] = number
        elif branch := re.search(branch_pattern, line):
            start = labels.get(branch.group(1).rstrip(";"))
            if start is not None:
                loops.append((start, number))

    def find_own(start, end):
        """Return the lines of a loop without its nested loops."""
        inner = [loop for loop in loops if start < loop[0] and loop[1] < end]
        return [
            line
            for number, line in enumerate(lines[start:end], start)
            if not any(first <= number < last for first, last in inner)
        ]

    def rank(loop):
        counts = _count(find_own(*loop), kinds)
        return counts["matrix"], counts["exp"], -sum(counts.values())

    start, end = max(loops, key=rank, default=(0, 0))
    return lines[start:end]


def _count(lines, kinds):
    counts = dict.fromkeys(kinds, 0)
    for line in lines:
        instruction = re.match(r"\s+(?:@!?%\w+\s+)?([a-z][\w.]*)(?:\s|$)", line)
        if instruction is None:
            continue
        for kind, pattern in kinds.items():
            if re.match(pattern, instruction.group(1)):
                counts[kind] += 1
                break
    return counts


def _has_spilling_loop(sass):
    """Return whether a loop of NVIDIA machine code loads or stores local memory."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)
    code = [(int(address, 16), instruction) for address, instruction in found]
    loops = [
        (int(target.group(1), 16), address)
        for address, instruction in code
        if (target := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction))
    ]
    return any(
        first <= address <= last and re.search(r"\b(?:LDL|STL)\b", instruction)
        for first, last in loops
        for address, instruction in code
    )


def _read_cubin(cubin, option):
    """Return the output of `cuobjdump` for a binary."""
    tool = os.path.join(
        os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump"
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True).stdout
