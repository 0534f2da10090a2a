"""Tensors of a checkpoint by name, in any file and storage format.

Weights are in ``model.safetensors`` or in shards, listed by tensor name in
``model.safetensors.index.json``. Matrices of experts may be in a tensor each or, as in
Qwen3.5, in two tensors of a layer.
"""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from .gguf_reading.folders import INDEX
from .quantized import Quantization, decode_mxfp4, scale_blocks
from .text_part import name_tensors

FLOATS = ("F16", "BF16", "F32", "F64")
# Suffixes of scales that dequantization does not need.
IGNORED_SCALES = {"fp8": ("activation_scale",)}

# Suffixes of the additional tensors of a quantized matrix.
SUFFIXES = {"mxfp4": ("_blocks", "_scales"), "fp8": ("_scale_inv",)}

# Names of one expert's matrices, and of the tensors of all experts of a layer: each
# gate projection is concatenated with its up projection by rows.
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
STACKED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


def find_stack(name: str) -> str | None:
    """Return the stacked tensor with an expert's matrix, None for other names."""
    found = EXPERT.fullmatch(name)
    return found and f"{found[1]}.{STACKED[found[3]]}"


def find_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint folder.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file cannot be read.
    """
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
        _check_weight_map(index, weight_map)
        missing = {f for f in weight_map.values() if not (folder / f).is_file()}
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks shards named by {index.name}: {sorted(missing)}"
            )
        return {name: folder / file for name, file in weight_map.items()}
    gguf = folder / INDEX
    if gguf.is_file():
        return dict.fromkeys(json.loads(gguf.read_text("utf-8"))["weight_map"], gguf)
    pickled = [p.name for p in folder.glob("pytorch_model*.bin")]
    hint = f"; convert {sorted(pickled)} to safetensors first" if pickled else ""
    raise FileNotFoundError(
        f"{folder} has neither {single.name} nor {index.name}{hint}"
    )


def _check_weight_map(index: Path, weight_map: Any) -> None:
    """Check that an index maps each tensor to a file in the same folder.

    Raises:
        ValueError: for an invalid index, with the wrong key.
    """
    if not isinstance(weight_map, dict):
        raise ValueError(
            f"{index}: weight_map must be an object, got {weight_map!r:.60}"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ValueError(
                f"{index}: weight_map.{name} must be the name of a file beside it, got "
                f"{file!r:.60}"
            )


class Tensors:
    """Tensors of a checkpoint by name, read and dequantized on demand."""

    def __init__(
        self,
        paths: dict[str, Path],
        quantization: Quantization | None,
        *,
        names_as_stored: bool = False,
    ) -> None:
        """Store the tensors' files and their quantization.

        Args:
            paths: the file of each tensor, by name.
            quantization: the storage format of matrices.
            names_as_stored: do not map the names of a multimodal model's text part.
        """
        self._stored = {n: n for n in paths} if names_as_stored else name_tensors(paths)
        self.paths = {name: paths[stored] for name, stored in self._stored.items()}
        self._quantization = quantization
        self._files: dict[Path, Any] = {}
        self._headers: dict[Path, tuple[dict[str, Any], int]] = {}

    def let_stand_for(self, name: str, other: str) -> None:
        """Alias a tensor under another name, if that name is missing."""
        if other not in self.paths and name in self.paths:
            self.paths[other] = self.paths[name]
            self._stored[other] = self._stored[name]

    def read(
        self, name: str, shape: tuple[int, ...], index: int | None = None
    ) -> np.ndarray:
        """Return a floating-point tensor.

        Args:
            name: name of the tensor.
            shape: expected shape, without the first axis if `index` is given.
            index: on the first axis, to read only that part.
        """
        stack = None if name in self.paths else find_stack(name)
        if stack in self.paths:
            return self._read_expert(name, stack, shape)
        method = self._quantization.method if self._quantization else None
        if method == "mxfp4" and f"{name}_blocks" in self.paths:
            blocks = self._load(f"{name}_blocks", ("U8",), index)
            scales = self._load(f"{name}_scales", ("U8",), index)
            # Stored as [out, in]; the unquantized tensor is [in, out].
            tensor = decode_mxfp4(blocks, scales).swapaxes(-1, -2)
        elif method == "fp8" and f"{name}_scale_inv" in self.paths:
            tensor = self._load(name, ("F8_E4M3",), index)
            scales = self._load(f"{name}_scale_inv", FLOATS, index)
            tensor = scale_blocks(tensor, scales, self._quantization.block)
        else:
            tensor = self._load(name, FLOATS, index)
        if tensor.shape != shape:
            raise ValueError(
                f"tensor {name!r} has shape {tensor.shape}, but config.json makes it "
                f"{shape}"
            )
        return tensor

    def _read_expert(self, name: str, stack: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return an expert's matrix from a stacked tensor."""
        _, number, part = EXPERT.fullmatch(name).groups()
        if part == "down":
            return self.read(stack, shape, int(number))
        inner, hidden = shape
        both = self.read(stack, (2 * inner, hidden), int(number))
        return both[:inner] if part == "gate" else both[inner:]

    def _load(
        self, name: str, types: tuple[str, ...], index: int | None = None
    ) -> np.ndarray:
        """Return a tensor or a part of it in its storage format."""
        if name not in self.paths:
            hint = "; is tie_word_embeddings missing?" if "lm_head" in name else ""
            raise ValueError(f"the checkpoint lacks the tensor {name!r}{hint}")
        path, stored_name = self.paths[name], self._stored[name]
        if path not in self._files:
            self._files[path] = _open(path)
        try:
            stored = self._files[path].get_slice(stored_name)
        except SafetensorError as error:
            raise ValueError(f"{path} does not hold {name!r}: {error}") from error
        if stored.get_dtype() not in types:
            raise ValueError(
                f"tensor {name!r} is stored as {stored.get_dtype()}, where config.json "
                f"lets expect one of {types}: quantized checkpoints must name a method "
                "in quantization_config that is supported"
            )
        if stored.get_dtype() == "F8_E4M3":
            return self._load_small_floats(path, stored_name, index)
        if index is None:
            return self._files[path].get_tensor(stored_name)
        return stored[index]

    def _load_small_floats(
        self, path: Path, name: str, index: int | None
    ) -> np.ndarray:
        """Return a tensor of float8_e4m3fn, which safetensors cannot load to numpy."""
        if path not in self._headers:
            self._headers[path] = _read_header(path)
        header, first = self._headers[path]
        shape = header[name]["shape"]
        start, stop = header[name]["data_offsets"]
        if index is not None:
            shape = shape[1:]
            size = int(np.prod(shape))  # a byte each
            start, stop = start + index * size, start + (index + 1) * size
        with path.open("rb") as file:
            file.seek(first + start)
            stored = np.frombuffer(file.read(stop - start), jnp.float8_e4m3fn)
        return stored.reshape(shape)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's header and the offset of its data; an 8-byte length is first."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


def _open(path: Path) -> Any:
    if path.name == INDEX:
        # Imported here, since other checkpoints do not need the package gguf.
        from .gguf_reading.tensors import GGUFTensors

        return GGUFTensors(path)
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}); a clone without Git "
            "LFS leaves a short text instead of it"
        ) from error
