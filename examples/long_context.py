"""Context parallelism: one long sequence, with every block split over devices.

    python examples/long_context.py
    python examples/long_context.py --devices 8 --module argparse --tokens 1800

The bundled model continues the documentation of a module, on real or simulated devices.
Model and loop are the same as on one device; only `jkv.init` gets a mesh.
"""

import argparse
import pydoc

import jax
import numpy as np
import pretrained
from generating.arguments import Parser, at_least
from generating.exiting import answering_errors, errors_in_one_line
from generating.options import BUNDLED
from jax.sharding import AxisType

import jkv

BLOCK_SIZE = 16  # per device


def main() -> None:
    """Continue a long prompt, and print each device's share of the cache."""
    parser = Parser(__doc__)
    add, number = parser.add_argument, at_least(1)
    add("--devices", type=number, default=4, help="%(default)s")
    add("--module", type=document, default="textwrap", help="%(default)s")
    add("--tokens", type=number, default=1000, help="%(default)s")
    add("--max-new-tokens", type=number, default=32, help="%(default)s")
    options = parser.parse_args()
    jkv.keep_compiled_programs()
    with answering_errors():
        mesh = make_mesh(options.devices)
        model, params = pretrained.load(BUNDLED)
        tokenizer = pretrained.load_tokenizer(BUNDLED)
        prompt = tokenizer.encode(options.module).ids[: options.tokens]
        length = len(prompt) + options.max_new_tokens
        if length > model.config.max_context_length:
            raise ValueError(
                f"{length} tokens do not fit the context of "
                f"{model.config.max_context_length}"
            )
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.device_put(params, everywhere)

    config = jkv.CacheConfig.for_context_length(
        length,
        max_sequences=1,
        block_size=BLOCK_SIZE * options.devices,
        dtype=params["embedding"].dtype,
        **model.cache_fields,
    )
    cache = jkv.init(config, mesh=mesh, context="cp")
    generate = jkv.jitted.generate
    cache, result = generate(
        model,
        params,
        cache,
        [prompt],
        max_new_tokens=options.max_new_tokens,
        row_counts=(64,),
    )
    print(tokenizer.decode(prompt[-64:]), end="")
    print(tokenizer.decode(np.asarray(result.tokens[0, : result.lengths[0]]).tolist()))

    length = len(prompt) + int(result.lengths[0])
    print(f"\n{length} tokens in blocks of {config.block_size} on {mesh.size} devices:")
    keys = cache.storage[0].key_pool
    for rank, shard in enumerate(keys.addressable_shards):
        device = np.arange(length) % config.block_size // BLOCK_SIZE
        print(
            f"  device {shard.device.id}: {np.count_nonzero(device == rank)} tokens, "
            f"keys of {shard.data.nbytes / 2**10:,.0f} KiB "
            f"of {keys.nbytes / 2**10:,.0f}"
        )


def document(name: str) -> str:
    """Return the documentation of a module, as printed by `help`."""
    try:
        return pydoc.plain(pydoc.render_doc(name))
    except (ImportError, pydoc.ErrorDuringImport) as error:
        text = f"must be a module that Python finds, got {name!r}"
        raise argparse.ArgumentTypeError(text) from error


def make_mesh(count: int) -> jax.sharding.Mesh:
    """Return a mesh with the axis "cp"; its devices are simulated if needed."""
    # Applies to CPUs only, and must precede JAX's initialization.
    jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() < count:
        raise ValueError(f"{count} devices are needed, {jax.device_count()} found")
    return jax.sharding.Mesh(
        np.asarray(jax.devices()[:count]), ("cp",), axis_types=(AxisType.Auto,)
    )


if __name__ == "__main__":
    with errors_in_one_line():
        main()
