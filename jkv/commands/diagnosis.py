"""python -m jkv.doctor: what works on this machine.

For users of cards that jkv's developers do not have: it prints what is installed,
names combinations known to be bad, runs the bookkeeping and the attention on the
device against their specifications, and tries each collective between several
devices. With `--report FILE` all of it is written to a file, too, to attach to a
report. On a CPU it checks what can be checked there and says what could not be.

`--first-light` comes first on a new card: nothing that it tries can take it down, and
it ends with what to set (`jkv.commands.first_light`).

`--quick` compares a few features in one dtype: it takes less than half a minute on two
cores. Ctrl-C ends the examination with a report of what was found.

`--model FOLDER` checks nothing: it says which calls of the model's attention a kernel
serves on the card, which the plain path, and why (`jkv.commands.paths`).

The exit status is 0 if nothing is wrong, 1 if a check failed, 130 after Ctrl-C, and 2
if the command line is wrong.
"""

import itertools
import pathlib

from jkv.commands import bookkeeping, correctness, stores
from jkv.commands.bookkeeping import check_cycles, check_in_place
from jkv.commands.collectives import check_collectives
from jkv.commands.compiled_programs import keep_compiled_programs
from jkv.commands.correctness import on_cpu
from jkv.commands.ending import Parser
from jkv.commands.facts import collect_facts, list_known_faults
from jkv.commands.first_light import shed_light
from jkv.commands.paths import print_paths
from jkv.commands.report import Report, Step, run_checks


def main(arguments: list[str] | None = None) -> int:
    """Run all checks; return the exit status."""
    parser = Parser(prog="python -m jkv.doctor", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--report", type=pathlib.Path, metavar="FILE", help="write a file as well"
    )
    parser.add_argument("--quick", action="store_true", help="a few features")
    parser.add_argument(
        "--first-light",
        action="store_true",
        help="a new card, in processes that may crash: what to set, in five minutes",
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="only say which path its attention takes; or num_kv_heads=8,head_dim=128",
    )
    parser.add_argument(
        "--card", metavar="NAME", help="with --model: such as gfx942, instead of this"
    )
    parser.add_argument(
        "--block-size", type=int, metavar="TOKENS", help="with --model; default 16"
    )
    options = parser.parse_args(arguments)
    if options.model is None and (options.card or options.block_size):
        parser.error("--card and --block-size go with --model")
    if options.model is not None and (options.report or options.quick):
        parser.error("--model checks nothing; leave --report and --quick out")
    if options.first_light and (options.quick or options.model is not None):
        parser.error("--first-light stands alone; leave --quick and --model out")
    if options.model is not None:
        try:
            block_size = 16 if options.block_size is None else options.block_size
            print_paths(options.model, options.card, block_size=block_size)
        except (ValueError, TypeError, OSError) as error:
            parser.error(f"--model: {error}")
        return 0
    if options.report and not options.report.parent.is_dir():
        parser.error(f"--report: there is no folder {options.report.parent}")
    if options.report and options.report.is_dir():
        parser.error(f"--report: {options.report} is a folder")
    if options.first_light:
        return shed_light(options.report)
    keep_compiled_programs()
    report = Report()
    run_checks(report, plan_steps(is_quick=options.quick))
    if options.report:
        report.write(options.report)
    print(report.summary)
    return report.exit_status


def plan_steps(*, is_quick: bool) -> list[Step]:
    """Return what is to be done; costs are seconds on two cores, roughly."""
    steps = [
        Step("machine", 1, describe_machine),
        Step("known combinations", 0, check_combinations),
        Step("bookkeeping on the device", 8, {bookkeeping.CYCLES: check_cycles}),
        Step("memory of a donated write", 4, {bookkeeping.IN_PLACE: check_in_place}),
        Step(stores.ALL, 2, stores.list_tries(), of=stores.ALL),
        Step("collectives between the devices", 5, check_collectives),
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
        steps.append(Step(title, 5 * len(cases), tries, of=of))
    if not is_quick:
        for name in correctness.IMPLEMENTATIONS:
            tries = correctness.list_derived(name)
            steps.append(
                Step(f"derivative: {name}", 40, tries, of=f"gradient of {name}")
            )
    if on_cpu():
        steps.append(Step("the compiled kernel", 0, note_missing_kernel))
    return steps


def note_missing_kernel(report: Report) -> None:
    report.add("not checked", "the compiled kernel", "there is no GPU here")


def describe_machine(report: Report) -> None:
    """Collect and print the facts."""
    report.facts = collect_facts()
    for name, value in report.facts.items():
        print(f"  {name}: {value}")


def check_combinations(report: Report) -> None:
    """Warn of what is known against the versions and settings of this machine."""
    warnings = list(list_known_faults(report.facts))
    for warning in warnings:
        report.add("warning", warning)
    if not warnings:
        report.add("ok", "nothing known against these versions")
