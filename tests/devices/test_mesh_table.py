"""The documented table of functions by mesh: each cell is run here."""

import re

import pytest
from support.mesh_table import COLUMNS, PLAYS, Place, assert_cell
from support.paths import ROOT

from jkv.status import UsageError

pytestmark = pytest.mark.one_end

EQUAL = "equal"
# Refused calls, with words of the error.
REFUSALS = {
    ("debug", "pools"): "debug works on one pool",
    ("Engine", "pools"): "create an engine for each rank",
}
# Cells of every run; the others are further ones, each with its own programs.
NOW = {("score, its derivative", "pools"), *REFUSALS}


def read_table():
    """Return the cells of the page, by row and column."""
    page = (ROOT / "docs" / "how-to" / "sharding.md").read_text()
    section = page.split("\n## What runs on which mesh\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    (_, *columns), *rows = (
        [cell.strip() for cell in line.split(" | ")] for line in lines
    )
    assert columns == [*COLUMNS]
    return {
        (name.replace("`", ""), column): cell
        for name, *cells in rows
        for column, cell in zip(columns, cells, strict=True)
    }


CELLS = [
    pytest.param(
        row, column, marks=[] if (row, column) in NOW else [pytest.mark.further]
    )
    for row in PLAYS
    for column in COLUMNS
]


@pytest.mark.parametrize("row, column", CELLS)
def test_mesh_table_cells_hold(row, column):
    cell = read_table()[row, column]
    if (row, column) not in REFUSALS:
        assert cell.startswith(EQUAL)
        assert_cell(row, column)
        return
    # The page gives the reason.
    assert re.fullmatch(r"refused: \w.{20,}", cell)
    with pytest.raises(UsageError, match=REFUSALS[row, column]):
        Place(COLUMNS[column]).play(row)


def test_every_mesh_table_cell_is_tested():
    cells = read_table()
    assert all(cells.values())
    by_row = {}
    for (row, _), cell in cells.items():
        by_row.setdefault(row, []).append(cell)
    assert by_row.keys() >= PLAYS.keys()
    for row in by_row.keys() - PLAYS.keys():
        for cell in by_row[row]:
            named = re.search(r"`(tests/[\w/]+\.py)`", cell)
            assert named and (ROOT / named[1]).is_file() or cell.startswith("refused")
