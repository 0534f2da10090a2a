#!/usr/bin/env python3
"""Implementation of `make`: environments, tests, checks, benchmarks.

    python3 tools/run.py test                       # lint, types, pages and all tests
    python3 tools/run.py test --jax newest tests/verbs/test_prefixes.py -k fork
    python3 tools/run.py test --suites oldest-verbs # one process of `make test`

The environment of a command is installed first, once. `environments.py` lists the
packages, `tasks.py` the tests and their flags.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from environments import (
    LAYERS,
    NEWER_PYTHONS,
    ROOT,
    find_newer_python,
    is_there,
    python_of,
)
from models import MODELS, fetch
from parallel import Job, run_jobs, show_table
from tasks import CHECKS, EXTRAS, SUITES, Task, choose_everything, choose_tests

# All benchmarks except `rollouts`, which takes most of an hour.
BENCHMARKS = (
    *("operations", "attention", "generate", "reuse", "accuracy", "compile"),
    *("exact", "experts", "scheduling", "scoring", "search", "states", "strategies"),
    *("trees", "windows", "plots"),
)
WRITTEN = (
    *(".venv", ".venv-newest", ".venv-tunix", ".venv-ray"),
    *(".jax-cache", ".cache", "site", "build", "dist"),
    *(".pytest_cache", ".ruff_cache", ".mypy_cache"),
)
NO_NEWEST = (
    f"NEWEST JAX NOT TESTED: no Python {', '.join(NEWER_PYTHONS)} found beside "
    f"{sys.executable}"
)
TAKE_ARGUMENTS = ("generate", "test", "machine-code", "tunix", "rollouts", "peers")
QUESTION = "Why is the sky blue?"
NO_TESTS = 5  # pytest's exit status without tests


def main() -> int:
    """Run a command and return its exit status."""
    options, arguments = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_command(options, arguments)
    except KeyboardInterrupt:
        print("interrupted: all processes were ended")
        return 130


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and further arguments for pytest or a benchmark."""
    parser = argparse.ArgumentParser(prog="tools/run.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    test = commands.add_parser(
        "test",
        help="all tests and checks, or the tests selected by pytest arguments",
        allow_abbrev=False,
    )
    test.add_argument("--jax", choices=("oldest", "newest"), help="only this one")
    test.add_argument("--suites", default="", help="only these, such as oldest-verbs")
    test.add_argument("--extras", default="", help=f"also: {' '.join(EXTRAS)}")
    test.add_argument("--jobs", type=int, default=2, help="concurrent processes")
    for name, what in {
        "generate": "continue a prompt with the bundled model or a published one",
        "lint": "ruff: rules and format; words of the prose",
        "types": "mypy",
        "docs": "the documentation, in site/",
        "machine-code": "the kernels' machine code, without the GPUs",
        "code-objects": "the launcher of machine code by XLA's typed FFI, with g++",
        "wheel": "wheels and sdists of jkv and its examples, checked, in dist/",
        "tunix": "rollouts in google-tunix's trainer",
        "bench": "all benchmarks but rollouts",
        "rollouts": "queues of requests, compared to peers: most of an hour",
        "peers": "comparison with other projects in a table; --kept: stored results",
        "clean": "remove the output of all commands",
    }.items():
        commands.add_parser(name, help=what, allow_abbrev=False)
    options, arguments = parser.parse_known_args()
    if arguments and options.command not in TAKE_ARGUMENTS:
        parser.error(f"{options.command} takes no arguments, got {arguments}")
    if options.command == "test":
        for name in [*options.suites.split(), *options.extras.split()]:
            if name not in SUITES | CHECKS:
                known = ", ".join([*SUITES, *CHECKS])
                parser.error(f"suite must be one of {known}, got {name}")
    return options, [argument for argument in arguments if argument != "--"]


def run_command(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run the selected command and return its exit status."""
    match options.command:
        case "test":
            return run_tests(options, arguments)
        case "lint":
            return run_tasks(
                {name: CHECKS[name] for name in ("lint", "format", "prose")}
            )
        case "types" | "docs" as name:
            return run_tasks({name: CHECKS[name]})
        case "machine-code" | "tunix" as name:
            suite = SUITES[name]
            chosen = tuple(arguments) or suite.arguments
            return run_tasks({name: suite._replace(arguments=chosen)})
        case "code-objects":
            build = ["benchmarks/code_objects/code_objects.py"]
            return run_scripts(("oldest",), [build])
        case "wheel":
            return build_distributions()
        case "generate":
            return run_scripts(("examples",), [make_generate(arguments)])
        case "bench":
            scripts = [[f"benchmarks/{name}.py"] for name in BENCHMARKS]
            return run_scripts(("oldest", "parity"), scripts)
        case "rollouts":
            # Peers are transformers and google-tunix, each in a process of its own.
            layers = ("oldest", "parity", "rollouts", "tunix")
            return run_scripts(layers, [["benchmarks/rollouts.py", *arguments]])
        case "peers":
            table = ["benchmarks/peer_table.py"]
            if arguments == ["--kept"]:
                return run_scripts(("oldest",), [table])
            # Other projects' checkouts are passed as `--peer FOLDER`.
            scripts = [["benchmarks/operations.py", *arguments]]
            scripts += [
                [f"benchmarks/{name}.py"] for name in ("generate", "strategies")
            ]
            return run_scripts(("oldest", "parity"), [*scripts, table])
        case "clean":
            for name in WRITTEN:
                shutil.rmtree(ROOT / name, ignore_errors=True)
    return 0


def run_tests(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run everything, the named suites, or the tests selected by pytest arguments."""
    if options.suites:
        tasks = {name: (SUITES | CHECKS)[name] for name in options.suites.split()}
    elif arguments:
        ends = [options.jax] if options.jax else ["oldest", "newest"]
        tasks = {
            f"{end}-chosen": choose_tests(end, arguments, all_cases=bool(options.jax))
            for end in ends
        }
    else:
        tasks = choose_everything(options.jax, options.extras.split())
    if "newest" not in layers_of(tasks) or find_newer_python() is not None:
        return run_tasks(tasks, options.jobs)
    others = {n: task for n, task in tasks.items() if "newest" not in task.layers}
    status = run_tasks(others, options.jobs) if others else 0
    print(NO_NEWEST)
    return status


def run_tasks(tasks: Mapping[str, Task], width: int = 1) -> int:
    """Set up the tasks' environments, run them, and return the exit status."""
    before = make_set_up(layers_of(tasks))
    jobs = [*before.values()]
    for name, task in tasks.items():
        after = before[task.folder].name if task.folder in before else None
        command = [*task.command, *report_of(name, task)]
        jobs.append(Job(name, command, task.all_variables, after, task.waits))
    if len(tasks) == 1:
        return run_one_by_one(jobs)
    outcomes = run_jobs(jobs, width, ROOT)
    # All selected tests may belong to the other JAX.
    some = any(outcome.status == 0 and outcome.name in tasks for outcome in outcomes)
    were_chosen = all(name.endswith("chosen") for name in tasks)
    return int(not show_table(outcomes, {0, NO_TESTS} if some and were_chosen else {0}))


def report_of(name: str, task: Task) -> list[str]:
    """Return pytest's argument for a report, read by `matrix.py`, if configured."""
    folder = os.environ.get("JKV_REPORTS")
    is_suite = task.tool == "pytest"
    return [f"--junitxml={folder}/{name}.xml"] if folder and is_suite else []


def make_generate(arguments: Sequence[str]) -> list[str]:
    """Return the generating script: the bundled model, or a published one by name."""
    script = ["examples/generate.py"]
    for name in arguments[:1]:
        if name not in MODELS:
            raise SystemExit(f"model must be one of {', '.join(MODELS)}, got {name}")
        script += ["--model", str(fetch(name)), "--chat", QUESTION]
    return script


def build_distributions() -> int:
    """Build wheels and sdists of both projects and check what an index would show."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    build = ["-m", "build", "--outdir", str(dist)]
    calls = [[*build, str(ROOT)], [*build, str(ROOT / "examples")]]
    status = run_scripts(("wheel",), calls)
    check = ["-m", "twine", "check", "--strict"]
    return status or run_scripts(
        ("wheel",), [[*check, *map(str, sorted(dist.iterdir()))]]
    )


def run_scripts(layers: Sequence[str], scripts: Sequence[Sequence[str]]) -> int:
    """Set up and run scripts with the oldest JAX, until one fails."""
    python = python_of(LAYERS[layers[0]].folder)
    jobs = [Job(script[0], [python, *script]) for script in scripts]
    return run_one_by_one([*make_set_up(layers).values(), *jobs])


def run_one_by_one(jobs: Sequence[Job]) -> int:
    """Run jobs with visible output; return the first nonzero exit status, or 0."""
    for job in jobs:
        variables = os.environ | job.variables
        done = subprocess.run(job.command, cwd=ROOT, env=variables)
        if done.returncode:
            return done.returncode
    return 0


def layers_of(tasks: Mapping[str, Task]) -> list[str]:
    """Return the layers that the tasks require."""
    return [layer for task in tasks.values() for layer in task.layers]


def make_set_up(layers: Sequence[str]) -> dict[str, Job]:
    """Return an installing job for each environment with missing layers."""
    missing = [name for name in LAYERS if name in layers and not is_there(name)]
    program = ROOT / "tools" / "environments.py"
    return {
        folder: Job(
            f"set-up of {folder}",
            [
                *(sys.executable, program),
                *(name for name in missing if LAYERS[name].folder == folder),
            ],
        )
        for folder in dict.fromkeys(LAYERS[name].folder for name in missing)
    }


if __name__ == "__main__":
    sys.exit(main())
