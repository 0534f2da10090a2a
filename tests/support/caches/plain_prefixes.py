"""Find prefixes shared by requests in plain Python, from a step's block tables."""

import numpy as np


def count_common(one, other):
    """Return the number of leading blocks that two tables share."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def check_prefixes(found, tables, fewest):
    """Assert that an order, `common` and `sizes` match the tables' shared parts.

    Args:
        found: `SharedPrefixes`.
        tables: of each request the blocks before its last one; None unless it has one
            row.
        fewest: requests below which nothing need be found.
    """
    order, common, sizes = (np.asarray(array).tolist() for array in found)
    assert sorted(order) == list(range(len(tables)))
    sharing = [table for table in tables if table]
    sharing = [t for t in sharing if sum(t[0] == other[0] for other in sharing) > 1]
    in_order = [tables[request] or [] for request in order]
    expected = [
        count_common(*pair) for pair in zip(in_order, in_order[1:], strict=False)
    ]
    if not any(common):
        # Nothing is shared, or by fewer requests than the threshold.
        assert len(sharing) < fewest
        expected = [0] * len(expected)
    assert common == [0, *expected]
    for place, size in enumerate(sizes):
        behind = common[place + 1 :]
        run = next((n for n, c in enumerate(behind) if c <= common[place]), len(behind))
        assert size == run + 1
    # Requests with the same first block are neighbours.
    if any(common):
        firsts = [table[0] for table in in_order if table]
        changes = sum(a != b for a, b in zip(firsts, firsts[1:], strict=False))
        assert changes == len(set(firsts)) - 1
    return sum(common)
