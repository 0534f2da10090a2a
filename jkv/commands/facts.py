"""Installed versions and devices of this machine, and their known faults."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import jax

import jkv

PACKAGES = ("jax", "jaxlib", "numpy", "chex", "triton")

PLUGIN_PREFIXES = ("jax-rocm", "jax-cuda", "jax_rocm", "jax_cuda", "libtpu")

ENVIRONMENT = ("JKV_", "JAX_", "XLA_", "HIP_", "ROCR_", "HSA_", "CUDA_VISIBLE")

# Commands for driver versions, run if installed.
DRIVER_COMMANDS = (
    ("rocm-smi", "--showdriverversion", "--showproductname"),
    ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
)

DRIVER_FILES = ("/sys/module/amdgpu/version", "/opt/rocm/.info/version")


def collect_facts() -> dict[str, Any]:
    """Return devices, versions, drivers and settings."""
    device = jax.devices()[0]
    installed = {
        str(each.metadata["Name"]): each.version
        for each in importlib.metadata.distributions()
    }
    wanted = [n for n in installed if n in PACKAGES or n.startswith(PLUGIN_PREFIXES)]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {
            "jkv": jkv.__version__,
            **{name: installed[name] for name in sorted(wanted)},
        },
        "platform": device.platform,
        "platform version": device.client.platform_version,
        "devices": [f"{d.id}: {d.device_kind}" for d in jax.devices()],
        "compute capability": str(getattr(device, "compute_capability", "")),
        "memory": {
            name: value
            for name, value in (device.memory_stats() or {}).items()
            if name in ("bytes_limit", "bytes_in_use")
        },
        "drivers": read_driver_versions(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT)
        },
    }


def read_driver_versions() -> dict[str, str]:
    """Return the versions of GPU drivers."""
    found = {}
    for name in DRIVER_FILES:
        if pathlib.Path(name).exists():
            found[name] = pathlib.Path(name).read_text().strip()
    for program, *flags in DRIVER_COMMANDS:
        if shutil.which(program):
            done = subprocess.run(
                [program, *flags], capture_output=True, text=True, timeout=60
            )
            found[program] = " | ".join(done.stdout.split("\n")).strip(" |")
    return found


def list_known_faults(facts: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each known fault of these versions and settings."""
    versions, environment = facts["versions"], facts["environment"]
    if _read_release(jax.__version__) < (0, 10, 2):
        yield f"JAX {jax.__version__} is older than 0.10.2, the oldest tested version"
    for name, version in versions.items():
        if name.startswith(PLUGIN_PREFIXES[:4]) and (
            version.split(".")[:2] != versions["jaxlib"].split(".")[:2]
        ):
            yield (
                f"{name} {version} is not of the same release as jaxlib "
                f"{versions['jaxlib']}; install both by an extra of jkv's "
                f"(rocm7, rocm10 or cuda)"
            )
    found = (re.fullmatch(r"jax[-_]rocm(\d+)[-_]plugin", name) for name in versions)
    majors = sorted(int(each[1]) for each in found if each)
    if majors and majors[-1] > 7 and _read_release(versions["jaxlib"]) < (0, 11, 1):
        yield (
            f"jaxlib {versions['jaxlib']} looks for jax-rocm7-plugin, not for "
            f"jax-rocm{majors[-1]}-plugin: No FFI handler is registered (jax 39634); "
            f"install the extra rocm7, or jaxlib 0.11.1 or newer"
        )
    if len(majors) > 1:
        yield "plugins of two ROCm versions are installed; keep the installed ROCm's"
    if "HSA_OVERRIDE_GFX_VERSION" in environment:
        yield (
            "HSA_OVERRIDE_GFX_VERSION overrides the GPU's architecture: kernels are "
            "compiled for another one's registers and matrix instructions"
        )
    if environment.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        yield "XLA_PYTHON_CLIENT_ALLOCATOR=platform allocates memory in every call"
    on_gpu = facts["platform"] in ("gpu", "cuda", "rocm")
    if facts["drivers"] and not on_gpu:
        yield (
            f"there is a GPU driver, but JAX runs on {facts['platform']}: its plugin "
            f"is not installed (the extras rocm and cuda), or JAX_PLATFORMS hides it"
        )


def _read_release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
