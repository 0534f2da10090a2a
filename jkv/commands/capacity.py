"""Capacity planning: `python -m jkv.plan --model FOLDER --memory 192GiB`.

It reads a model's sizes from its config.json or GGUF file, subtracts weights and a
reserve from each device's memory, and reports the cache that fits in the rest. Nothing
is allocated.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from jkv.commands.exiting import BAD_VALUE, Parser
from jkv.config.cache_config import CacheConfig
from jkv.config.counts import (
    Windows,
    count_bytes,
    count_windows,
    human_bytes,
    parse_bytes,
)
from jkv.config.gguf_file import find_file, read_file
from jkv.config.grouped_config import GroupedConfig, as_grouped
from jkv.config.grouping import ModelLayers, fit_context_length
from jkv.config.huggingface import DEFAULT_SEQUENCES, read_sizes
from jkv.config.layer_kinds import refuse_different
from jkv.config.layers import Kept
from jkv.config.layout import describe
from jkv.config.sizing import find_most, fit_memory
from jkv.formats.table import COSTS, format_cost

# Context lengths up to the model's longest, which is added.
CONTEXT_LENGTHS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)

# Only files of the first pattern with any are counted: others may hold the same weights
# again, such as Mistral's consolidated.safetensors.
WEIGHT_FILES = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "*.safetensors",
    "pytorch_model*.bin",
)

BYTES_OF_WHOLE = 2  # bytes of a GGUF weight dequantized to bfloat16 for computing

# Fields chosen by a plan for each length.
TABLES = {"max_context_length", "max_sequences"}

# Options beside model and memory: fields of `PlanOptions` and of `CacheConfig`.
OPTIONS: dict[str, tuple[type, str]] = {
    "tensor-parallel": (int, "devices that share the kv heads (heads=)"),
    "context-parallel": (int, "devices that share the tokens of each block (context=)"),
    "data-parallel": (int, "replicas, each with a pool of its own (pools=)"),
    "weights": (str, "their bytes; default: the weight files in the folder"),
    "reserve": (float, "share of the memory kept free; default 0.1"),
    "step-tokens": (int, "most of a sequence in one step, with windows; default 512"),
    "block-size": (int, "tokens of a block; default 16"),
    "max-sequences": (int, f"default {DEFAULT_SEQUENCES}"),
    "max-context-length": (int, "default: the model's"),
    "dtype": (str, "of the cache; default: the model's"),
    "value-dtype": (
        str,
        f"of its values: int4 beside int8 holds 1.3 times as many tokens (perplexity "
        f"{format_cost('int8', 'int4').replace('%', '%%')}); default: as --dtype",
    ),
    "num-layers": (int, "with keys; default: the model's"),
    "max-pending": (int, "tokens to roll back in states, as many as draft tokens"),
    "snapshot-every": (int, "tokens between state snapshots, with --prefix-caching"),
    "num-snapshots": (int, "state snapshots, with --prefix-caching"),
}

# A smaller number without a unit was probably meant in gigabytes.
LEAST_MEMORY = 2**20


class StateBytes(NamedTuple):
    """Size of a sequence's recurrent states, summed over layers."""

    num_layers: int  # recurrent-state layers
    summed: int  # bytes of accumulated states
    past: int  # bytes of convolution inputs


def count_state_bytes(kept: tuple[Kept, ...] | None, dtype: Any) -> StateBytes | None:
    """Return the size of a sequence's states; None without recurrent-state layers."""
    states = [layer.state for layer in kept or () if layer.state is not None]
    if not states:
        return None
    sizes = {True: 0, False: 0}
    for name, array in (each for state in states for each in state.arrays):
        itemsize = jnp.dtype(array.dtype or dtype).itemsize
        sizes[name.startswith("past")] += math.prod(array.shape) * itemsize
    return StateBytes(len(states), sizes[False], sizes[True])


@dataclasses.dataclass(frozen=True)
class Layers:
    """Properties of the model and the plan that do not depend on the context length."""

    model: ModelLayers
    step_tokens: int  # most tokens of a sequence per step
    num_parts: int  # devices that share each block
    sizes: dict[str, Any]  # other fields of `CacheConfig`

    def divide(self, num_devices: int, sizes: dict[str, Any]) -> "Layers":
        """Return the layers of each device, with its fields and heads of states."""
        kept = self.model.kept and tuple(
            layer._replace(state=layer.state and layer.state.divide(num_devices))
            for layer in self.model.kept
        )
        model = self.model._replace(kept=kept)
        return dataclasses.replace(self, model=model, sizes=self.sizes | sizes)

    def weigh(self, config: CacheConfig | GroupedConfig) -> int:
        """Return the bytes per device: its part of the blocks, and all the rest."""
        stored = [g.sizes.lay_out_storage() for g in as_grouped(config).block_groups]
        blocks = sum(count_bytes(each.values()) for each in stored)
        return config.bytes - blocks + blocks // self.num_parts

    def fit_memory(self, fields: dict[str, Any], budget: int) -> CacheConfig:
        """Return the configuration with the most blocks in one pool."""
        return fit_memory(CacheConfig, budget, weigh=self.weigh, **fields)

    def fit(self, length: int, max_sequences: int) -> CacheConfig | GroupedConfig:
        """Return the configuration for sequences of a length, with tables for them."""
        if not any(self.model.windows) and self.model.kept is None:
            return CacheConfig.for_context_length(
                length, max_sequences=max_sequences, **self.sizes
            )
        left_out = {"num_layers", "prefix_caching"}
        sizes = {n: value for n, value in self.sizes.items() if n not in left_out}
        return fit_context_length(
            GroupedConfig,
            self.model,
            sizes | {"max_context_length": length},
            step_tokens=self.step_tokens,
            prefix_caching=self.sizes.get("prefix_caching", False),
            max_sequences=max_sequences,
            budget_bytes=None,
        )

    def fit_most(self, length: int, budget: int) -> CacheConfig | GroupedConfig | None:
        """Return the configuration of the most sequences; None if none fits."""
        most = find_most(lambda count: self.weigh(self.fit(length, count)), budget)
        return self.fit(length, most) if most else None

    def count_bytes(self, length: int) -> int:
        """Return the storage bytes of one sequence of a length."""
        return self.fit(length, 1).storage_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Capacity of one of several equal devices; bytes and tokens as ints."""

    memory: int  # per device
    num_devices: int  # per replica of the model
    num_parts: int  # devices of a replica that share the tokens of each block
    num_replicas: int
    weights: int  # of the whole model
    weights_on_each: int  # per device
    reserve: int  # per device
    budget: int  # for the cache, per device
    bytes_per_token: int  # summed over the devices of a replica
    # With the kv heads of one device, and whole blocks: all layers with keys and values
    # in one pool; None without such layers.
    config: CacheConfig | None
    sequences: dict[int, int]  # largest number at once, by context length
    # With windows or states, likewise for the longest context.
    groups: GroupedConfig | None
    cache_bytes: int  # of the reported configuration, per device
    bytes_needed: dict[int, int]  # of a sequence, by length, summed over devices
    windows: Windows | None  # of the model's layers
    states: StateBytes | None  # of a sequence, summed over devices
    notes: list[str]

    def report(self) -> str:
        """Return the plan as text, in human units."""
        devices = self.num_devices
        many = f"each of {devices} devices" if devices > 1 else "one device"
        if self.num_replicas > 1:
            many += f" of each of {self.num_replicas} replicas"
        lines = [
            f"memory      {human_bytes(self.memory)} on {many}",
            f"            - {human_bytes(self.weights_on_each)} weights, "
            f"{human_bytes(self.reserve)} reserve "
            f"= {human_bytes(self.budget)} for the cache",
            *self._described(),
            *self._weighed(),
            *self._formats(),
            "",
            self._introduction(),
            *self._table(),
        ]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def _weighed(self) -> Iterator[str]:
        """Yield the lines of the bytes per token, and of a sequence's states."""
        if self.num_parts > 1:
            yield (
                f"on each     {human_bytes(self.cache_bytes)}: of each block 1/"
                f"{self.num_parts}, the metadata whole"
            )
        if self.config is not None:
            each = human_bytes(self.config.bytes_per_token / self.num_parts)
            here = f", {each} on each" if self.num_devices > 1 else ""
            yield f"per token   {human_bytes(self.bytes_per_token)}{here}"
        if self.states is not None:
            number, summed, past = self.states
            parts = []
            if summed:
                tokens = summed // self.bytes_per_token if self.bytes_per_token else 0
                like = f", as much as {tokens:,} tokens" if tokens else ""
                parts.append(f"{human_bytes(summed)} of memory{like}")
            if past:
                parts.append(f"{human_bytes(past)} of tokens for convolutions")
            yield f"a sequence  {number} layers with a state: {'; '.join(parts)}"

    def _formats(self) -> Iterator[str]:
        """Yield a line for each quantized format, with its capacity and cost."""
        config = self.config
        if config is None or config.values_in_keys or config.head_dim % 2:
            return
        head = "formats"
        for key, value in COSTS:
            other = dataclasses.replace(config, dtype=key, value_dtype=value)
            times = config.bytes_per_token / other.bytes_per_token
            if times > 1:
                names = key if key == value else f"{key} keys, {value} values"
                yield (
                    f"{head:12}{names}: {times:.1f} times the tokens, perplexity "
                    f"{format_cost(key, value)}"
                )
                head = ""

    def _introduction(self) -> str:
        """Return the introduction to the table of context lengths."""
        shown = self.groups or self.config
        assert shown is not None  # a plan has one of the two
        return (
            f"The tables above are for {shown.max_sequences:,} sequences. Each line "
            f"below is a configuration of its\nown, with tables for all sequences of "
            f"its length that fit (max_sequences):"
        )

    def _table(self) -> Iterator[str]:
        """Yield a line for each context length; with windows, also without eviction."""
        head = "context length   sequences at once"
        if self.windows or self.states:
            head += "   bytes of each"
        if self.windows:
            head += "   all tokens kept"
        yield head
        for length, number in self.sequences.items():
            line = f"{length:14,}   {number:17,}"
            if self.windows or self.states:
                line += f"   {human_bytes(self.bytes_needed[length]):>13}"
            if self.windows:
                line += f"   {human_bytes(length * self.bytes_per_token):>15}"
            yield line

    def _described(self) -> Iterator[str]:
        """Yield the lines of the configuration's own description, with names."""
        if self.groups:
            sizes, has_index = self.groups.sizes, self.groups.prefix_caching
            heads = [f"group {i}" for i in range(len(sizes))]
        else:
            assert self.config is not None  # a plan has one of the two
            sizes, has_index = (self.config.sizes,), self.config.prefix_caching
            many = f"{self.num_parts} devices" if self.num_parts > 1 else "device"
            heads = [many if self.num_devices > 1 else "model"]
        lines = describe(sizes, has_index)
        names = [
            name
            for head, each in zip(heads, sizes, strict=True)
            for name in (head, each.kind)
        ]
        for name, line in zip([*names, "tables", ""], lines, strict=True):
            yield f"{name:12}{line}"


class PlanOptions(NamedTuple):
    """Options of a plan beside fields of the cache's configuration.

    Devices share the kv heads of each layer (heads are replicated beyond their number),
    share the tokens of each block, as `init(context=)` shards them, or are replicas
    with pools of their own, as `init(pools=)`; the plan's numbers are of one replica.
    """

    tensor_parallel: int = 1
    context_parallel: int = 1
    data_parallel: int = 1
    weights: int | str | None = None  # of the whole model; None: the files'
    reserve: float = 0.1  # share of the memory kept free
    step_tokens: int = 512  # of a sequence, kept beyond a window
    # Of recurrent-state layers: tokens to roll back, and snapshots.
    max_pending: int = 0
    num_snapshots: int = 0
    snapshot_every: int | None = None

    @property
    def of_states(self) -> dict[str, Any]:
        """Fields of `StateConfig`."""
        return {name: getattr(self, name) for name in self._fields[-3:]}

    def check(self) -> None:
        """Raise for invalid values."""
        if self.step_tokens < 1:
            raise ValueError(f"step_tokens must be at least 1, got {self.step_tokens}")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve must be >= 0 and < 1, got {self.reserve}")
        for number in self[:3]:
            if number < 1:
                raise ValueError(
                    f"tensor_parallel, context_parallel and data_parallel must be at "
                    f"least 1 device, got {number}"
                )


def make_plan(folder: str | Path, memory: int | str, **options: Any) -> Plan:
    """Plan a cache beside a model, from a folder, a config.json or a GGUF file.

    `memory` is the size of each device, bytes or a string such as "192GiB". Options are
    the fields of `PlanOptions` and of `CacheConfig`; `num_layers` plans for as many
    layers with keys and values, without recurrent states. Raises ValueError if nothing
    fits or a value is invalid.
    """
    plan = PlanOptions(
        **{n: options.pop(n) for n in PlanOptions._fields if n in options}
    )
    plan.check()
    tensor_parallel, context_parallel, data_parallel, *_ = plan
    total = _read_memory(memory)
    kept_back = int(total * plan.reserve)
    found = read_sizes(folder, options, with_states=True)
    refuse_different(found.layer_heads, folder)
    notes, windows = found.notes, count_windows(found.layer_windows)
    if "sliding_window" in options:
        windows = None  # the option applies to all layers
    fields = {"max_sequences": DEFAULT_SEQUENCES} | found.fields | options
    whole = CacheConfig(num_blocks=1, **fields) if fields["num_layers"] else None
    own = _share_heads(whole, tensor_parallel, notes) if whole else {}
    _check_parts(whole, context_parallel)
    weighed = _weights(folder, plan.weights, notes)
    budget = _find_budget(total, kept_back, weighed, tensor_parallel)
    if windows:
        notes.append(
            f"{windows.num_layers} of {fields['num_layers']} layers have a window of "
            f"{windows.length} tokens: a GroupedConfig keeps what they see, in steps "
            f"of up to {plan.step_tokens} tokens of a sequence"
        )
    layers = Layers(
        ModelLayers(
            found.layer_windows if windows else (None,) * fields["num_layers"],
            kept=found.layers,
            of_states=plan.of_states,
        ),
        step_tokens=plan.step_tokens,
        num_parts=context_parallel,
        sizes={name: fields[name] for name in fields.keys() - TABLES},
    )
    config = layers.fit_memory(fields | own, budget) if whole else None
    longest = fields["max_context_length"]
    lengths = [length for length in CONTEXT_LENGTHS if length < longest] + [longest]
    on_each = layers.divide(tensor_parallel, own)
    fits = {length: on_each.fit_most(length, budget) for length in lengths}
    if whole is None and not any(fits.values()):
        raise ValueError(
            f"not even one sequence of {lengths[0]} tokens fits {human_bytes(budget)}; "
            f"use more or larger devices"
        )
    groups = [fit for fit in fits.values() if isinstance(fit, GroupedConfig)]
    shown = groups[-1] if groups else config
    assert shown is not None  # without keys and values there are groups, or an error
    return Plan(
        memory=total,
        num_devices=tensor_parallel * context_parallel,
        num_parts=context_parallel,
        num_replicas=data_parallel,
        weights=weighed,
        weights_on_each=-(-weighed // tensor_parallel),
        reserve=kept_back,
        budget=budget,
        bytes_per_token=whole.bytes_per_token if whole else 0,
        config=config,
        sequences={n: fit.max_sequences if fit else 0 for n, fit in fits.items()},
        groups=groups[-1] if groups else None,
        cache_bytes=layers.weigh(shown),
        bytes_needed={n: layers.count_bytes(n) for n in lengths},
        windows=windows,
        states=count_state_bytes(found.layers, fields["dtype"]),
        notes=notes,
    )


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and print a plan."""
    parser = Parser(
        prog="python -m jkv.plan", description="Plan the cache that fits a model."
    )
    parser.add_argument(
        "--model", required=True, help="a checkpoint's folder, or a GGUF file"
    )
    parser.add_argument("--memory", required=True, help="of each device: 192GiB, 80GB")
    for name, (kind, help_text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, metavar="VALUE", help=help_text)
    parser.add_argument("--prefix-caching", action="store_true")
    options = vars(parser.parse_args(arguments))
    folder, memory = options.pop("model"), options.pop("memory")
    try:
        given = {name: value for name, value in options.items() if value is not None}
        print(make_plan(folder, memory, **given).report())
    except ValueError as error:
        parser.exit(BAD_VALUE, f"error: {error}\n")
    except OSError as error:
        sys.exit(f"error: {error}")


def _read_memory(memory: int | str) -> int:
    """Return the bytes of a device; raise for a small number without a unit."""
    count = parse_bytes(memory)
    if count < LEAST_MEMORY and str(memory).strip().isdigit():
        raise ValueError(
            f"memory must have a unit or be at least {LEAST_MEMORY} bytes, got "
            f"{memory}; write {memory}GB or {memory}GiB"
        )
    return count


def _find_budget(total: int, kept_back: int, weights: int, num_devices: int) -> int:
    """Return the bytes per device that are left for a cache."""
    budget = total - kept_back - -(-weights // num_devices)
    if budget < 1:
        raise ValueError(
            f"{human_bytes(weights)} of weights leave nothing for a cache on "
            f"{num_devices} x {human_bytes(total)}; use more or larger devices"
        )
    return budget


def _share_heads(
    whole: CacheConfig, num_devices: int, notes: list[str]
) -> dict[str, int]:
    """Return the field with the kv heads of each device."""
    num_kv_heads = whole.num_kv_heads
    if num_kv_heads % num_devices and num_devices % num_kv_heads:
        raise ValueError(
            f"tensor_parallel must be a divisor or a multiple of the model's "
            f"{num_kv_heads} kv heads, got {num_devices}"
        )
    if num_devices > num_kv_heads:
        notes.append(f"each kv head is kept by {num_devices // num_kv_heads} devices")
    return {"num_kv_heads": max(num_kv_heads // num_devices, 1)}


def _check_parts(whole: CacheConfig | None, num_parts: int) -> None:
    """Raise for blocks that devices cannot share evenly, or models without blocks."""
    if num_parts > 1 and whole is None:
        raise ValueError(
            f"context_parallel must be 1 for a model without keys and values, got "
            f"{num_parts}; its states are replicated over a context axis"
        )
    if whole is not None and whole.block_size % num_parts:
        raise ValueError(
            f"block_size must be a multiple of context_parallel={num_parts}, got "
            f"{whole.block_size}; use {16 * num_parts}, for example"
        )


def _weights(folder: str | Path, given: int | str | None, notes: list[str]) -> int:
    """Return the bytes of a model's weights, 0 if the folder has none."""
    if given is not None:
        return parse_bytes(given)
    if file := find_file(folder):
        count = BYTES_OF_WHOLE * read_file(file).num_weights
        notes.append(
            f"weights of {file.name} dequantized to bfloat16: {human_bytes(count)}; "
            f"pass --weights for another dtype"
        )
        return count
    path = Path(folder)
    path = path.parent if path.is_file() else path
    for pattern in WEIGHT_FILES:
        sizes = [each.stat().st_size for each in path.glob(pattern)]
        if sizes:
            return sum(sizes)
    notes.append("no weight files found, none subtracted; pass --weights")
    return 0
