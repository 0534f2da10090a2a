"""The sizes of a cache in words."""

from jkv.config.arrays import count_bytes
from jkv.config.layout import Sizes, lay_out, lay_out_storage
from jkv.config.state_layout import StateSizes, lay_out_state_storage
from jkv.config.units import human_bytes


def describe(
    groups: tuple[Sizes, ...],
    prefix_caching: bool,
    states: tuple[StateSizes, ...] = (),
    state_numbers: tuple[int, ...] = (),
    *,
    numbered: bool = False,
) -> list[str]:
    """Say in two lines for each group what the model and the blocks are, then the rest.

    Args:
      groups: the sizes of each group of layers with blocks.
      prefix_caching: whether there is a prefix index.
      states: the sizes of each group of layers with a state.
      state_numbers: their places among all groups.
      numbered: whether each group says its number.

    Returns:
      The lines; the last two are the tables and the bytes.
    """
    of_groups = [_describe_group(sizes, prefix_caching) for sizes in groups]
    for number, of_states in zip(state_numbers, states, strict=True):
        of_groups.insert(number, _describe_states(of_states, prefix_caching))
    lines = []
    for number, (first, second) in enumerate(of_groups):
        lines += [f"group {number}: {first}" if numbered else first, second]
    arrays = lay_out(groups, prefix_caching, states)
    metadata = [a for path, a in arrays.items() if path.startswith("metadata.")]
    first_sizes = groups[0] if groups else states[0]
    return [
        *lines,
        f"{first_sizes.max_sequences:,} sequences of up to "
        f"{first_sizes.max_context_length:,} tokens",
        f"{human_bytes(count_bytes(arrays.values()))}, "
        f"{human_bytes(count_bytes(metadata))} of it metadata",
    ]


def _describe_states(sizes: StateSizes, prefix_caching: bool) -> tuple[str, str]:
    """Say of a group what state its layers keep, and how many there is room for."""
    of_states = count_bytes(lay_out_state_storage(sizes, False).values())
    shapes = (
        f"{name} {list(shape)} {dtype.name}" for name, shape, dtype in sizes.arrays
    )
    what = [f"{sizes.num_layers} layers", f"a state of {', '.join(shapes)}"]
    if sizes.max_pending:
        what.append(f"{sizes.max_pending} tokens can be taken back")
    each = human_bytes(of_states // sizes.max_sequences)
    places = f"{sizes.max_sequences:,} states"
    if prefix_caching:
        places += f" and {sizes.num_snapshots:,} snapshots"
    return ", ".join(what), f"{places}, {each} each"


def _describe_group(sizes: Sizes, prefix_caching: bool) -> tuple[str, str]:
    """Say of a group what its layers keep, and how many blocks there are for it."""
    heads = f"{sizes.num_kv_heads} kv heads of {sizes.head_dim}"
    if sizes.value_head_dim != sizes.head_dim:
        where = " in the keys" if sizes.values_in_keys else ""
        heads += f" (values of {sizes.value_head_dim}{where})"
    what = [f"{sizes.num_layers} layers", heads, str(sizes.formats)]
    what += ["tokens recorded"] * sizes.record_tokens
    what += ["prefix caching"] * prefix_caching
    if sizes.sliding_window is not None:
        sinks = f" and {sizes.num_sink_tokens} sinks" * (sizes.num_sink_tokens > 0)
        what.append(f"a window of {sizes.sliding_window:,} tokens{sinks}")
    tokens = sizes.num_blocks * sizes.block_size
    each = count_bytes(lay_out_storage(sizes).values()) // tokens
    blocks = (
        f"{sizes.num_blocks:,} blocks of {sizes.block_size} = {tokens:,} tokens, "
        f"{human_bytes(each)} each"
    )
    return ", ".join(what), blocks
