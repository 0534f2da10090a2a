"""Replicas of a model, each with a pool of its own: prompts are dealt to them.

    python examples/data_parallel.py
    python examples/data_parallel.py --replicas 4 --tensor-parallel 1 "import os"

Four devices: those that are there, or four simulated ones. Two share a replica of the
bundled model (its weights and the kv heads are divided between them), so there are two
replicas with a pool each. Blocks and sequences of one know nothing of the other's.
"""

import argparse

import jax
import numpy as np
import pretrained
from generating.options import BUNDLED
from jax.sharding import AxisType

import jkv
from jkv.commands.compiled_programs import keep_compiled_programs

PROMPTS = (
    "The with statement is used to",
    "A list comprehension",
    "import os",
    "The difference between a tuple and a list",
    "def main():",
    "Return a copy of",
)


def main() -> None:
    """Continue prompts on all replicas, and say what each did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--replicas", type=int, default=2, help="%(default)s")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="%(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="%(default)s")
    options = parser.parse_args()
    keep_compiled_programs()
    mesh = make_mesh(options.replicas, options.tensor_parallel)

    model, params = pretrained.load(BUNDLED, mesh=mesh)
    tokenizer = pretrained.load_tokenizer(BUNDLED)
    prompts = [each.ids for each in tokenizer.encode_batch([*options.prompts])]
    config = jkv.CacheConfig(
        num_blocks=64,  # of each pool
        max_sequences=4,
        max_context_length=max(map(len, prompts)) + options.max_new_tokens,
        dtype=params["embedding"].dtype,
        **model.cache_fields,
    )
    cache = jkv.init(config, mesh=mesh, pools="dp", heads="tp")
    generate = jax.jit(
        jkv.generate,
        static_argnames=("model", "max_new_tokens", "max_running", "row_counts"),
        donate_argnames="cache",
    )
    cache, result = generate(
        model,
        params,
        cache,
        pad(prompts),
        max_new_tokens=options.max_new_tokens,
        max_running=4,
        row_counts=(16,),
    )
    for prompt, tokens, length in zip(
        prompts, np.asarray(result.tokens), np.asarray(result.lengths), strict=True
    ):
        print(repr(tokenizer.decode([*prompt, *tokens[:length]])))

    print(f"\n{mesh.size} devices, {config.bytes / 2**10:,.0f} KiB of cache a replica")
    for rank, pool in enumerate(jkv.split_pools(cache)):
        devices = [device.id for device in mesh.devices[rank]]
        stats = jkv.stats(pool)
        share = sum(
            shard.data.nbytes
            for array in cache.storage[0].arrays.values()
            for shard in array.addressable_shards
            if shard.device.id == devices[0]
        )
        print(
            f"replica {rank} on devices {devices}: {stats.allocations} blocks taken, "
            f"{stats.peak_blocks} at one time, {stats.free_blocks} free again; "
            f"keys and values {share / 2**10:,.0f} KiB on each device"
        )


def make_mesh(num_replicas: int, num_sharing: int) -> jax.sharding.Mesh:
    """Return a mesh with the axes "dp" and "tp", of simulated devices if need be."""
    count = num_replicas * num_sharing
    # Only before JAX is asked for a device, and for CPUs only.
    jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() < count:
        raise SystemExit(f"error: {count} devices wanted, {jax.device_count()} there")
    devices = np.asarray(jax.devices()[:count]).reshape(num_replicas, num_sharing)
    return jax.sharding.Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def pad(prompts: list[list[int]]) -> np.ndarray:
    """Return prompts as i32[B, P], -1 past each one's end."""
    padded = np.full((len(prompts), max(map(len, prompts))), -1, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded


if __name__ == "__main__":
    main()
