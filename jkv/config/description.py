"""The sizes of a cache in words."""

from jkv.config.layout import Sizes, lay_out, lay_out_storage
from jkv.config.units import human_bytes


def describe(sizes: Sizes) -> str:
    """Say in a line each what the model, the blocks, the tables and the bytes are.

    Args:
      sizes: of the cache.
    """
    heads = f"{sizes.num_kv_heads} kv heads of {sizes.head_dim}"
    if sizes.value_head_dim != sizes.head_dim:
        where = " in the keys" if sizes.values_in_keys else ""
        heads += f" (values of {sizes.value_head_dim}{where})"
    what = [f"{sizes.num_layers} layers", heads, sizes.dtype.name]
    what += ["tokens recorded"] * sizes.record_tokens
    what += ["prefix caching"] * sizes.prefix_caching
    if sizes.sliding_window is not None:
        sinks = f" and {sizes.num_sink_tokens} sinks" * (sizes.num_sink_tokens > 0)
        what.append(f"a window of {sizes.sliding_window:,} tokens{sinks}")
    tokens = sizes.num_blocks * sizes.block_size
    stored = sum(array.nbytes for array in lay_out_storage(sizes).values())
    total = sum(array.nbytes for array in lay_out(sizes).values())
    return (
        f"{', '.join(what)}\n"
        f"{sizes.num_blocks:,} blocks of {sizes.block_size} = {tokens:,} tokens, "
        f"{human_bytes(stored // tokens)} each\n"
        f"{sizes.max_sequences:,} sequences of up to {sizes.max_context_length:,} "
        f"tokens\n"
        f"{human_bytes(total)}, {human_bytes(total - stored)} of it metadata"
    )
