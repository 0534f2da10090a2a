"""Attention path of a model on a GPU, with reasons: `doctor --model`.

Nothing is allocated or run: the library's dispatch is evaluated with the shapes of the
model's cache.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jkv.attention.backend import DeviceType, find_gpu
from jkv.attention.choice import FallbackReasons, explain_choice
from jkv.attention.kernel.tiles.table import TABLE
from jkv.config.cache_config import CacheConfig
from jkv.config.huggingface import read_sizes
from jkv.formats.table import FORMATS
from jkv.making.initialization import init
from jkv.verbs.attending import pools_of

# Fields of `CacheConfig` that determine the path.
OF_HEADS = ("num_kv_heads", "head_dim", "value_head_dim", "values_in_keys")

# Sizes accepted in place of a folder.
FIELDS = ("num_layers", *OF_HEADS[:3], "dtype")

# Calls that generate, and calls that keep float32 for the gradient.
GENERATING, SCORING = "generate, Engine", "score"


def print_paths(model: str, gpu: str | None, *, block_size: int) -> None:
    """Print the attention path of each kind of call, with the reasons.

    The model is a folder, its config.json, or sizes such as
    "num_kv_heads=8,head_dim=128,dtype=bfloat16"; the GPU such as "gfx942" or "sm_90";
    None is this machine's, or else all with compiled kernels.
    """
    fields, num_states, notes = read_model(model)
    for note in notes:
        print(f"note: {note}")
    tables: dict[str, Any] = dict(num_blocks=1, max_sequences=1)
    tables |= dict(block_size=block_size, max_context_length=block_size)
    configs = [CacheConfig(**tables, **each) for each in fields]
    devices = find_device_types(gpu)
    if gpu is None and len(devices) > 1:
        print("no GPU found: this machine uses XLA; on GPUs with kernels")
    for one in devices:
        print(f"{one.target}:")
        for config in configs:
            print(f"  {describe(config)}")
            for line in list_paths(config, one):
                print(f"    {line}")
        if num_states:
            print(f"  {num_states} recurrent-state layers: XLA, without a kernel")


def read_model(model: str) -> tuple[list[dict[str, Any]], int, list[str]]:
    """Read the layers' fields of `CacheConfig` from a config.json or a string.

    Returns the fields for each kind of layer, the number of recurrent-state layers, and
    notes.
    """
    is_text = re.fullmatch(r"\w+=[^,/]+(,\w+=[^,/]+)*", model)
    if is_text and not Path(model).exists():
        return [_read_text(model)], 0, []
    sizes = read_sizes(model, {}, with_states=True)
    number, dtype = sizes.fields["num_layers"], sizes.fields["dtype"]
    num_states = sum(layer.state is not None for layer in sizes.layers or ())
    kinds = [(number, sizes.fields)] if number else []
    if sizes.layer_heads is not None:
        heads = sizes.layer_heads
        kinds = [(heads.count(one), one.as_fields()) for one in dict.fromkeys(heads)]
    fields = [
        {n: own[n] for n in OF_HEADS if n in own} | dict(num_layers=count, dtype=dtype)
        for count, own in kinds
    ]
    return fields, num_states, sizes.notes


def find_device_types(gpu: str | None) -> list[DeviceType]:
    """Return the GPUs to evaluate; raise for an invalid name."""
    known = sorted({name for family in TABLE.values() for name in family.targets})
    if gpu is not None:
        if not re.fullmatch(r"gfx[0-9a-f]+|sm_\d+", gpu):
            raise ValueError(
                f"gpu must be a name such as {', '.join(known)}, got {gpu!r}"
            )
        known = [gpu]
    elif (here := find_gpu()) is not None:
        return [here]
    return [
        DeviceType("rocm" if name.startswith("gfx") else "cuda", name) for name in known
    ]


def list_paths(config: CacheConfig, device: DeviceType) -> Iterator[str]:
    """Yield the path of each kind of call, by storage dtype, with the reasons."""
    widths = config.head_dim, config.value_head_dim or 0
    quantized = [
        dtype
        for dtype, kept in FORMATS.items()
        if kept.is_quantized and not any(width % kept.width_of(1) for width in widths)
    ]
    alike: dict[FallbackReasons, list[str]] = {}
    for stored in dict.fromkeys([config.dtype, *quantized]):
        reasons = ask(config, stored, device)
        # Generation needs no gradient.
        alike.setdefault(reasons._replace(derivative=None), []).append(stored.name)
    ways = [(GENERATING, names, reasons) for reasons, names in alike.items()]
    float32 = jnp.dtype(jnp.float32)
    ways.append((SCORING, [float32.name], ask(config, float32, device)))
    for calls, names, (forward, derivative) in ways:
        how = "the kernel, with exact= too" if forward is None else "the plain path"
        line = f"{calls}, kept in {', '.join(names)}: {how}"
        if calls == SCORING:
            back = "a kernel" if derivative is None else "the plain path"
            line += f"; its gradient: {back}"
        yield line
        for reason in dict.fromkeys((forward, derivative)):
            if reason is not None:
                yield f"  because {reason}"


def ask(config: CacheConfig, stored: Any, device: DeviceType) -> FallbackReasons:
    """Evaluate the dispatch for a cache stored in a dtype."""
    shape = 1, config.num_kv_heads, config.head_dim
    queries: Any = jax.ShapeDtypeStruct(shape, config.dtype)
    kept = dataclasses.replace(config, dtype=stored)
    (storage,) = jax.eval_shape(functools.partial(init, kept)).storage
    return explain_choice(queries, pools_of(storage), device)


def describe(config: CacheConfig) -> str:
    dims = str(config.head_dim)
    if config.value_head_dim != config.head_dim:
        dims += f" for keys and {config.value_head_dim} for values"
    return (
        f"{config.num_layers} layers, {config.num_kv_heads} kv heads of {dims}, "
        f"{config.dtype.name}, blocks of {config.block_size}"
    )


def _read_text(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_layers": 1, "dtype": "bfloat16"}
    for name, value in (part.split("=", 1) for part in text.split(",")):
        if name not in FIELDS:
            raise ValueError(f"model sizes must be {', '.join(FIELDS)}, got {name!r}")
        fields[name] = value if name == "dtype" else int(value)
    missing = {"num_kv_heads", "head_dim"} - fields.keys()
    if missing:
        raise ValueError(
            f"model sizes must include {' and '.join(sorted(missing))}, got {text!r}"
        )
    return fields
