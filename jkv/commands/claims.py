"""Which rows of docs/rocm.md's table hold on the card at hand, by what was found there.

That table says what was shown without a card. A report of a user's card says which of
it was true there; on a CPU, what a card would be asked.
"""

from typing import NamedTuple

from jkv.commands.correctness import on_cpu
from jkv.commands.report import Report


class Claim(NamedTuple):
    """A row of the table."""

    what: str
    steps: tuple[str, ...]  # beginnings of the titles of the steps that show it


CLAIMS = (
    Claim("bookkeeping is right when it runs there", ("bookkeeping",)),
    Claim("the attention kernel is equal to the reference", ("attention: pallas",)),
    Claim("so is its derivative", ("derivative: pallas",)),
    Claim("so is attention through XLA", ("attention: xla", "derivative: xla")),
    Claim("rows are stored to the bit as scatters do", ("rows stored",)),
    Claim("a donated write copies no pool", ("memory of a donated write",)),
    Claim("a decode step has few launches and copies no pool", ("a compiled decode",)),
    Claim("collectives between devices are right", ("collectives",)),
)


def judge_claims(report: Report) -> None:
    """Add a finding for each claim; nothing is run."""
    for claim in CLAIMS:
        found = [
            finding
            for finding in report.findings
            if finding.get("step", "").startswith(claim.steps)
        ]
        verdict, detail = _judge([finding["verdict"] for finding in found])
        report.add(verdict, claim.what, detail)


def _judge(verdicts: list[str]) -> tuple[str, str]:
    if on_cpu():
        return "not checked", "of cards; there is none here"
    if "FAILED" in verdicts:
        return "FAILED", "not on this card: see above"
    if "warning" in verdicts:
        return "warning", "not quite on this card: see above"
    missed = verdicts.count("not checked")
    if "ok" not in verdicts:
        return "not checked", "nothing above shows it here"
    return "ok", f"on this card, but for {missed} of it" if missed else "on this card"
