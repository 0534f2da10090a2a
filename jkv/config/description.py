"""The sizes of a cache in words."""

from collections.abc import Iterator

from jkv.config.layout import Sizes, count_bytes, lay_out, lay_out_storage
from jkv.config.units import human_bytes


def describe(groups: tuple[Sizes, ...], prefix_caching: bool) -> list[str]:
    """Say in two lines for each group what the model and the blocks are, then the rest.

    Args:
      groups: the sizes of each group of layers.
      prefix_caching: whether there is a prefix index.

    Returns:
      The lines; the last two are the tables and the bytes.
    """
    lines = [
        line for sizes in groups for line in _describe_group(sizes, prefix_caching)
    ]
    stored = sum(count_bytes(lay_out_storage(sizes).values()) for sizes in groups)
    total = count_bytes(lay_out(groups, prefix_caching).values())
    return [
        *lines,
        f"{groups[0].max_sequences:,} sequences of up to "
        f"{groups[0].max_context_length:,} tokens",
        f"{human_bytes(total)}, {human_bytes(total - stored)} of it metadata",
    ]


def _describe_group(sizes: Sizes, prefix_caching: bool) -> Iterator[str]:
    """Say of a group what its layers keep, and how many blocks there are for it."""
    heads = f"{sizes.num_kv_heads} kv heads of {sizes.head_dim}"
    if sizes.value_head_dim != sizes.head_dim:
        where = " in the keys" if sizes.values_in_keys else ""
        heads += f" (values of {sizes.value_head_dim}{where})"
    what = [f"{sizes.num_layers} layers", heads, sizes.dtype.name]
    what += ["tokens recorded"] * sizes.record_tokens
    what += ["prefix caching"] * prefix_caching
    if sizes.sliding_window is not None:
        sinks = f" and {sizes.num_sink_tokens} sinks" * (sizes.num_sink_tokens > 0)
        what.append(f"a window of {sizes.sliding_window:,} tokens{sinks}")
    yield ", ".join(what)
    tokens = sizes.num_blocks * sizes.block_size
    each = count_bytes(lay_out_storage(sizes).values()) // tokens
    yield (
        f"{sizes.num_blocks:,} blocks of {sizes.block_size} = {tokens:,} tokens, "
        f"{human_bytes(each)} each"
    )
