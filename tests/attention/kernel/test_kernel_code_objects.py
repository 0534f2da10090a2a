"""Kernels as machine code behind XLA's typed FFI, with a stand-in for HIP.

Requires g++, so this is a separate suite.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.paths import ROOT

FOLDER = ROOT / "benchmarks" / "code_objects"
sys.path.insert(0, str(FOLDER))

import code_objects  # noqa: E402

KERNEL = code_objects.CodeObject("jkv_store", b"\x7fELF for gfx942", 256, 1024)
COPY = jax.ShapeDtypeStruct((3,), jnp.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both libraries, with the handler registered as a CPU target."""
    folder = tmp_path_factory.mktemp("code_objects")
    code_objects.build(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JKV_HIP_LIBRARY", str(folder / "hip_stand_in.so"))
        patch.setenv("JKV_HIP_LOG", str(folder / "log"))
        code_objects.register(folder, "cpu")
        yield folder


def run(kernel, *operands, results=(COPY,), grid=(7, 2), aliases=None):
    def step(*operands):
        return code_objects.call(kernel, operands, results, grid, aliases or {})

    return jax.jit(step)(*operands)


seen = []


def read_new(folder):
    """Return the stand-in's log lines since the last call."""
    lines = (folder / "log").read_text().splitlines()
    new, seen[:] = lines[len(seen) :], lines
    return new


def test_buffers_are_passed_in_order(folder):
    """The stand-in sums all buffers but the last, and stores the sum there."""
    numbers = [np.int32([n, 0, 0]) for n in (5, 70, 900)]
    (found,) = run(KERNEL, *numbers)
    assert found[0] == 975
    assert read_new(folder) == [
        "load ELF ",
        "find jkv_store in ELF for gfx942",
        "launch jkv_store 7 2 1 by 256 with 1024",
    ]
    # The last of two results; the first aliases the second operand.
    results = (
        jax.ShapeDtypeStruct((3,), jnp.int32),
        jax.ShapeDtypeStruct((2, 2), "int32"),
    )
    kept, found = run(KERNEL, *numbers, results=results, aliases={1: 0}, grid=(9, 1))
    np.testing.assert_array_equal(kept, numbers[1])
    assert found[0, 0] == 975 + 70
    # The code object is loaded once.
    assert read_new(folder) == ["launch jkv_store 9 1 1 by 256 with 1024"]


def test_another_code_object_is_loaded(folder):
    run(KERNEL, np.int32([1, 2, 3]))
    read_new(folder)
    run(KERNEL._replace(code=b"\x7fELF for gfx90a"), np.int32([1, 2, 3]))
    run(KERNEL._replace(name="jkv_join", threads=64), np.int32([1, 2, 3]))
    assert read_new(folder) == [
        "load ELF ",
        "find jkv_store in ELF for gfx90a",
        "launch jkv_store 7 2 1 by 256 with 1024",
        "load ELF ",
        "find jkv_join in ELF for gfx942",
        "launch jkv_join 7 2 1 by 64 with 1024",
    ]


def test_an_invalid_code_object_raises(folder):
    for _ in range(2):  # nothing is cached
        with pytest.raises(Exception, match="jkv_store: no binary for this card"):
            run(KERNEL._replace(code=b"no ELF at all"), np.int32([1, 2, 3]))
        assert read_new(folder) == ["load o EL"]


def test_missing_hip_is_reported(folder):
    program = f"""
import pathlib, sys
sys.path.insert(0, {str(FOLDER)!r})
import code_objects, jax, jax.numpy as jnp
code_objects.register(pathlib.Path({str(folder)!r}), "cpu")
kernel = code_objects.CodeObject("jkv_store", b"ELF", 64, 0)
code_objects.call(kernel, [], [jax.ShapeDtypeStruct((3,), jnp.int32)], (1, 1), {{}})
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"JKV_HIP_LIBRARY": "libnone.so", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode != 0 and "there is no HIP: hip" in ran.stderr
