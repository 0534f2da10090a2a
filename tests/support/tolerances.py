"""Numerical tolerances by dtype.

The entries bound `|a - b| <= tolerance * (1 + |b|)`. Sums run in float32 for every
dtype, so the half-precision entries are one rounding of the result.
"""

import numpy as np

TOLERANCE = {
    "float32": 2e-5,
    "float16": 1e-3,
    "bfloat16": 8e-3,
}


def is_close(actual, expected) -> bool:
    """Return True if two arrays agree within the tolerance of the first one's dtype."""
    tolerance = TOLERANCE[str(actual.dtype)]
    return np.allclose(
        np.asarray(actual, np.float64),
        np.asarray(expected, np.float64),
        rtol=tolerance,
        atol=tolerance,
    )


def assert_close(actual, expected) -> None:
    """Assert that two arrays agree within the tolerance of the first one's dtype."""
    tolerance = TOLERANCE[str(actual.dtype)]
    np.testing.assert_allclose(
        np.asarray(actual, np.float64),
        np.asarray(expected, np.float64),
        rtol=tolerance,
        atol=tolerance,
    )
