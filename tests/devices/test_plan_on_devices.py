"""`jkv.plan`'s sizes for a mesh equal the devices' own."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from support.checkpoints.config_json import folder

import jkv
from jkv.commands.capacity import make_plan
from jkv.config.grouped_config import as_grouped

pytestmark = pytest.mark.one_end

SMALL = dict(
    model_type="llama",
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    hidden_size=64,
    max_position_embeddings=256,
    torch_dtype="float32",
)
MEMORY, WEIGHTS = 2**21, 2**19
WINDOWS = dict(sliding_window=32, sliding_window_pattern=3)
MESHES = {
    "heads": dict(tensor_parallel=2),
    "copies of heads": dict(tensor_parallel=8),
    "context": dict(context_parallel=4),
    "pools": dict(data_parallel=2),
    "all": dict(tensor_parallel=2, context_parallel=2, data_parallel=2),
}
AXES = dict(tensor_parallel="heads", context_parallel="context", data_parallel="pools")


def bytes_on_devices(cache):
    """Return each device's bytes of a cache."""
    found = collections.Counter()
    for leaf in jax.tree.leaves(cache):
        for shard in leaf.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return found


def init_whole(config, sizes, num_kv_heads):
    """Create a cache on a mesh, for all heads of the model."""
    groups = tuple(
        dataclasses.replace(group, num_kv_heads=num_kv_heads)
        for group in as_grouped(config).groups
    )
    whole = dataclasses.replace(as_grouped(config), groups=groups)
    shape = tuple(sizes.values())
    devices = np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    mesh = Mesh(devices, tuple(sizes), (AxisType.Auto,) * len(shape))
    return jkv.init(whole, mesh=mesh, **{AXES[name]: name for name in sizes})


@pytest.mark.parametrize("layers", [{}, WINDOWS], ids=["alike", "windows"])
@pytest.mark.parametrize("name", MESHES)
def test_device_bytes_equal_the_plan(tmp_path, layers, name):
    sizes = MESHES[name]
    given = dict(weights=WEIGHTS, reserve=0.0, max_sequences=4, prefix_caching=True)
    plan = make_plan(folder(tmp_path, **SMALL, **layers), MEMORY, **sizes, **given)
    parts = sizes.get("tensor_parallel", 1)
    assert plan.budget == MEMORY - WEIGHTS // parts

    shown = plan.groups or plan.config
    assert (plan.groups is not None) == bool(layers)
    found = bytes_on_devices(init_whole(shown, sizes, SMALL["num_key_value_heads"]))
    assert len(found) == np.prod([*sizes.values()])
    assert set(found.values()) == {plan.cache_bytes}
    # It fits, and the next size does not.
    assert plan.cache_bytes <= plan.budget
    if layers:
        each = plan.cache_bytes / shown.max_sequences
    else:
        each = plan.cache_bytes / shown.num_blocks
    assert plan.cache_bytes + 1.5 * each > plan.budget


def test_indivisible_block_sizes_are_refused(tmp_path):
    path = folder(tmp_path, **SMALL)
    given = dict(weights=WEIGHTS, context_parallel=3)
    with pytest.raises(ValueError, match="context_parallel=3, got 16; use 48"):
        make_plan(path, MEMORY, **given)
    assert make_plan(path, MEMORY, block_size=48, **given).num_devices == 3
    for name in AXES:
        with pytest.raises(ValueError, match="at least 1 device, got 0"):
            make_plan(path, MEMORY, **{name: 0})


def test_the_report_lists_replicated_arrays(tmp_path):
    path = folder(tmp_path, **SMALL)
    sizes = dict(tensor_parallel=2, context_parallel=4, data_parallel=3)
    output = make_plan(path, MEMORY, weights=WEIGHTS, **sizes).report().splitlines()
    assert output[0] == "memory      2.0 MiB on each of 8 devices of each of 3 replicas"
    assert "256.0 KiB weights" in output[1]
    assert output[2].startswith("4 devices   3 layers, 2 kv heads of 8, float32")
    (each,) = (line for line in output if line.startswith("on each"))
    assert each.endswith(": of each block 1/4, the metadata whole")
    # Keys and values of 3 layers, 4 heads of 8 floats; a device has an eighth.
    assert "per token   768 B, 96 B on each" in output
