"""Tensor parallelism: parameters are sharded while they are read.

The first matrices of attention and MLP are sharded by outputs (heads, hidden units),
the second ones by inputs, so the only communication of a layer is one all-reduce after
each second matrix. Embedding, head and norms are replicated, so sampling needs no
communication.
"""

from collections.abc import Callable

import jax
import numpy as np

from .config import DecoderConfig

# Moves a parameter, given by name, to its devices.
Put = Callable[[str, np.ndarray], jax.Array]

DELTA_ROWS = ("query", "key", "value", "gate", "strength", "decay")

# The sharded axis of each parameter, counted from the end; shapes are [layers, ...].
DIVIDED = {
    **dict.fromkeys(("query", "key", "value", "query_up", "gate", "up"), -2),
    **dict.fromkeys(("query_bias", "key_bias", "value_bias", "sinks"), -1),
    **dict.fromkeys(("shared_gate", "shared_up"), -2),
    **dict.fromkeys(("key_up", "value_up"), -3),
    **dict.fromkeys(("output", "down", "shared_down"), -1),
    # Recurrent-state layers: by heads, or by channels without heads.
    **{f"mamba_{name}": -2 for name in ("gate", "x", "step")},
    **{f"mamba_{name}_bias": -1 for name in ("gate", "x", "step", "x_taps")},
    **{f"mamba_{name}": -1 for name in ("rate", "offset", "skip", "norm", "output")},
    **{f"short_{name}": -2 for name in ("first", "second", "x")},
    **{f"short_{name}_bias": -1 for name in ("first", "second", "x", "taps")},
    **dict.fromkeys(("mamba_x_taps", "short_taps"), -3),
    "short_output": -1,
    # Delta rule layers: by heads, as in attention.
    **{f"delta_{name}": -2 for name in DELTA_ROWS},
    **{f"delta_{name}_taps": -3 for name in ("query", "key", "value")},
    **dict.fromkeys(("delta_offset", "delta_rate", "delta_output"), -1),
    "query_gate": -2,
}

# Parameters of kv heads, replicated if the heads are not divisible by the devices.
OF_KV_HEADS = ("key", "value", "key_bias", "value_bias")


def put_whole(name: str, array: np.ndarray) -> jax.Array:
    """Move a parameter to JAX's default device."""
    del name
    return jax.device_put(array)


def make_mesh(num_devices: int) -> jax.sharding.Mesh:
    """Return a mesh of the first devices, with the axis "tp".

    Raises:
        ValueError: if there are too few devices.
    """
    if not 1 <= num_devices <= jax.device_count():
        raise ValueError(
            f"--tensor-parallel {num_devices}: there are {jax.device_count()} devices"
        )
    automatic = (jax.sharding.AxisType.Auto,)
    return jax.sharding.Mesh(jax.devices()[:num_devices], ("tp",), automatic)


def spread_over(mesh: jax.sharding.Mesh, config: DecoderConfig) -> Put:
    """Return a function that shards each parameter without a whole copy on any device.

    Args:
        mesh: with the axis "tp".
        config: the model's configuration.

    Raises:
        ValueError: if the query heads are not divisible by the devices.
    """
    num_devices = mesh.shape["tp"]
    for num_heads in config.query_heads or (config.num_heads,):
        if num_heads % num_devices:
            raise ValueError(
                f"{num_heads} query heads cannot be shared by {num_devices} devices"
            )

    def put(name: str, array: np.ndarray) -> jax.Array:
        spec: list[str | None] = [None] * array.ndim
        axis = find_divided_axis(config, name, array.shape, num_devices)
        if axis is not None:
            spec[axis] = "tp"
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        # `device_put` would compare the values of all processes.
        return jax.make_array_from_callback(
            array.shape, where, lambda part: array[part]
        )

    return put


def find_divided_axis(
    config: DecoderConfig, name: str, shape: tuple[int, ...], num_devices: int
) -> int | None:
    """Return the sharded axis of a parameter; None if it is replicated."""
    axis = DIVIDED.get(name)
    if axis is None or shape[axis] % num_devices:
        return None
    kinds = config.layer_heads or ((config.num_kv_heads, config.head_dim),)
    if name in OF_KV_HEADS and any(heads % num_devices for heads, _ in kinds):
        return None
    return axis
