"""The table `support.states.state_table` for caches on a mesh, and in pools."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from support.caches.kept_sequences import guess
from support.states.state_table import LOOPS, PLACES, VERBS, read_table

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
    # Takes minutes to compile; `test_states_on_devices.py` covers the other loops.
    if table is VERBS or row.name == "generate_plainly"
}


# Each cell compiles its own programs. Layers of two kinds run in both places, layers of
# one kind in alternating ones.
BOTH = ("keys+state", "window+state")


@pytest.mark.parametrize("name", ROWS)
def test_cells(name, tmp_path):
    """A row for one kind of groups, with pending newest tokens."""
    row, number = ROWS[name], [*ROWS].index(name)
    for place, (letter, where) in enumerate(zip(row.places, PLACES, strict=True)):
        # Rows list five kinds each, so the place of a kind alternates between rows.
        if row.kind in BOTH or place == number % 2 or letter != "+":
            row.play(letter, guess, tmp_path, **WHERE[where])
