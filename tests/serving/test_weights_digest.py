"""The weights digest of a store covers every element, and the model."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.serving.device.weights_digest import digest_weights

pytestmark = pytest.mark.one_end
DTYPES = "float32 bfloat16 float16 float8_e4m3fn int32 int8 uint8 int4 bool complex64"


def digest(params, model=None, exact=False):
    return digest_weights(model, params, exact)


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_any_element_changes_the_digest(dtype):
    """The value, index and shape of each element count."""
    plain = np.zeros((3, 2, 5), np.float32)
    changed = [plain]
    for at in np.ndindex(plain.shape):
        other = plain.copy()
        other[at] = 1
        changed.append(other)
    arrays = [jnp.asarray(each).astype(dtype) for each in changed]
    found = [digest({"a": each}) for each in arrays]
    assert len(set(found)) == len(found)
    assert digest({"a": arrays[0].reshape(6, 5)}) not in found
    assert digest({"b": arrays[0]}) not in found
    assert digest({"a": np.asarray(arrays[1])}) == found[1]


def test_a_swap_and_a_negative_zero_change_the_digest():
    rows = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    swapped = rows[[1, 0, 2, 3]]
    signed = np.array([[0.0, -0.0]], np.float32)
    found = [digest([each]) for each in (rows, swapped, rows.T.copy(), rows[:, ::-1])]
    found += [digest([signed]), digest([signed[:, ::-1]])]
    assert len(set(found)) == len(found)
    keys = [digest([jax.random.key(seed)]) for seed in (0, 1)]
    assert keys[0] != keys[1]


def make_model(base, turns=None, *, scale=1.0):
    def model(params, x=2):
        return params * base * scale + turns[x]

    return model


class Settings:
    """A model whose repr has its address, and a setting."""

    def __init__(self, base):
        self.base = base

    def __repr__(self):
        return f"<Settings {self.base} at {hex(id(self))}>"


def test_model_closures_change_the_digest():
    turns = np.arange(3000.0)
    other = turns.copy()
    other[1500] = 0
    models = [
        lambda base: make_model(base, turns),
        lambda base: make_model(base, other),
        lambda base: make_model(base, turns, scale=2.0),
        lambda base: make_model(1.0, turns, scale=base),
        lambda base: functools.partial(make_model(1.0), base),
        lambda base: functools.partial(make_model(1.0), x=base),
        lambda base: functools.partial(make_model(1.0), x=other * base),
        Settings,
    ]
    found = [digest([turns], make(base)) for make in models for base in (1e4, 1e6)]
    assert len(set(found)) == len(found)
    again = [digest([turns], make(base)) for make in models for base in (1e4, 1e6)]
    assert again == found
    assert digest([turns], models[0](1e4), exact=True) not in found


PROGRAM = """
from test_weights_digest import digest, make_model, np
print(digest({"a": np.arange(7.0), "b": np.arange(3)}, make_model(1e4, np.ones(3))))
"""


def test_the_digest_is_equal_in_every_process():
    found = {
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"import sys; sys.path[:0] = {sys.path!r}\n{PROGRAM}",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in "12"
    }
    assert len(found) == 1 and len(found.pop()) == 33
