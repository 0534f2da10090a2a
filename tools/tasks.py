"""What `make test` runs: suites of tests, checks beside them, and their flags.

A suite is one process, whose tests share compiled programs.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from environments import LAYERS, ROOT, python_of

VARIABLES = {
    # What was compiled once is not compiled again: not by another suite, and not by the
    # next run in this checkout.
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax-cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # So with bytecode, also where the shell forbids to write it: dozens of processes
    # import the same modules.
    "PYTHONDONTWRITEBYTECODE": "",
}
# Each suite says where its time went.
DEAREST = ("--durations=5", "--durations-min=2")
# In CI, no test of the suites that have transformers may be left out for want of it.
REQUIRE_PARITY = {"JKV_REQUIRE_PARITY": "1"}
# Half of the time of the tests is compiling, and was more with LLVM's optimisations and
# with modules cut in pieces for other cores. What decides about copies and fusion is
# done before LLVM, and stays as it is.
ALL_PASSES = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
# These passes only make programs faster, and take a tenth to a fifth of what is left. A
# test that looks at a program of XLA asks for all (`support.compiled_hlo.ALL_PASSES`).
LEFT_OUT = (
    "while-loop-invariant-code-motion,simplify-while-loops,"
    "while-loop-trip-count-annotator,while-loop-constant-sinking,constant_folding,"
    "reshape-mover,simplify-sorts,simplify-conditional,tree_reduction_rewriter"
)
QUICK = f"{ALL_PASSES} --xla_disable_hlo_passes={LEFT_OUT}"
# Half of the rest is MLIR. The oldest JAX can still do without, the newest cannot.
WITHOUT_MLIR = f"{QUICK} --xla_cpu_use_fusion_emitters=false"

OLDEST, NEWEST = ("oldest", "parity"), ("newest",)
# A claim at more values than every run needs (`tests/support/jax_versions.py`).
ALONE = {"JKV_FURTHER": "1"}
# These look at the programs that XLA makes, or at the bits of small floats: with MLIR.
OF_PROGRAMS = (
    "tests/attention/kernel/test_kernel_rounding.py",
    "tests/metadata/test_stages.py",
    "tests/storage/test_quantization.py",
    "tests/verbs/test_in_place.py",
    "tests/verbs/test_states_in_place.py",
)
# These import torch, which takes seconds: in the suite that does so anyway.
OF_TRANSFORMERS = (
    "tests/config/test_layer_heads.py",
    "tests/config/test_text_part.py",
    "tests/decoding/test_filters_parity.py",
)
# Minutes of compiling kernels, for cards that are not there: a suite of its own.
MACHINE_CODE = "tests/attention/kernel/test_kernel_machine_code.py"
# Likewise of lowering them, twice each.
EVERY_MODULE = "tests/attention/kernel/test_kernel_every_module.py"
# This needs g++.
CODE_OBJECTS = "tests/attention/kernel/test_kernel_code_objects.py"
OF_KERNELS = MACHINE_CODE, EVERY_MODULE, CODE_OBJECTS
# The standard's own tests of JSON schemas, random ones, and those of pydantic.
SCHEMAS = "tests/schemas"
# Folders with a suite of their own; what is in none of them is `oldest-rest`.
FOLDERS = ("verbs", "examples", "decoding", "attention", "serving", "storage")


class Task(NamedTuple):
    """A process: a tool of an environment, or a suite of tests."""

    layers: tuple[str, ...]  # of `environments.LAYERS`: what it needs
    tool: str
    arguments: tuple[str, ...]
    flags: str = ""  # of XLA
    variables: Mapping[str, str] = {}  # of its process environment, beside `VARIABLES`

    @property
    def folder(self) -> str:
        """Its environment."""
        return LAYERS[self.layers[0]].folder

    @property
    def command(self) -> list[str | pathlib.Path]:
        """What is run, in the root of the checkout."""
        python = python_of(self.folder)
        if self.tool == "pytest":
            return [python, "-m", "pytest", *DEAREST, *self.arguments]
        return [python.with_name(self.tool), *self.arguments]

    @property
    def all_variables(self) -> dict[str, str]:
        """What it finds in its process environment, beside what is there."""
        flags = f"{self.flags} {os.environ.get('XLA_FLAGS', '')}".strip()
        must = "parity" in self.layers and os.environ.get("CI")
        parity = REQUIRE_PARITY if must else {}
        return {**VARIABLES, **parity, "XLA_FLAGS": flags, **self.variables}


def tests(layers: tuple[str, ...], *arguments: str, flags: str = ALL_PASSES) -> Task:
    """A suite of tests; its arguments are pytest's."""
    return Task(layers, "pytest", arguments, flags)


def but(*paths: str) -> tuple[str, ...]:
    """Arguments of pytest that leave out files or folders."""
    return tuple(f"--ignore={path}" for path in paths)


def of_folder(name: str, *files: str) -> Task:
    """The suite of a folder of tests, and of files of others."""
    elsewhere = {*OF_PROGRAMS, *OF_TRANSFORMERS, *OF_KERNELS} - {*files}
    paths = (f"tests/{name}", *files, *but(*sorted(elsewhere)))
    return tests(OLDEST, *paths, flags=WITHOUT_MLIR)


# The dearest first, so that no core waits long at the end.
SUITES = {
    # Its environment is there first.
    "newest-tests": tests(
        NEWEST, "tests", "README.md", *but(*OF_KERNELS, SCHEMAS), flags=QUICK
    ),
    "machine-code": tests((*OLDEST, "machine-code"), MACHINE_CODE),
    "modules": tests(OLDEST, EVERY_MODULE, CODE_OBJECTS),
    "newest-modules": tests(NEWEST, EVERY_MODULE, CODE_OBJECTS),
    "oldest-examples": of_folder("examples", *OF_TRANSFORMERS),
    "oldest-rest": tests(
        OLDEST,
        *but(*OF_PROGRAMS, *OF_TRANSFORMERS, SCHEMAS),
        *but(*(f"tests/{folder}" for folder in FOLDERS)),
        flags=WITHOUT_MLIR,
    ),
    "oldest-decoding": of_folder("decoding"),
    "oldest-verbs": of_folder("verbs"),
    # `devices` has eight simulated ones, which a process has from its start or never.
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
    # A cluster of Ray, in which pydantic warns of what Ray does.
    "ray": tests(
        ("ray",),
        "tests/replicated",
        "examples/replicated",
        *("-W", "ignore::DeprecationWarning"),
        flags=WITHOUT_MLIR,
    ),
    # lm-eval asks the server.
    "harness": tests(("harness",), "tests/harness", flags=WITHOUT_MLIR),
    # Two published models, 350 MB, as GGUF files.
    "real-models": tests(OLDEST, "tests/models"),
    "schemas": tests((*OLDEST, "schemas"), SCHEMAS),
    "further": tests(
        OLDEST, *but(*OF_PROGRAMS, *OF_KERNELS, SCHEMAS), flags=WITHOUT_MLIR
    )._replace(variables=ALONE),
    "further-programs": tests(OLDEST, *OF_PROGRAMS, flags=QUICK)._replace(
        variables=ALONE
    ),
    "further-devices": tests(OLDEST, "tests/devices", flags=WITHOUT_MLIR)._replace(
        variables=ALONE
    ),
}
# Too heavy to be a part of every run.
FURTHER = ("further", "further-programs", "further-devices")
EXTRAS = (
    "machine-code",
    "modules",
    "newest-modules",
    "tunix",
    "ray",
    "harness",
    "real-models",
    "schemas",
    *FURTHER,
)

CHECKS = {
    # Strict: a link that leads nowhere, or a name without documentation, is an error.
    "docs": Task(("docs",), "zensical", ("build", "--strict", "--clean")),
    "types": Task(("oldest",), "mypy", ()),
    "lint": Task(("oldest",), "ruff", ("check", ".")),
    "format": Task(("oldest",), "ruff", ("format", "--check", ".")),
}


def choose_tests(end: str, arguments: list[str], all_cases: bool) -> Task:
    """The tests that pytest's arguments name, with the oldest or the newest JAX.

    All cases of them, or those that `make test` runs with that JAX.
    """
    task = tests(NEWEST if end == "newest" else OLDEST, *arguments)
    return task._replace(variables={"JKV_ALL_CASES": "1"} if all_cases else {})


def choose_everything(end: str | None, extras: list[str]) -> dict[str, Task]:
    """All suites and checks, or the suites of one end of the range of JAX."""
    left_out = {*EXTRAS} - {*extras}
    chosen = {**SUITES, **({} if end else CHECKS)}
    return {
        name: task
        for name, task in chosen.items()
        if name not in left_out
        and (end is None or name in extras or name.startswith(end))
    }
