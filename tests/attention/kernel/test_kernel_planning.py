"""The decode list of a step: made by `append` where there is a card, used by layers."""

import jax
import numpy as np
import pytest
from caches import small_config
from tolerances import assert_close

import jkv
from jkv.attention.kernel import launches, planning
from jkv.attention.kernel.platforms import _INTERPRETED

pytestmark = pytest.mark.one_end

# Two kv heads, so that the pieces are dealt to them.
CONFIG = small_config(num_kv_heads=2, head_dim=16, num_layers=2)


@pytest.fixture
def with_card(monkeypatch):
    """As on a machine with a card that holds as many programs as are interpreted."""
    monkeypatch.setattr(planning, "_find_programs", lambda: _INTERPRETED.programs)


@pytest.fixture
def num_listed(monkeypatch):
    """How often a call of attention has made a list of its own."""
    made = []

    def list_work(*arguments):
        made.append(1)
        return planning.list_decode_work(*arguments)

    monkeypatch.setattr(launches, "list_decode_work", list_work)
    return made


def step(*, window=None, num_tokens=1, implementation="pallas"):
    """Three sequences of 6, 0 and 3 tokens, then a step; what a layer answers."""
    cache, opened = jkv.allocate(jkv.init(CONFIG), np.zeros(3, np.int32))
    rng = np.random.default_rng(0)
    for lengths in ([6, 0, 3, 0], num_tokens):
        # The last request is padding.
        ids = np.append(np.asarray(opened.seq_ids), -1).astype(np.int32)
        capacity = None if lengths == 1 else 16
        cache, batch = jkv.append(cache, ids, lengths, capacity=capacity)
        rows = rng.standard_normal((batch.num_rows, 2, 16)).astype(np.float32)
        cache = jkv.write(cache, 1, batch, rows, rows[::-1])
    queries = rng.standard_normal((batch.num_rows, 4, 16)).astype(np.float32)
    answer = jkv.attend(
        cache, 1, batch, queries, window=window, implementation=implementation
    )
    return batch, np.asarray(answer)


@pytest.mark.parametrize("num_tokens", [1, [1, 2, 1, 0]], ids=["decode", "mixed"])
@pytest.mark.usefixtures("with_card")
def test_layers_use_the_list_of_the_step(num_listed, num_tokens):
    expected = step(num_tokens=num_tokens, implementation="reference")[1]
    batch, answer = step(num_tokens=num_tokens)
    assert batch.decode_work is not None and not num_listed
    assert_close(answer, expected)


@pytest.mark.usefixtures("with_card")
def test_other_calls_make_their_own(num_listed):
    batch, answer = step(window=4)
    assert batch.decode_work is not None and num_listed
    assert_close(answer, step(window=4, implementation="reference")[1])


def test_a_card_is_known_by_its_table(monkeypatch):
    cache = jax.eval_shape(lambda: jkv.init(CONFIG))
    batch = jax.eval_shape(lambda cache: jkv.append(cache, [0, 1])[1], cache)
    assert batch.decode_work is None
    monkeypatch.setattr(
        planning, "find_target", {"rocm": "gfx942", "cuda": None}.__getitem__
    )
    batch = jax.eval_shape(lambda cache: jkv.append(cache, [0, 1])[1], cache)
    # As many programs as an MI300X holds, for two kv heads.
    assert batch.decode_work.sizes.least == 8 * 304 // 2 // 2
