"""Tests and checks of `make test`, and their flags.

A suite is one process, so that its tests share compiled programs.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from environments import LAYERS, ROOT, python_of

VARIABLES = {
    # Compiled programs are shared between suites, and with the next run in this
    # checkout.
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax-cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # Also for bytecode, even if the shell disables it: dozens of processes import the
    # same modules.
    "PYTHONDONTWRITEBYTECODE": "",
}
# Each suite reports its slowest tests.
DEAREST = ("--durations=5", "--durations-min=2")
# In CI, suites with transformers must not skip tests that need it.
REQUIRE_PARITY = {"JKV_REQUIRE_PARITY": "1"}
# Compilation is half of the tests' time, and more with LLVM's optimizations and modules
# split over cores. Copies and fusion are decided before LLVM, and do not change.
ALL_PASSES = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
# These passes only speed up programs, and take 10 to 20% of the remaining time. Tests
# of XLA programs enable all passes (`support.compiled_hlo.ALL_PASSES`).
LEFT_OUT = (
    "while-loop-invariant-code-motion,simplify-while-loops,"
    "while-loop-trip-count-annotator,while-loop-constant-sinking,constant_folding,"
    "reshape-mover,simplify-sorts,simplify-conditional,tree_reduction_rewriter"
)
QUICK = f"{ALL_PASSES} --xla_disable_hlo_passes={LEFT_OUT}"
# Half of the remaining time is MLIR. The oldest JAX can disable it, the newest cannot.
WITHOUT_MLIR = f"{QUICK} --xla_cpu_use_fusion_emitters=false"

OLDEST, NEWEST = ("oldest", "parity"), ("newest",)
# Further tests only (`tests/support/jax_versions.py`).
ALONE = {"JKV_FURTHER": "1"}
# Tests of XLA's programs, or of the bits of small floats: with MLIR.
OF_PROGRAMS = (
    "tests/attention/kernel/test_kernel_rounding.py",
    "tests/metadata/test_stages.py",
    "tests/storage/test_quantization.py",
    "tests/verbs/test_in_place.py",
    "tests/verbs/test_states_in_place.py",
)
# These import torch, which takes seconds, so they join a suite that imports it anyway.
OF_TRANSFORMERS = (
    "tests/config/test_layer_heads.py",
    "tests/config/test_text_part.py",
    "tests/decoding/test_filters_parity.py",
)
# Minutes of kernel compilation without the GPUs: a suite of its own.
MACHINE_CODE = "tests/attention/kernel/test_kernel_machine_code.py"
# Likewise for lowering them, twice each.
EVERY_MODULE = "tests/attention/kernel/test_kernel_every_module.py"
# Requires g++.
CODE_OBJECTS = "tests/attention/kernel/test_kernel_code_objects.py"
OF_KERNELS = MACHINE_CODE, EVERY_MODULE, CODE_OBJECTS
# The JSON Schema test suite, random schemas, and pydantic's.
SCHEMAS = "tests/schemas"
# Folders with a suite of their own; all others are in `oldest-rest`.
FOLDERS = ("verbs", "examples", "decoding", "attention", "serving", "storage")


class Task(NamedTuple):
    """A process: a tool of an environment, or a suite of tests."""

    layers: tuple[str, ...]  # required `environments.LAYERS`
    tool: str
    arguments: tuple[str, ...]
    flags: str = ""  # for XLA
    variables: Mapping[str, str] = {}  # environment variables, added to `VARIABLES`
    waits: bool = False  # True if it mostly sleeps

    @property
    def folder(self) -> str:
        """Environment folder."""
        return LAYERS[self.layers[0]].folder

    @property
    def command(self) -> list[str | pathlib.Path]:
        """Command line, run in the root of the checkout."""
        python = python_of(self.folder)
        if self.tool == "pytest":
            return [python, "-m", "pytest", *DEAREST, *self.arguments]
        return [python.with_name(self.tool), *self.arguments]

    @property
    def all_variables(self) -> dict[str, str]:
        """Environment variables, added to the inherited ones."""
        flags = f"{self.flags} {os.environ.get('XLA_FLAGS', '')}".strip()
        must = "parity" in self.layers and os.environ.get("CI")
        parity = REQUIRE_PARITY if must else {}
        return {**VARIABLES, **parity, "XLA_FLAGS": flags, **self.variables}


def tests(layers: tuple[str, ...], *arguments: str, flags: str = ALL_PASSES) -> Task:
    """Return a suite of tests, given by pytest's arguments."""
    return Task(layers, "pytest", arguments, flags)


def but(*paths: str) -> tuple[str, ...]:
    """Return pytest arguments that exclude files or folders."""
    return tuple(f"--ignore={path}" for path in paths)


def of_folder(name: str, *files: str) -> Task:
    """Return the suite of a test folder, with some files of other folders."""
    elsewhere = {*OF_PROGRAMS, *OF_TRANSFORMERS, *OF_KERNELS} - {*files}
    paths = (f"tests/{name}", *files, *but(*sorted(elsewhere)))
    return tests(OLDEST, *paths, flags=WITHOUT_MLIR)


# Longest first, so that no core idles at the end.
SUITES = {
    # First, since its environment is available first.
    "newest-tests": tests(
        NEWEST, "tests", "README.md", *but(*OF_KERNELS, SCHEMAS), flags=QUICK
    ),
    "further": tests(
        OLDEST,
        *but(*OF_PROGRAMS, *OF_KERNELS, SCHEMAS, "tests/verbs"),
        flags=WITHOUT_MLIR,
    )._replace(variables=ALONE),
    "newest-further": tests(
        NEWEST, "tests", *but(*OF_KERNELS, SCHEMAS), flags=QUICK
    )._replace(variables=ALONE),
    "machine-code": tests((*OLDEST, "machine-code"), MACHINE_CODE),
    "modules": tests(OLDEST, EVERY_MODULE, CODE_OBJECTS),
    "newest-modules": tests(NEWEST, EVERY_MODULE, CODE_OBJECTS),
    "further-verbs": of_folder("verbs")._replace(variables=ALONE),
    "further-devices": tests(OLDEST, "tests/devices", flags=WITHOUT_MLIR)._replace(
        variables=ALONE
    ),
    # Two published models, 350 MB, as GGUF files.
    "real-models": tests(OLDEST, "tests/models"),
    "oldest-examples": of_folder("examples", *OF_TRANSFORMERS),
    "oldest-rest": tests(
        OLDEST,
        *but(*OF_PROGRAMS, *OF_TRANSFORMERS, SCHEMAS),
        *but(*(f"tests/{folder}" for folder in FOLDERS)),
        flags=WITHOUT_MLIR,
    ),
    "oldest-decoding": of_folder("decoding"),
    "oldest-verbs": of_folder("verbs"),
    # `devices` simulates eight, which has to be configured at process start.
    "oldest-devices": tests(OLDEST, "tests/devices", flags=WITHOUT_MLIR),
    "oldest-serving": of_folder("serving"),
    "oldest-attention": of_folder("attention"),
    "oldest-programs": tests(OLDEST, *OF_PROGRAMS, flags=QUICK),
    "newest-devices": tests(NEWEST, "tests/devices", flags=QUICK),
    "oldest-storage": of_folder("storage"),
    "tunix": tests(
        ("tunix",),
        "tests/integrations",
        "jkv/integrations/tunix",
        flags=WITHOUT_MLIR,
    ),
    # Adapters of `examples/under` with the real packages: one to three minutes each.
    "under-keras-hub": tests(("under-keras-hub",), "tests/under"),
    "under-gemma": tests(("under-gemma",), "tests/under"),
    "under-lalamo": tests(("under-lalamo",), "tests/under"),
    "under-easydel": tests(("under-easydel",), "tests/under"),
    "under-tunix": tests(("tunix",), "tests/under"),
    # A Ray cluster; pydantic warns about Ray's code.
    "ray": tests(
        ("ray",),
        "tests/replicated",
        "examples/replicated",
        *("-W", "ignore::DeprecationWarning"),
        flags=WITHOUT_MLIR,
    )._replace(waits=True),
    # lm-eval as a client of the server.
    "harness": tests(("harness",), "tests/harness", flags=WITHOUT_MLIR),
    "schemas": tests((*OLDEST, "schemas"), SCHEMAS),
    "further-programs": tests(OLDEST, *OF_PROGRAMS, flags=QUICK)._replace(
        variables=ALONE
    ),
}
# Too slow for every run.
FURTHER = (
    *("further", "further-verbs", "further-programs", "further-devices"),
    "newest-further",
)
EXTRAS = (
    "newest-devices",
    "machine-code",
    "modules",
    "newest-modules",
    "tunix",
    "under-keras-hub",
    "under-gemma",
    "under-lalamo",
    "under-easydel",
    "under-tunix",
    "ray",
    "harness",
    "real-models",
    "schemas",
    *FURTHER,
)

# Folders and files in plain English, measured by `prose.py`.
PROSE = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs",
    "jkv",
    "examples",
    "tests",
    "benchmarks",
    "tools",
)

CHECKS = {
    # Strict: broken links and undocumented names are errors.
    "docs": Task(("docs",), "zensical", ("build", "--strict", "--clean")),
    "types": Task(("oldest",), "mypy", ()),
    "lint": Task(("oldest",), "ruff", ("check", ".")),
    "format": Task(("oldest",), "ruff", ("format", "--check", ".")),
    "prose": Task(("oldest",), "python", ("tools/prose.py", "--most", "4", *PROSE)),
}


def choose_tests(end: str, arguments: list[str], all_cases: bool) -> Task:
    """Return the tests of pytest's arguments, with the oldest or newest JAX.

    Run all their cases, or the ones that `make test` runs with that JAX.
    """
    task = tests(NEWEST if end == "newest" else OLDEST, *arguments)
    return task._replace(variables={"JKV_ALL_CASES": "1"} if all_cases else {})


def choose_everything(end: str | None, extras: list[str]) -> dict[str, Task]:
    """Return all suites and checks, or the suites of one JAX version."""
    left_out = {*EXTRAS} - {*extras}
    chosen = {**SUITES, **({} if end else CHECKS)}
    return {
        name: task
        for name, task in chosen.items()
        if name not in left_out
        and (end is None or name in extras or name.startswith(end))
    }
