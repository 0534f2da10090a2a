"""python -m jkv.doctor: checks of jkv on this machine.

For users of GPUs that jkv's developers do not have: it prints the installed versions,
warns of combinations with known faults, checks block accounting and attention on the
device against their specifications, and runs each collective between several devices.
`--report FILE` also writes the results to a file, to attach to an issue. On a CPU it
runs the checks that apply and lists the others.

`--first-light` is for a new GPU: every check runs in a child process that may crash,
and the result is a table of settings (`jkv.commands.first_light`).

`--quick` compares a few features in one dtype, in less than half a minute on two cores.
Ctrl-C ends the run with a report of the results so far.

`--model FOLDER` runs no check: it reports the calls of the model's attention served by
a kernel on the GPU, and the reasons for the others (`jkv.commands.paths`).

The exit status is 0 without failures, 1 if a check failed, 130 after Ctrl-C, and 2 for
an invalid command line.
"""

import itertools
import pathlib

from jkv.commands import bookkeeping, correctness, stores
from jkv.commands.bookkeeping import check_cycles, check_in_place
from jkv.commands.collectives import check_collectives
from jkv.commands.compiled_programs import keep_compiled_programs
from jkv.commands.correctness import on_cpu
from jkv.commands.exiting import Parser
from jkv.commands.facts import collect_facts, list_known_faults
from jkv.commands.first_light import run_first_light
from jkv.commands.paths import print_paths
from jkv.commands.report import Report, Step, run_checks


def main(arguments: list[str] | None = None) -> int:
    """Run all checks; return the exit status."""
    parser = Parser(prog="python -m jkv.doctor", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--report", type=pathlib.Path, metavar="FILE", help="also write a file"
    )
    parser.add_argument("--quick", action="store_true", help="a few features")
    parser.add_argument(
        "--first-light",
        action="store_true",
        help="check a new GPU in child processes; print settings, in five minutes",
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="only print its attention path; or num_kv_heads=8,head_dim=128",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="with --model: a GPU such as gfx942"
    )
    parser.add_argument(
        "--block-size", type=int, metavar="TOKENS", help="with --model; default 16"
    )
    options = parser.parse_args(arguments)
    if options.model is None and (options.gpu or options.block_size):
        parser.error("--gpu and --block-size require --model")
    if options.model is not None and (options.report or options.quick):
        parser.error("--model runs no checks; omit --report and --quick")
    if options.first_light and (options.quick or options.model is not None):
        parser.error("--first-light excludes --quick and --model; omit them")
    if options.model is not None:
        try:
            block_size = 16 if options.block_size is None else options.block_size
            print_paths(options.model, options.gpu, block_size=block_size)
        except (ValueError, TypeError, OSError) as error:
            parser.error(f"--model: {error}")
        return 0
    if options.report and not options.report.parent.is_dir():
        parser.error(f"--report: there is no folder {options.report.parent}")
    if options.report and options.report.is_dir():
        parser.error(f"--report: {options.report} is a folder")
    if options.first_light:
        return run_first_light(options.report)
    keep_compiled_programs()
    report = Report()
    run_checks(report, plan_steps(is_quick=options.quick))
    if options.report:
        report.write(options.report)
    print(report.summary)
    return report.exit_status


def plan_steps(*, is_quick: bool) -> list[Step]:
    """Return the steps of the run; checks of memory come before the comparisons."""
    steps = [
        Step("machine", describe_machine),
        Step("known combinations", check_combinations),
        Step("bookkeeping on the device", {bookkeeping.CYCLES: check_cycles}),
        Step("memory of a donated write", {bookkeeping.IN_PLACE: check_in_place}),
        Step("collectives between the devices", check_collectives),
        Step(stores.ALL, stores.list_tries(), of=stores.ALL),
    ]
    for name, dtype in itertools.product(
        correctness.IMPLEMENTATIONS, correctness.TOLERANCES
    ):
        if is_quick and dtype != correctness.QUICK_DTYPE:
            continue
        cases = correctness.select_cases(name, is_quick=is_quick)
        tries = correctness.list_tries(name, dtype, cases)
        how = " (interpreted)" if name == "pallas" and on_cpu() else ""
        title, of = f"attention: {name}, {dtype}", f"{name}, {dtype}{how}"
        steps.append(Step(title, tries, of=of))
    if not is_quick:
        for name in correctness.IMPLEMENTATIONS:
            tries = correctness.list_derived(name)
            steps.append(Step(f"derivative: {name}", tries, of=f"gradient of {name}"))
    if on_cpu():
        steps.append(Step("the compiled kernel", note_missing_kernel))
    return steps


def note_missing_kernel(report: Report) -> None:
    report.add("not checked", "the compiled kernel", "there is no GPU here")


def describe_machine(report: Report) -> None:
    """Collect and print the facts."""
    report.facts = collect_facts()
    for name, value in report.facts.items():
        print(f"  {name}: {value}")


def check_combinations(report: Report) -> None:
    """Add a warning for each known fault of the versions and settings."""
    warnings = list(list_known_faults(report.facts))
    for warning in warnings:
        report.add("warning", warning)
    if not warnings:
        report.add("ok", "nothing known against these versions")
