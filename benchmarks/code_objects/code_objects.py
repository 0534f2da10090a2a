"""Launch precompiled kernels in XLA programs for AMD GPUs, without Triton in JAX.

A fallback if XLA stops compiling Triton: kernels are compiled ahead of time, and XLA's
typed FFI launches them by `launch.cc`. It has not run on a GPU: `hip_stand_in.cc`
replaces HIP, and `tests/attention/kernel/test_kernel_code_objects.py` checks its calls.

    python benchmarks/code_objects/code_objects.py        # builds both libraries
"""

import ctypes
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

HERE = pathlib.Path(__file__).parent
TARGET = "jkv_code_object"
# Trailing kernel arguments for Triton's scratch memory: two in Triton 3.9.
NUM_UNUSED = 2


class CodeObject(NamedTuple):
    """A kernel compiled for a GPU."""

    name: str
    code: bytes  # an ELF file, as Triton's `hsaco`
    threads: int  # per program: warps times lanes, 64 on CDNA and 32 on RDNA
    shared_bytes: int


def build(folder: pathlib.Path) -> None:
    """Compile both libraries with g++; XLA's headers come with jaxlib."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in ("launch", "hip_stand_in"):
        command: list[str | pathlib.Path] = [
            "g++",
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-shared",
            "-Wall",
        ]
        command += ["-isystem", jax.ffi.include_dir(), HERE / f"{source}.cc"]
        subprocess.run([*command, "-o", folder / f"{source}.so", "-ldl"], check=True)


def register(folder: pathlib.Path, platform: str) -> None:
    """Register the kernel launcher for a platform: ROCM, or cpu with the stand-in."""
    library = ctypes.CDLL(str(folder / "launch.so"))
    launch = library.JkvLaunchHere if platform == "cpu" else library.JkvLaunch
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(launch), platform)


def call(
    kernel: CodeObject,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, int],
    aliases: dict[int, int],
) -> Any:
    """Return a kernel's results; `aliases` maps operands to results."""
    bound = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)
    return bound(
        *operands,
        name=kernel.name,
        code=np.frombuffer(kernel.code, np.uint8),
        grid=np.array([*grid, 1], np.int32),
        threads=np.int32(kernel.threads),
        shared_bytes=np.int32(kernel.shared_bytes),
        num_unused=np.int32(NUM_UNUSED),
    )


if __name__ == "__main__":
    build(HERE.parent / "out" / "code_objects")
