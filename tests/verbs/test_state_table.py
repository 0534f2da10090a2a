"""All combinations of operation, kind of layers and earlier operations.

The table is `support.states.state_table`. A refused cell changes nothing.
"""

import inspect

import pytest
from support.jax_versions import with_further
from support.states import state_loops, state_verbs
from support.states.state_table import LOOPS, PASTS, REASONS, VERBS, read_table

pytestmark = pytest.mark.one_end

ROWS = {
    f"{row.name}, {row.kind}": row
    for table in (VERBS, LOOPS)
    for row in read_table(table)
    # The engine's other kinds are tested in `tests/serving`.
    if row.name != "engine" or row.kind == "state"
}
# Cases of `make test`: verbs, for attention beside a state. Random tests have states
# alone.
FIRST_KIND = "keys+state"
LATER = [
    name
    for name, row in ROWS.items()
    if row.kind != FIRST_KIND or row.name == "debug" or hasattr(state_loops, row.name)
]


@pytest.mark.parametrize("name", with_further(ROWS, *LATER))
def test_cells(name, tmp_path):
    """Each past of a row, for one kind of groups."""
    row = ROWS[name]
    for number, (letter, past) in enumerate(zip(row.letters, PASTS, strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        row.play(letter, past, folder)


def test_the_table_is_complete():
    """Each row is a function and each function a row; each reason is used."""
    functions = {
        name
        for module in (state_verbs, state_loops)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    rows = ROWS.values()
    assert {row.name for row in rows} == functions
    letters = {letter for row in rows for letter in row.letters + row.places}
    assert letters == {"+", *REASONS}
