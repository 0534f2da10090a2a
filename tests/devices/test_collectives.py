"""The doctor's collectives, between the devices of a CPU."""

import pytest

from jkv.commands.collectives import COLLECTIVES, check_collectives, try_collective
from jkv.commands.report import Report


@pytest.mark.one_end
def test_each_collective_runs_on_all_devices():
    """The collectives run in a separate process with the same devices."""
    report = Report()
    check_collectives(report)
    assert [each["what"].split()[0] for each in report.findings] == [*COLLECTIVES]
    assert {each["verdict"] for each in report.findings} == {"ok"}


@pytest.mark.one_end
def test_wrong_results_are_an_error(monkeypatch):
    keep = {"all-to-all": lambda row: row}
    monkeypatch.setattr("jkv.commands.collectives.COLLECTIVES", keep)
    with pytest.raises(ValueError, match="all-to-all returned wrong numbers"):
        try_collective("all-to-all")
