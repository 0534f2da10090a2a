"""Reading a Hugging Face checkpoint folder as it is.

`files.py` reads tensors by name and `tensors.py` says which of them becomes which
parameter, so that a missing, misshapen or unexpected tensor is named before anything is
computed with it.

On a CPU loading takes the memory of the weights and of one tensor; in front of an
accelerator the host holds, at one time, one parameter of the layers of a run.
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
from .files import IGNORED_SCALES, SUFFIXES, Tensors, find_tensors
from .gguf_reading import find_folder
from .layers import JOINED, join_names
from .spreading import Put, put_whole
from .tensors import Source, layer_tensors, model_tensors

Params = dict[str, Any]  # arrays, and under "layers" a dict of arrays for each run

# XLA's CPU runtime uses host memory as it is when it begins at a multiple of this.
ALIGNMENT = 64


def read_params(
    folder: str | Path,
    config: DecoderConfig,
    dtype: jnp.dtype | None = None,
    put: Put = put_whole,
    *,
    joined: bool = False,
) -> Params:
    """Read the weights of a checkpoint folder.

    Args:
        folder: holds model.safetensors, or shards and their index.
        config: ``read_config``'s result for the folder's config.json.
        dtype: floating type to cast to; float32 on a CPU and the checkpoint's own
            elsewhere when it is None.
        put: puts each parameter on its devices, as it is read.
        joined: one parameter of matrices that multiply the same rows (`JOINED`).

    Raises:
        FileNotFoundError: when a file is missing.
        ValueError: when a tensor is missing, misshapen, unexpected or quantized in a
            way that config.json does not name.
    """
    dtype = jnp.dtype(dtype if dtype is not None else default_dtype(config))
    tensors = Tensors(find_tensors(find_folder(folder)), config.quantization)
    if config.tied:
        tensors.let_stand_for("lm_head.weight", model_tensors(config)["embedding"].name)
    _refuse_unexpected(tensors.paths, config)
    params: Params = {
        name: put(name, _read_stack(tensors, [(source, [source.name])], dtype)[0])
        for name, source in model_tensors(config).items()
    }
    if config.tied and "lm_head.weight" in tensors.paths:
        # Harmless when it repeats the embedding; otherwise the config is wrong.
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


def random_params(
    config: DecoderConfig, key: jax.Array, dtype: jnp.dtype | None = None
) -> Params:
    """Return random parameters of the right shapes, for tests and benchmarks.

    Norms are ones and biases zeros, matrices normal with standard deviation
    1/sqrt(inputs), embeddings 0.02.
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
    """Return float32 on a CPU, elsewhere the type the checkpoint says it has."""
    named = config.dtype_name in ("float16", "bfloat16", "float32")
    return jnp.dtype(
        config.dtype_name if named and jax.default_backend() != "cpu" else "float32"
    )


def _layer_names(config: DecoderConfig, name: str, run: Run) -> tuple[str, ...]:
    """Return how a tensor is called in each layer of a run."""
    prefix = ARCHITECTURES[config.architecture].prefix
    layers = range(run.start, run.stop)
    return tuple(f"{prefix}layers.{layer}.{name}" for layer in layers)


def _join(table: dict[str, Source], joined: bool) -> dict[str, list[Source]]:
    """Return the sources of each parameter."""
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
    """Return a parameter of some layers, [layers, *shape], its sources side by side."""
    (first, names), heights = named[0], [source.shape[0] for source, _ in named]
    stack = _aligned((len(names), sum(heights), *first.shape[1:]), dtype)
    parts = np.split(stack, np.cumsum(heights)[:-1], axis=1)
    for part, (source, names) in zip(parts, named, strict=True):
        for whole, name in zip(part, names, strict=True):
            for index, read in _list_pieces(tensors, source, name):
                # Not kept in a variable: the next one would be read beside it.
                whole[index] = source.take(read())
    return stack


def _list_pieces(
    tensors: Tensors, source: Source, name: str
) -> Iterator[tuple[Any, Callable[[], np.ndarray]]]:
    """Yield the indices in a parameter, and a function that reads each tensor."""
    if not source.num_experts:
        yield ..., partial(tensors.read, name, source.stored)
    for expert in range(source.num_experts):
        index = None if "{}" in name else expert
        yield expert, partial(tensors.read, name.format(expert), source.stored, index)


def _aligned(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """Return an empty array that becomes one of JAX on a CPU without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def list_names(config: DecoderConfig) -> set[str]:
    """Return the names of all tensors that a model's checkpoint may have."""
    known = {source.name for source in model_tensors(config).values()}
    known.add("lm_head.weight")
    for run in config.runs:
        for source in layer_tensors(config, run).values():
            for name in _layer_names(config, source.name, run):
                known |= {name.format(e) for e in range(max(source.num_experts, 1))}
    return known


def _refuse_unexpected(paths: dict[str, Path], config: DecoderConfig) -> None:
    """Refuse tensors that would be silently left out of the computation."""
    known = list_names(config)
    method = config.quantization.method if config.quantization else ""
    for suffix in SUFFIXES.get(method, ()):
        known |= {name + suffix for name in list(known)}
    # Old checkpoints carry the RoPE frequencies, which config.json gives as well, and
    # some have further layers, past the last, that guess more than one token. Scales of
    # activations belong to products in 8 bits, which are not computed here.
    beside = ("rotary_emb.inv_freq", *IGNORED_SCALES.get(method, ()))
    unexpected = sorted(
        name
        for name in set(paths) - known
        if not name.endswith(beside)
        and not name.startswith(ARCHITECTURES[config.architecture].ignored)
        and not _is_past_the_layers(name, config)
        and not _is_of_others_keys(name, config)
    )
    if unexpected:
        raise ValueError(
            f"the checkpoint holds {len(unexpected)} tensors that this model would not "
            f"use, so its answers would be wrong: {', '.join(unexpected[:4])}"
        )


def _is_of_others_keys(name: str, config: DecoderConfig) -> bool:
    """True if a layer would project keys and values that it does not use."""
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
