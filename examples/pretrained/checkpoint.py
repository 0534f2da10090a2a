"""Reading a Hugging Face checkpoint folder as it is.

Weights lie in ``model.safetensors`` or, sharded, in the files that
``model.safetensors.index.json`` maps tensor names to. `tensors.py` says which of them
becomes which parameter, so that a missing, misshapen or unexpected tensor is named
before anything is computed with it.

On a CPU loading takes the memory of the weights and of one tensor; in front of an
accelerator the host holds, at one time, one parameter of the layers of a run.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from .config import DecoderConfig
from .quantised import Quantisation, decode_mxfp4, scale_blocks
from .tensors import Source, layer_tensors, model_tensors

Params = dict[str, Any]  # arrays, and under "layers" a dict of arrays for each run

FLOATS = ("F16", "BF16", "F32", "F64")
# What a quantised matrix has beside its own name.
SUFFIXES = {"mxfp4": ("_blocks", "_scales"), "fp8": ("_scale_inv",)}
# XLA's CPU runtime uses host memory as it is when it begins at a multiple of this.
ALIGNMENT = 64


def read_params(
    folder: str | Path, config: DecoderConfig, dtype: jnp.dtype | None = None
) -> Params:
    """Read the weights of a checkpoint folder.

    Args:
        folder: holds model.safetensors, or shards and their index.
        config: what ``read_config`` made of the folder's config.json.
        dtype: floating type to cast to; float32 on a CPU and the checkpoint's own
            elsewhere when it is None.

    Raises:
        FileNotFoundError: when a file is missing.
        ValueError: when a tensor is missing, misshapen, unexpected or quantised in a
            way that config.json does not name.
    """
    dtype = jnp.dtype(dtype if dtype is not None else default_dtype(config))
    tensors = Tensors(_tensor_files(Path(folder)), config.quantisation)
    _refuse_unexpected(tensors.paths, config)
    params: Params = {
        name: jax.device_put(_read_stack(tensors, source, (source.name,), dtype)[0])
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
            name: jax.device_put(_read_stack(tensors, source, names, dtype))
            for name, source in layer_tensors(config, run.has_experts).items()
            for names in [_layer_names(source.name, range(run.start, run.stop))]
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
    tables = [layer_tensors(config, run.has_experts) for run in config.runs]
    keys = iter(jax.random.split(key, sum(map(len, tables)) + 3))

    def draw(name: str, source: Source, *stacked: int) -> jax.Array:
        shape, key = (*stacked, *source.shape), next(keys)
        if len(source.stored) == 1:
            fill = 1 if name.endswith("norm") else 0
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


class Tensors:
    """The tensors of a checkpoint by name, each read and made whole when asked for."""

    def __init__(
        self, paths: dict[str, Path], quantisation: Quantisation | None
    ) -> None:
        """Take where each tensor lies, and how matrices are stored."""
        self.paths = paths
        self._quantisation = quantisation
        self._files: dict[Path, Any] = {}
        self._headers: dict[Path, tuple[dict[str, Any], int]] = {}

    def read(
        self, name: str, shape: tuple[int, ...], index: int | None = None
    ) -> np.ndarray:
        """Return a tensor of floats.

        Args:
            name: in the checkpoint.
            shape: that it must have, of the part that `index` picks.
            index: of the first axis, to read no more than that part.
        """
        method = self._quantisation.method if self._quantisation else None
        if method == "mxfp4" and f"{name}_blocks" in self.paths:
            blocks = self._load(f"{name}_blocks", ("U8",), index)
            scales = self._load(f"{name}_scales", ("U8",), index)
            # Stored as [out, in], where the tensor that is not quantised is [in, out].
            tensor = decode_mxfp4(blocks, scales).swapaxes(-1, -2)
        elif method == "fp8" and f"{name}_scale_inv" in self.paths:
            tensor = self._load(name, ("F8_E4M3",))
            scales = self._load(f"{name}_scale_inv", FLOATS)
            tensor = scale_blocks(tensor, scales, self._quantisation.block)
        else:
            tensor = self._load(name, FLOATS, index)
        if tensor.shape != shape:
            raise ValueError(
                f"tensor {name!r} has shape {tensor.shape}, but config.json makes it "
                f"{shape}"
            )
        return tensor

    def _load(
        self, name: str, types: tuple[str, ...], index: int | None = None
    ) -> np.ndarray:
        """Return a tensor, or a part of it, as it is stored."""
        if name not in self.paths:
            hint = "; is tie_word_embeddings missing?" if "lm_head" in name else ""
            raise ValueError(f"the checkpoint lacks the tensor {name!r}{hint}")
        path = self.paths[name]
        if path not in self._files:
            self._files[path] = _open(path)
        try:
            stored = self._files[path].get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{path} does not hold {name!r}: {error}") from error
        if stored.get_dtype() not in types:
            raise ValueError(
                f"tensor {name!r} is stored as {stored.get_dtype()}, where config.json "
                f"lets expect one of {types}: quantised checkpoints must name a method "
                "in quantization_config that is supported"
            )
        if stored.get_dtype() == "F8_E4M3":
            return self._load_small_floats(path, name)
        return self._files[path].get_tensor(name) if index is None else stored[index]

    def _load_small_floats(self, path: Path, name: str) -> np.ndarray:
        """Return a tensor of float8_e4m3fn, which safetensors cannot give to numpy."""
        if path not in self._headers:
            self._headers[path] = _read_header(path)
        header, first = self._headers[path]
        start, stop = header[name]["data_offsets"]
        with path.open("rb") as file:
            file.seek(first + start)
            stored = np.frombuffer(file.read(stop - start), jnp.float8_e4m3fn)
        return stored.reshape(header[name]["shape"])


def _layer_names(name: str, layers: range) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}.{name}" for layer in layers)


def _read_stack(
    tensors: Tensors, source: Source, names: tuple[str, ...], dtype: jnp.dtype
) -> np.ndarray:
    """Return a parameter of some layers, [layers, *shape]."""
    stack = _aligned((len(names), *source.shape), dtype)
    for whole, name in zip(stack, names, strict=True):
        for place, read in _list_pieces(tensors, source, name):
            # Not kept in a variable: the next one would be read beside it.
            whole[place] = source.take(read())
    return stack


def _list_pieces(
    tensors: Tensors, source: Source, name: str
) -> Iterator[tuple[Any, Callable[[], np.ndarray]]]:
    """Yield the places in a parameter, and what reads the tensor for each."""
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


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return where each tensor of the checkpoint lies."""
    single, index = (
        folder / "model.safetensors",
        folder / "model.safetensors.index.json",
    )
    if single.is_file():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is not a shard index: {error!r}") from error
        missing = {f for f in weight_map.values() if not (folder / f).is_file()}
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks shards named by {index.name}: {sorted(missing)}"
            )
        return {name: folder / file for name, file in weight_map.items()}
    pickled = [p.name for p in folder.glob("pytorch_model*.bin")]
    hint = f"; convert {sorted(pickled)} to safetensors first" if pickled else ""
    raise FileNotFoundError(
        f"{folder} has neither {single.name} nor {index.name}{hint}"
    )


def _refuse_unexpected(paths: dict[str, Path], config: DecoderConfig) -> None:
    """Refuse tensors that would be silently left out of the computation."""
    known = {source.name for source in model_tensors(config).values()}
    known.add("lm_head.weight")
    for run in config.runs:
        for source in layer_tensors(config, run.has_experts).values():
            for name in _layer_names(source.name, range(run.start, run.stop)):
                known |= {name.format(e) for e in range(max(source.num_experts, 1))}
    method = config.quantisation.method if config.quantisation else ""
    for suffix in SUFFIXES.get(method, ()):
        known |= {name + suffix for name in list(known)}
    # Old checkpoints carry the RoPE frequencies, which config.json gives as well, and
    # some have further layers, past the last, that guess more than one token.
    unexpected = sorted(
        name
        for name in set(paths) - known
        if not name.endswith("rotary_emb.inv_freq")
        and not _is_past_the_layers(name, config)
    )
    if unexpected:
        raise ValueError(
            f"the checkpoint holds {len(unexpected)} tensors that this model would not "
            f"use, so its answers would be wrong: {', '.join(unexpected[:4])}"
        )


def _is_past_the_layers(name: str, config: DecoderConfig) -> bool:
    first, _, rest = name.removeprefix("model.layers.").partition(".")
    is_layer = bool(rest) and name.startswith("model.layers.") and first.isdecimal()
    return is_layer and 0 <= int(first) - config.num_layers < config.num_guessing_layers


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's header, and where it ends, after 8 bytes with its length."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}); a clone without Git "
            "LFS leaves a short text in its place"
        ) from error
