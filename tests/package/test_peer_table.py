"""The table of peers: its rows, and the direction of ratios."""

import importlib.util
import json
import sys

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.one_end

_SPEC = importlib.util.spec_from_file_location(
    "peer_table", ROOT / "benchmarks" / "peer_table.py"
)
peer_table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(peer_table)

MACHINE = {"device": "a card", "date": "2026-11-01 10:00 UTC"}


def operation(contender, median, **changes):
    row = {
        "operation": "append",
        "contender": contender,
        "pool": 65_536,
        "median": median,
    }
    return row | changes


def write(folder, name, *runs):
    text = json.dumps({"runs": [{"machine": MACHINE} | run for run in runs]})
    (folder / f"{name}.json").write_text(text)


def test_a_ratio_above_one_means_higher_throughput(tmp_path) -> None:
    rows = [
        operation("jkv, in a scan", 10.0, storage="metadata only"),
        operation("jkv, in a scan", 99.0, storage="storage donated"),
        operation("jkv, eager, donated", 40.0, storage="metadata only"),
        operation("another, in a scan", 30.0),
        operation("a third, host", 20.0),
        operation("bare Python loop", 1.0),
        operation("another, in a scan", 1.0, pool=4096),
    ]
    write(tmp_path, "operations", {"benchmark": "operations", "rows": rows})
    rates = [
        {"contender": "jkv", "tokens/s": 300.0},
        {"contender": "another", "tokens/s": 200.0},
    ]
    older = {"benchmark": "rollouts", "rows": [{"contender": "jkv", "tokens/s": 1.0}]}
    older["machine"] = MACHINE | {"date": "2026-10-01 10:00 UTC"}
    write(tmp_path, "rollouts", {"benchmark": "rollouts", "rows": rates}, older)
    _, *found = peer_table.make_table(tmp_path)
    assert [(row[1], *row[2:6]) for row in found] == [
        ("another, in a scan", "10", "30", "us", "3.00"),
        ("a third, host", "40", "20", "us", "0.50"),
        ("another", "300", "200", "tokens/s", "1.50"),
    ]
    assert all(row[-1] == "a card, 2026-11-01" for row in found)


def test_every_stored_result_is_read(capsys, monkeypatch) -> None:
    """The files have more names than the table; all of the table's are found."""
    for name, read in peer_table.READERS.items():
        runs = peer_table.read_runs(peer_table.RESULTS, name)
        assert any([*read(run)] for run in runs), name
    monkeypatch.setattr(sys, "argv", ["peer_table.py"])
    peer_table.main()
    assert "jkv" in capsys.readouterr().out.splitlines()[0]
