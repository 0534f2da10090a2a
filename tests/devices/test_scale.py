"""Formulas of docs/scale.md, compared with compiled steps and with the page."""

import dataclasses
import re
import sys

import jax
import numpy as np
import pytest
from support.paths import ROOT

import jkv

sys.path.insert(0, str(ROOT / "benchmarks"))  # benchmarks are no package

import devices
import scale

pytestmark = pytest.mark.one_end


@pytest.mark.parametrize("kind", ["heads", "few heads"])
def test_formulas_equal_the_program_compiled_for_eight_devices(kind):
    """All-reduces and their bytes; weights, cache and tokens per device, exactly.

    Eight kv heads are sharded; of two, each is on four devices.
    """
    step = devices.compile_step(kind, 8)
    count, nbytes = scale.count_sums(step.raw, 8, devices.NUM_ROWS, itemsize=4)
    # Products of few rows have rows as columns.
    shape = f"f32[{step.raw['hidden_size']},{devices.NUM_ROWS}]"
    assert step.collectives == {("all-reduce", shape): count}
    assert nbytes == 4 * devices.NUM_ROWS * step.raw["hidden_size"]

    weights, whole = scale.count_weights(step.raw, 8, "float32")
    heads = max(step.config.num_kv_heads // 8, 1)
    share = dataclasses.replace(step.config, num_kv_heads=heads)
    tokens = 4 * devices.NUM_ROWS
    assert step.bytes_given == weights + share.bytes + tokens
    # Another number of devices would have another share; replicated weights do not.
    assert whole < weights < scale.count_weights(step.raw, 4, "float32")[0]


def test_weights_equal_published_parameter_counts():
    """Parameters as in the papers, in bfloat16."""
    for model, parameters in (("8B", 8_030_261_248), ("405B", 405_853_388_800)):
        raw = scale.MODELS[f"Llama 3.1 {model}"]
        assert scale.count_weights(raw, 1, "bfloat16")[0] == 2 * parameters


def test_swapping_moves_the_documented_bytes():
    config = jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        num_blocks=8,
        max_sequences=2,
        max_context_length=128,
    )
    cache, opened = jkv.allocate(jkv.init(config), 0)
    cache, _ = jkv.append(cache, opened.seq_ids, 64, capacity=64)
    _, swapped = jkv.swap_out(cache, opened.seq_ids)
    moved = sum(
        leaf.nbytes for leaf in jax.tree.leaves(swapped.groups[0].contents.storage)
    )
    assert moved == 64 * config.bytes_per_token


def test_all_reduce_time_equals_bytes_over_bandwidth():
    """Eight devices: an eighth to each of seven, twice; four hosts: three quarters."""
    on_host = scale.find_seconds_to_sum(8, 8 * 2**20)
    np.testing.assert_allclose(on_host, 2 * 2**20 / scale.LINK_SPEED)
    between = scale.find_seconds_to_sum(32, 8 * 2**20) - on_host
    np.testing.assert_allclose(between, 1.5 * 2**20 / scale.NETWORK_SPEED)


@pytest.mark.further
def test_the_page_has_the_generated_tables():
    page = (ROOT / "docs" / "scale.md").read_text()
    found = dict(re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- end -->", page, re.DOTALL))
    assert found == scale.make_tables()


def test_four_gpus_cannot_hold_405b():
    with pytest.raises(ValueError, match="of weights leave nothing for a cache"):
        scale.plan(scale.Layout("Llama 3.1 405B", 1, 4))
