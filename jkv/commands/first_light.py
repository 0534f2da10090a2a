"""`python -m jkv.doctor --first-light`: first checks of a new GPU.

Every check runs in a child process, and this process does not start JAX, so that
crashes, hangs and wrong numbers are results. They end in a table of settings.
"""

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from jkv.commands.children import Answer, ask
from jkv.commands.facts import list_known_faults
from jkv.commands.probes import DRAWS, LOOPS, MACHINE, list_tries
from jkv.commands.report import Report
from jkv.xla_flags import NO_COMMAND_BUFFERS, keep_flags

COMMAND = (sys.executable, "-m", "jkv.commands.probes")

# Seconds for all checks, and for one result.
TOTAL, EACH = 285.0, 75.0

REPORT = pathlib.Path("jkv-first-light.json")

WITHOUT_BUFFERS = f"{LOOPS}, without command buffers"

# Advice by prefix of the failed check's name and a part of its message.
CURES = (
    (
        "",
        "No FFI handler registered",
        "a plugin known to jaxlib; before 0.11.1 only ROCm 7's (extra rocm7)",
    ),
    (MACHINE, "", "matching driver, plugin, pjrt and jaxlib (docs/rocm.md)"),
    (LOOPS, "", "no known flag helps; attach the report to an issue of jkv"),
    ("scatters", "", "a newer plugin; large fused scatters failed in JAX 0.9"),
    ("a tall product", "", "at most 2^19 rows of float32 at once, or bfloat16"),
    ("kernel: rows stored", "", "JKV_WRITE_KERNEL=0: scatters store keys and values"),
    ("kernel:", "", "implementation='xla' for such calls: no kernel serves them"),
    ("", "", "attach the report to an issue of jkv"),
)


@dataclasses.dataclass
class FirstLight:
    """A run of the checks: report, deadline and flags."""

    report: Report
    ends: float  # by time.monotonic
    flags: str  # XLA_FLAGS of children

    def try_all(self, names: Sequence[str], shown: str | None = None) -> list[Answer]:
        """Run checks in children and report each result, as `shown` if given."""
        answers = []
        for found in ask(COMMAND, names, self.find_limit, {"XLA_FLAGS": self.flags}):
            self.report.add(found.verdict, shown or found.name, found.detail)
            answers.append(found)
        return answers

    def find_limit(self) -> float:
        """Return the time limit of the next result, in seconds."""
        return min(EACH, self.ends - time.monotonic())


def run_first_light(path: pathlib.Path | None) -> int:
    """Run all checks, print the table, write the report; return the exit status."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [each for each in flags if not each.startswith(NO_COMMAND_BUFFERS)]
    report = Report()
    light = FirstLight(report, time.monotonic() + TOTAL, " ".join(flags))
    try:
        needed = try_in_order(light)
    except KeyboardInterrupt:
        report.was_interrupted, needed = True, None
    print("", *lay_out(report), sep="\n")
    if needed:
        print(f"\nset in the environment: XLA_FLAGS={' '.join([*flags, *needed])!r}")
    report.write(path or REPORT)
    print(report.summary)
    return report.exit_status


def try_in_order(light: FirstLight) -> list[str] | None:
    """Run all checks; return the required flags, or None if no check can run."""
    (machine,) = light.try_all([MACHINE])
    if machine.verdict != "ok":
        return None
    light.report.facts = machine.facts
    for warning in list_known_faults(machine.facts):
        light.report.add("warning", warning)
    light.try_all([DRAWS])
    flags = light.flags
    (packed,) = light.try_all([LOOPS])
    light.flags = f"{flags} {NO_COMMAND_BUFFERS}".strip()
    (single,) = light.try_all([LOOPS], WITHOUT_BUFFERS)
    is_cured = packed.verdict == "FAILED" and single.verdict == "ok"
    needed = [NO_COMMAND_BUFFERS] if is_cured else []
    if is_cured or packed.verdict == "ok":
        keep(needed)
    light.flags = " ".join([flags, *needed]).strip()
    tries = list_tries(is_on_cpu=machine.facts["platform"] == "cpu")
    light.try_all([name for name in tries if name not in (MACHINE, DRAWS, LOOPS)])
    return needed


def keep(flags: Sequence[str]) -> None:
    """Save the required flags for other processes, if the file is writable."""
    try:
        keep_flags(flags)
    except (OSError, RuntimeError) as error:  # also without a home folder
        print(f"could not save the flags: {error}", file=sys.stderr)


def lay_out(report: Report) -> Iterator[str]:
    """Yield the lines of the table, and add advice to each failure."""
    verdicts = {each["what"]: each["verdict"] for each in report.findings}
    width = max(map(len, verdicts), default=0)
    yield f"{'check':<{width}}  result       setting, and reason"
    for finding in report.findings:
        if finding["verdict"] == "warning":
            continue
        if finding["verdict"] == "FAILED":
            finding["cure"] = find_cure(finding, verdicts)
        cells = f"{describe_result(finding):<11}  {finding.get('cure', '')}"
        yield f"{finding['what']:<{width}}  {cells}".rstrip()


def describe_result(finding: Mapping[str, str]) -> str:
    """Return the kind of a result."""
    if finding["verdict"] != "FAILED":
        return finding["verdict"]
    kinds = {"crash": "crashed: ", "hang": "it hangs", "no handler": "No FFI handler"}
    found = (kind for kind, sign in kinds.items() if sign in finding["detail"])
    return next(found, "wrong")


def find_cure(finding: Mapping[str, str], verdicts: Mapping[str, str]) -> str:
    """Return the advice for a failure."""
    if finding["what"] == LOOPS and verdicts.get(WITHOUT_BUFFERS) == "ok":
        return (
            f"XLA_FLAGS={NO_COMMAND_BUFFERS} : kernels launched one by one are right, "
            f"graphs of them are not"
        )
    return next(
        advice
        for name, sign, advice in CURES
        if finding["what"].startswith(name) and sign in finding["detail"]
    )
