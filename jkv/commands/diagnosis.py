"""python -m jkv.doctor: what works on this machine, and how fast.

For whoever has a card that jkv's developers have not: it prints what is installed,
names combinations known to be bad, runs the bookkeeping and the attention on the
device against their specifications, measures how much of the memory's bandwidth a copy
and a decode step reach, and writes all of it to a file to attach to a report. On a CPU
it checks what can be checked there and says what could not be.

The exit status is 0 if nothing is wrong, 1 if a check failed.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

from jkv.commands.bandwidth import measure_bandwidth
from jkv.commands.bookkeeping import check_bookkeeping
from jkv.commands.compiled_programs import keep_compiled_programs
from jkv.commands.correctness import check_attention
from jkv.commands.facts import collect_facts, list_known_faults
from jkv.commands.report import Report


def main(arguments: list[str] | None = None) -> int:
    """Run all checks; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jkv.doctor", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--report",
        type=pathlib.Path,
        default=pathlib.Path("jkv-doctor.json"),
        help="file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="skip the measurements of bandwidth"
    )
    options = parser.parse_args(arguments)
    keep_compiled_programs()
    report = Report()
    print("machine")
    describe_machine(report)
    print("known combinations")
    check_combinations(report)
    print("bookkeeping on the device")
    check_bookkeeping(report)
    print("attention against the reference")
    check_attention(report)
    print("bandwidth")
    if options.quick:
        report.add("not checked", "bandwidth", "--quick")
    else:
        measure_bandwidth(report)
    options.report.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")
    print(f"written to {options.report}")
    print("SOMETHING FAILED" if report.has_failed else "nothing failed")
    return int(report.has_failed)


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


if __name__ == "__main__":
    sys.exit(main())
