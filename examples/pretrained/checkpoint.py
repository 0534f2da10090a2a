"""Loading of Hugging Face checkpoint folders.

`files.py` reads tensors by name, and `tensors.py` maps them to parameters, so that
missing, misshapen and unexpected tensors are reported before any computation.

Loading on a CPU needs the memory of the weights plus one tensor. For accelerators, the
host holds one stacked parameter of a run of layers at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .architectures import ARCHITECTURES
from .config import DecoderConfig, Run
from .files import IGNORED_SCALES, SUFFIXES, Tensors, find_stack, find_tensors
from .gguf_reading import find_folder
from .layers import JOINED, join_names
from .spreading import Put, put_whole
from .tensors import Source, layer_tensors, model_tensors

Params = dict[str, Any]  # arrays; "layers" has a dict of arrays per run

# XLA's CPU runtime uses host memory without a copy if it has this alignment in bytes.
ALIGNMENT = 64


def read_params(
    folder: str | Path,
    config: DecoderConfig,
    dtype: jnp.dtype | None = None,
    put: Put = put_whole,
    *,
    joined: bool = False,
    ignored: tuple[str, ...] = (),
) -> Params:
    """Load the parameters of a checkpoint folder.

    Args:
        folder: has model.safetensors, or shards and their index.
        config: the result of ``read_config`` for the folder.
        dtype: floating-point dtype to cast to; None means float32 on a CPU, and the
            checkpoint's own elsewhere.
        put: moves each parameter to its devices after it is read.
        joined: whether matrices with the same input are joined (`JOINED`).
        ignored: prefixes of further tensors, which the caller reads.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a tensor is missing, misshapen, unexpected, or quantized in a way
            that config.json does not name.
    """
    dtype = jnp.dtype(dtype if dtype is not None else default_dtype(config))
    tensors = Tensors(find_tensors(find_folder(folder)), config.quantization)
    if config.tied:
        tensors.let_stand_for("lm_head.weight", model_tensors(config)["embedding"].name)
    _refuse_unexpected(tensors.paths, config, ignored)
    params: Params = {
        name: put(name, _read_stack(tensors, [(source, [source.name])], dtype)[0])
        for name, source in model_tensors(config).items()
    }
    if config.tied and "lm_head.weight" in tensors.paths:
        # A copy of the embedding is harmless; otherwise the config is wrong.
        head = tensors.read("lm_head.weight", params["embedding"].shape).astype(dtype)
        if not np.array_equal(head, np.asarray(params["embedding"])):
            raise ValueError(
                f"config.json in {folder} says that lm_head.weight is tied to the "
                "embedding, but the checkpoint holds a different one"
            )
    params["layers"] = [
        {
            name: put(
                name,
                _read_stack(
                    tensors,
                    [(each, _layer_names(config, each.name, run)) for each in sources],
                    dtype,
                ),
            )
            for name, sources in _join(layer_tensors(config, run), joined).items()
        }
        for run in config.runs
    ]
    return params


def read_layer(
    tensors: Tensors, config: DecoderConfig, run: Run, prefix: str, dtype: jnp.dtype
) -> dict[str, Any]:
    """Return the parameters of one layer whose tensors have the prefix `prefix`."""
    return {
        name: put_whole(
            name, _read_stack(tensors, [(source, [prefix + source.name])], dtype)
        )
        for name, source in layer_tensors(config, run).items()
    }


def random_params(
    config: DecoderConfig, key: jax.Array, dtype: jnp.dtype | None = None
) -> Params:
    """Return random parameters, for tests and benchmarks.

    Norms are ones and biases zeros. Matrices are normal with standard deviation
    1/sqrt(inputs), embeddings with 0.02.
    """
    dtype = jnp.dtype(dtype if dtype is not None else default_dtype(config))
    tables = [layer_tensors(config, run) for run in config.runs]
    keys = iter(jax.random.split(key, sum(map(len, tables)) + 3))

    def draw(name: str, source: Source, *stacked: int) -> jax.Array:
        shape, key = (*stacked, *source.shape), next(keys)
        if len(source.stored) == 1:
            fill = 1 if name.endswith(("norm", "scale")) else 0
            return jnp.full(shape, fill, dtype)
        scale = 0.02 if name == "embedding" else source.stored[-1] ** -0.5
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    params: Params = {n: draw(n, source) for n, source in model_tensors(config).items()}
    params["layers"] = [
        {
            name: draw(name, source, run.stop - run.start)
            for name, source in table.items()
        }
        for run, table in zip(config.runs, tables, strict=True)
    ]
    return params


def default_dtype(config: DecoderConfig) -> jnp.dtype:
    """Return float32 on a CPU, and the checkpoint's own dtype elsewhere."""
    named = config.dtype_name in ("float16", "bfloat16", "float32")
    return jnp.dtype(
        config.dtype_name if named and jax.default_backend() != "cpu" else "float32"
    )


def _layer_names(config: DecoderConfig, name: str, run: Run) -> tuple[str, ...]:
    """Return the names of a tensor in the layers of a run."""
    prefix = ARCHITECTURES[config.architecture].prefix
    layers = range(run.start, run.stop)
    return tuple(f"{prefix}layers.{layer}.{name}" for layer in layers)


def _join(table: dict[str, Source], joined: bool) -> dict[str, list[Source]]:
    """Return the sources of each parameter, several for joined ones."""
    sources = {name: [source] for name, source in table.items()}
    for parts in JOINED if joined else ():
        for kind in ("", "_bias"):
            names = [f"{part}{kind}" for part in parts]
            if all(name in sources for name in names):
                each = [sources.pop(name)[0] for name in names]
                sources[join_names(parts) + kind] = each
    return sources


def _read_stack(
    tensors: Tensors,
    named: Sequence[tuple[Source, Sequence[str]]],  # with a tensor's name in each layer
    dtype: jnp.dtype,
) -> np.ndarray:
    """Return a parameter stacked over layers, [layers, *shape], with joined sources."""
    (first, names), heights = named[0], [source.shape[0] for source, _ in named]
    stack = _aligned((len(names), sum(heights), *first.shape[1:]), dtype)
    parts = np.split(stack, np.cumsum(heights)[:-1], axis=1)
    for part, (source, names) in zip(parts, named, strict=True):
        for whole, name in zip(part, names, strict=True):
            for index, read in _list_pieces(tensors, source, name):
                # Not assigned to a variable, which would keep the tensor while the next
                # one is read.
                whole[index] = source.take(read())
    return stack


def _list_pieces(
    tensors: Tensors, source: Source, name: str
) -> Iterator[tuple[Any, Callable[[], np.ndarray]]]:
    """Yield the index of each tensor in a parameter, and a function that reads it."""
    if not source.num_experts:
        yield ..., partial(tensors.read, name, source.stored)
    for expert in range(source.num_experts):
        index = None if "{}" in name else expert
        yield expert, partial(tensors.read, name.format(expert), source.stored, index)


def _aligned(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """Return an empty array that JAX can use on a CPU without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def list_names(config: DecoderConfig) -> set[str]:
    """Return the names of all tensors that a checkpoint of a model may have."""
    known = {source.name for source in model_tensors(config).values()}
    known.add("lm_head.weight")
    for run in config.runs:
        for source in layer_tensors(config, run).values():
            for name in _layer_names(config, source.name, run):
                known |= {name.format(e) for e in range(max(source.num_experts, 1))}
    return known


def _refuse_unexpected(
    paths: dict[str, Path], config: DecoderConfig, ignored: tuple[str, ...] = ()
) -> None:
    """Raise a ValueError for tensors that the model would ignore."""
    known = list_names(config)
    known |= {*map(find_stack, known)} - {None}
    method = config.quantization.method if config.quantization else ""
    for suffix in SUFFIXES.get(method, ()):
        known |= {name + suffix for name in list(known)}
    # Ignored tensors: RoPE frequencies, which follow from config.json, layers for
    # multi-token prediction, and scales of activations, which stay unquantized here.
    beside = ("rotary_emb.inv_freq", *IGNORED_SCALES.get(method, ()))
    unexpected = sorted(
        name
        for name in set(paths) - known
        if not name.endswith(beside)
        and not name.startswith(ARCHITECTURES[config.architecture].ignored)
        and not name.startswith(ignored)
        and not _is_past_the_layers(name, config)
        and not _is_of_others_keys(name, config)
    )
    if unexpected:
        raise ValueError(
            f"the checkpoint holds {len(unexpected)} tensors that this model would not "
            f"use, so its answers would be wrong: {', '.join(unexpected[:4])}"
        )


def _is_of_others_keys(name: str, config: DecoderConfig) -> bool:
    """True for keys and values of a layer that uses another layer's."""
    prefix = f"{ARCHITECTURES[config.architecture].prefix}layers."
    layer, _, rest = name.removeprefix(prefix).partition(".")
    if not name.startswith(prefix) or not layer.isdecimal():
        return False
    number = int(layer)
    shares = number < len(config.key_layers) and config.key_layers[number] != number
    of_keys = tuple(f"self_attn.{n}." for n in ("k_proj", "v_proj", "k_norm"))
    return shares and rest.startswith(of_keys)


def _is_past_the_layers(name: str, config: DecoderConfig) -> bool:
    first, _, rest = name.removeprefix("model.layers.").partition(".")
    is_layer = bool(rest) and name.startswith("model.layers.") and first.isdecimal()
    return is_layer and 0 <= int(first) - config.num_layers < config.num_guessing_layers
