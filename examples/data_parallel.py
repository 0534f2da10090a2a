"""Data parallelism: replicas of a model with separate pools share a list of prompts.

    python examples/data_parallel.py
    python examples/data_parallel.py --replicas 4 --tensor-parallel 1 "import os"

The script uses four devices, real or simulated. Two devices share each replica of the
bundled model (its weights and kv heads are sharded), so there are two replicas. Their
pools and sequences are independent.
"""

import jax
import numpy as np
import pretrained
from generating.arguments import Parser, at_least, text
from generating.exiting import answering_errors, errors_in_one_line
from generating.options import BUNDLED
from jax.sharding import AxisType

import jkv

PROMPTS = (
    "The with statement is used to",
    "A list comprehension",
    "import os",
    "The difference between a tuple and a list",
    "def main():",
    "Return a copy of",
)
NUM_BLOCKS, BLOCK_SIZE = 64, 16  # per pool


def main() -> None:
    """Generate on all replicas; print the completions and each replica's counts."""
    parser = Parser(__doc__)
    add, number = parser.add_argument, at_least(1)
    add("prompts", nargs="*", type=text, default=PROMPTS)
    add("--replicas", type=number, default=2, help="%(default)s")
    add("--tensor-parallel", type=number, default=2, help="%(default)s")
    add("--max-new-tokens", type=number, default=32, help="%(default)s")
    options = parser.parse_args()
    jkv.keep_compiled_programs()
    with answering_errors():
        mesh = make_mesh(options.replicas, options.tensor_parallel)
        model, params = pretrained.load(BUNDLED, mesh=mesh)
        tokenizer = pretrained.load_tokenizer(BUNDLED)
        prompts = [each.ids for each in tokenizer.encode_batch([*options.prompts])]
        longest = max(map(len, prompts)) + options.max_new_tokens
        if longest > NUM_BLOCKS * BLOCK_SIZE:
            raise ValueError(f"a pool cannot hold a sequence of {longest} tokens")
    config = jkv.CacheConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=4,
        max_context_length=longest,
        dtype=params["embedding"].dtype,
        **model.cache_fields,
    )
    cache = jkv.init(config, mesh=mesh, pools="dp", heads="tp")
    generate = jkv.jitted.generate
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
    """Return a mesh with the axes "dp" and "tp"; devices are simulated if needed."""
    count = num_replicas * num_sharing
    # Applies to CPUs only, and must precede JAX's initialization.
    jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() < count:
        raise ValueError(f"{count} devices are needed, {jax.device_count()} found")
    devices = np.asarray(jax.devices()[:count]).reshape(num_replicas, num_sharing)
    return jax.sharding.Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def pad(prompts: list[list[int]]) -> np.ndarray:
    """Return prompts as i32[B, P], padded with -1."""
    padded = np.full((len(prompts), max(map(len, prompts))), -1, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded


if __name__ == "__main__":
    with errors_in_one_line():
        main()
