"""Performance estimates for large models on hosts of eight GPUs (docs/scale.md).

    python benchmarks/scale.py

Nothing is allocated or timed. Weights are counted from the shapes of the decoder in
`examples/pretrained`, with its sharding; the cache is sized by `jkv.plan`; collectives
are those of the decoder's compiled step (`benchmarks/devices.py` counts them, and a
test compares the formulas with compiled modules). Hardware figures are the vendors'
(sources in docs/scale.md).
"""

import dataclasses
import json
import pathlib
import pickle
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jkv.commands.capacity import Plan, make_plan

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # the examples are not a package

import pretrained  # noqa: E402
from replicated.prefixes import (  # noqa: E402
    CHARACTERS_PER_TOKEN,
    HASH_BYTES,
    PIECE_CHARACTERS,
    STATS_SECONDS,
    PrefixTable,
    hash_beginnings,
)

# Per GPU, in bytes and bytes per second: MI300X.
MEMORY = "192GiB"
MEMORY_SPEED = 5.3e12
LINK_SPEED = 64e9  # one of seven Infinity Fabric links, one direction
BUS_SPEED = 64e9  # PCIe 5.0 x16, one direction
NETWORK_SPEED = 50e9  # 400 Gb/s per GPU
OPERATIONS = 1307e12  # bfloat16, dense, per second

DEVICES_PER_HOST = 8
CONTEXTS = (4096, 16_384, 131_072)
SEQUENCES, CONTEXT = 64, 4096  # per host, in the analysed step
MOVED_TOKENS = 1024

COMMON = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": COMMON
    | {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Llama 3.1 405B": COMMON
    | {
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A model on some hosts: replicas, each sharded over some devices."""

    model: str
    num_hosts: int
    num_sharing: int  # devices of a replica, TP

    @property
    def num_replicas(self) -> int:
        """Number of replicas, each with a pool of its own."""
        return self.num_hosts * DEVICES_PER_HOST // self.num_sharing

    @property
    def name(self) -> str:
        """Label in the tables."""
        hosts = "1 host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        return f"{self.model}, {hosts}, TP {self.num_sharing} x DP {self.num_replicas}"


LAYOUTS = (
    Layout("Llama 3.1 8B", 1, 1),
    Layout("Llama 3.1 8B", 1, 8),
    Layout("Llama 3.1 8B", 4, 1),
    Layout("Llama 3.1 8B", 4, 8),
    Layout("Llama 3.1 8B", 4, 32),
    Layout("Llama 3.1 405B", 1, 8),
    Layout("Llama 3.1 405B", 4, 8),
    Layout("Llama 3.1 405B", 4, 32),
)


def count_weights(raw: dict[str, Any], num_sharing: int, dtype: str) -> tuple[int, int]:
    """Return the weight bytes on each device, and of these the replicated ones."""
    config = pretrained.parse_config(raw)
    params = jax.eval_shape(
        lambda: pretrained.random_params(config, jax.random.key(0), jnp.dtype(dtype))
    )
    divided, whole = 0, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        nbytes = leaf.size * leaf.dtype.itemsize
        axis = pretrained.find_divided_axis(config, name, leaf.shape, num_sharing)
        if axis is None:
            whole += nbytes
        else:
            divided += nbytes // num_sharing
    return divided + whole, whole


def count_sums(
    raw: dict[str, Any], num_sharing: int, num_rows: int, itemsize: int
) -> tuple[int, int]:
    """Return the number of a step's all-reduces, and the bytes of each.

    A layer reduces the outputs of its two second matrices, [E] per row.
    """
    if num_sharing == 1:
        return 0, 0
    return 2 * raw["num_hidden_layers"], num_rows * raw["hidden_size"] * itemsize


def find_seconds_to_sum(num_sharing: int, nbytes: int) -> float:
    """Return the transfer time of an all-reduce at the links' bandwidth.

    Within a host each device sends its eighths to all others, and receives the sums.
    Between hosts the sums of an eighth travel in a ring over each device's network
    GPU.
    """
    hosts = -(-num_sharing // DEVICES_PER_HOST)
    local = min(num_sharing, DEVICES_PER_HOST)
    inside = 2 * nbytes / local / LINK_SPEED
    between = 2 * (hosts - 1) / hosts * nbytes / local / NETWORK_SPEED
    return inside + between


def plan(layout: Layout) -> Plan:
    """Return the plan of `jkv.plan` with these weights, for each device."""
    raw = MODELS[layout.model]
    weights, _ = count_weights(raw, layout.num_sharing, "bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(raw))
        return make_plan(
            folder,
            MEMORY,
            tensor_parallel=layout.num_sharing,
            # Replicated weights count once per device.
            weights=weights * layout.num_sharing,
            max_context_length=CONTEXTS[-1],
        )


def memory_rows() -> Iterator[dict[str, str]]:
    """Yield the memory of each device, and the largest batch of a replica."""
    for layout in LAYOUTS:
        found = plan(layout)
        weights, whole = count_weights(
            MODELS[layout.model], layout.num_sharing, "bfloat16"
        )
        yield {
            "layout": layout.name,
            "weights, GiB": f"{weights / 2**30:.1f}",
            "on all alike": "-" if layout.num_sharing == 1 else f"{whole / 2**30:.1f}",
            "cache, GiB": f"{found.budget / 2**30:.1f}",
            "KiB a token": f"{found.config.bytes_per_token / 2**10:g}",
        } | {
            f"batch of {context:,}": f"{found.sequences[context]:,}"
            for context in CONTEXTS
        }


def step_rows() -> Iterator[dict[str, str]]:
    """Yield the reads and reductions of a replica's decode step, and the read time."""
    for layout in LAYOUTS:
        raw, sharing = MODELS[layout.model], layout.num_sharing
        weights, _ = count_weights(raw, sharing, "bfloat16")
        # A step reads only some rows of the embedding.
        read = weights - raw["vocab_size"] * raw["hidden_size"] * 2
        batch = SEQUENCES * layout.num_hosts // layout.num_replicas
        cache = batch * CONTEXT * plan(layout).config.bytes_per_token
        seconds = (read + cache) / MEMORY_SPEED
        count, nbytes = count_sums(raw, sharing, batch, 2)
        row = {
            "layout": layout.name,
            "batch": str(batch),
            "weights, GB": f"{read / 1e9:.2f}",
            "cache, GB": f"{cache / 1e9:.2f}",
            "ms to read": f"{1e3 * seconds:.2f}",
            "tokens/s at most": f"{layout.num_replicas * batch / seconds:,.0f}",
            "all-reduces": str(count),
        }
        if count:
            row |= {
                "KiB of each": f"{nbytes / 2**10:,g}",
                "us to move": f"{1e6 * find_seconds_to_sum(sharing, nbytes):.1f}",
                "us it may take": f"{1e6 * seconds / count:.0f}",
            }
        yield row


def moved_rows() -> Iterator[dict[str, str]]:
    """Yield the bytes and minimal time of `swap_out` and `swap_in` for 1,024 tokens."""
    for model, raw in MODELS.items():
        weights, _ = count_weights(raw, 1, "bfloat16")
        computing = weights * MOVED_TOKENS / OPERATIONS / DEVICES_PER_HOST
        for dtype in ("bfloat16", "int8"):
            with tempfile.TemporaryDirectory() as folder:
                pathlib.Path(folder, "config.json").write_text(json.dumps(raw))
                config = make_plan(folder, MEMORY, dtype=dtype).config
            nbytes = config.bytes_per_token * MOVED_TOKENS
            yield {
                "model, cache": f"{model}, {dtype}",
                "MiB": f"{nbytes / 2**20:.0f}",
                "ms, 1 card's bus": f"{1e3 * nbytes / BUS_SPEED:.2f}",
                "ms, 8 cards' buses": f"{1e3 * nbytes / BUS_SPEED / 8:.2f}",
                "ms, 1 network card": f"{1e3 * nbytes / NETWORK_SPEED:.2f}",
                "ms, 8 network cards": f"{1e3 * nbytes / NETWORK_SPEED / 8:.2f}",
                # Two operations per weight, which has two bytes.
                "ms to compute": f"{1e3 * computing:.1f}",
            }


def router_rows() -> Iterator[dict[str, str]]:
    """Yield memory, lookups and updates of the router of `examples/serve_ray.py`."""
    layout = LAYOUTS[0]
    found = plan(layout)
    num_tokens = found.budget // found.config.bytes_per_token
    num_pieces = num_tokens * CHARACTERS_PER_TOKEN // PIECE_CHARACTERS
    text = "".join(map(chr, range(CONTEXT * CHARACTERS_PER_TOKEN)))
    hashes = hash_beginnings(text)
    # The table's entries of one replica, full.
    table = PrefixTable(num_pieces)
    table.note("replica", [number.to_bytes(HASH_BYTES) for number in range(num_pieces)])
    stats = {"free_blocks": num_tokens // 16, "places": 256, "version": 100_000}
    bytes_per_second = len(pickle.dumps(stats)) / STATS_SECONDS
    for num_replicas in (8, 64, 512):
        yield {
            "replicas": f"{num_replicas}",
            "hashes held": f"{num_replicas * num_pieces:,}",
            "MB of them": f"{num_replicas * table.count_bytes() / 1e6:,.0f}",
            # A binary search in each replica's hashes.
            "look-ups for a request": f"{num_replicas * len(hashes).bit_length():,}",
            "KiB of hashes sent with it": f"{HASH_BYTES * len(hashes) / 2**10:g}",
            "KB/s that replicas report": f"{num_replicas * bytes_per_second / 1e3:.1f}",
        }


def make_table(rows: Iterator[dict[str, str]]) -> str:
    """Return rows as a Markdown table; missing values are dashes."""
    found = list(rows)
    heads = list(max(found, key=len))
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    lines += [[row.get(head, "-") for head in heads] for row in found]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def make_tables() -> dict[str, str]:
    """Return the tables of docs/scale.md by name."""
    return {
        "memory": make_table(memory_rows()),
        "step": make_table(step_rows()),
        "moved": make_table(moved_rows()),
        "router": make_table(router_rows()),
    }


if __name__ == "__main__":
    for name, table in make_tables().items():
        print(f"{name}\n\n{table}\n")
