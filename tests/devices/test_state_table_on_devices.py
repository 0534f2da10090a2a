"""The table of `support.state_table` where a cache is on a mesh, and in pools."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from support.kept_texts import guess
from support.state_table import LOOPS, PLACES, VERBS, read_table

pytestmark = [pytest.mark.one_end, pytest.mark.further]

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
WHERE = {
    "mesh": dict(mesh=MESH, heads="tp"),
    "pools": dict(mesh=MESH, heads="tp", pools="dp"),
}
ROWS = {
    f"{row.name}, {row.kind}": row
    for table in (VERBS, LOOPS)
    for row in read_table(table)
    # Minutes of compiling: the other loops have `test_states_on_devices.py`.
    if table is VERBS or row.name == "generate_plainly"
}


@pytest.mark.parametrize("name", ROWS)
def test_cells(name, tmp_path):
    """A row of one kind of groups, with pending newest tokens."""
    row = ROWS[name]
    for letter, place in zip(row.places, PLACES, strict=True):
        row.play(letter, guess, tmp_path, **WHERE[place])
