"""A GGUF file: its metadata, and its tensors by name."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jkv.config.gguf_head import MAGIC, Place, read_head

SUFFIX = ".gguf"

# Kinds of tensors that are served, as `gguf.GGMLQuantizationType` names them.
KINDS = (
    *("F32", "F16", "BF16"),
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
BYTES_AT_A_TIME = 2**16  # that a row of what is dequantized has at most
EXTRA = "GGUF files need the package gguf: pip install gguf"


class Tensor(NamedTuple):
    """One tensor as it is stored."""

    kind: Any  # a `gguf.GGMLQuantizationType`
    shape: tuple[int, ...]  # of its numbers
    data: np.ndarray[Any, Any]  # mapped; u8[*shape[:-1], bytes of a row]


class GGUFile(NamedTuple):
    """One model, in one file or in several that it was split into."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]  # by GGUF's names

    def get(self, key: str, default: Any = None) -> Any:
        """Return what the file says of its architecture, such as "block_count"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Return the same, which must be there."""
        found = self.get(key)
        if found is None:
            raise ValueError(
                f"{self.paths[0]} lacks the metadata {self.architecture}.{key}"
            )
        return found

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def num_weights(self) -> int:
        """Numbers of all tensors together."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def find_file(model: str | Path) -> Path | None:
    """Return the GGUF file that is named, or that of a folder without a config.json."""
    path = Path(model)
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = [
        each
        for each in sorted(path.glob(f"*{SUFFIX}"))
        if "-of-" not in each.stem or "-00001-of-" in each.stem
    ]
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise ValueError(f"{path} holds several GGUF models: name one of {names}")
    return found[0] if found else None


def read_file(path: Path) -> GGUFile:
    """Map a GGUF file, and the others that it was split into, and read its metadata.

    One that is damaged, cut off or missing, and kinds that are not served, are refused.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    paths = _find_parts(path)
    parts = [_read(each) for each in paths]
    tensors = {name: each for _, part in parts for name, each in part.items()}
    kinds = {tensor.kind.name for tensor in tensors.values()} - {*KINDS}
    if kinds:
        raise ValueError(
            f"{path} holds tensors of the kinds {sorted(kinds)}; served are "
            f"{', '.join(KINDS)}: take another quantization of the model, or its "
            "safetensors"
        )
    return GGUFile(paths, parts[0][0], tensors)


def dequantize(
    tensor: Tensor,  # of a file
    # of the first axis, such as an expert's number; None for all
    index: int | None = None,
) -> np.ndarray[Any, Any]:
    """Return a tensor's numbers, float32 or float16, or those of a part of it."""
    from gguf.quants import dequantize

    data = tensor.data if index is None else tensor.data[index]
    shape = tensor.shape if index is None else tensor.shape[1:]
    if tensor.kind.name == "F16":
        return data.view(np.float16)
    # The package takes 16 rows at a time, so that long ones cost it less.
    num_rows, most = data.size // data.shape[-1], BYTES_AT_A_TIME // data.shape[-1]
    most = max(n for n in range(1, max(most, 1) + 1) if num_rows % n == 0)
    long_rows = data.reshape(num_rows // most, most * data.shape[-1])
    return np.asarray(dequantize(long_rows, tensor.kind)).reshape(shape)


def _find_parts(path: Path) -> tuple[Path, ...]:
    """Return the files that a model was split into, NAME-00001-of-00003.gguf first."""
    stem, _, count = path.stem.rpartition("-of-")
    name, _, number = stem.rpartition("-")
    if not (count.isdigit() and number.isdigit() and len(number) == len(count) == 5):
        return (path,)
    parts = tuple(
        path.with_name(f"{name}-{part:05d}-of-{count}{path.suffix}")
        for part in range(1, int(count) + 1)
    )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise FileNotFoundError(f"{path} was split, and lacks the parts {missing}")
    return parts


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the metadata of one file, and its tensors."""
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC:
        raise ValueError(f"{path} is no GGUF file: it begins with {start!r}")
    data = np.memmap(path, mode="r")
    try:
        head = read_head(data.data)
        return head.metadata, {
            name: _map(data, name, place) for name, place in head.places.items()
        }
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(EXTRA, name="gguf") from error
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged or cut off, or its version is not known ({error})"
        ) from error


def _map(data: np.ndarray[Any, Any], name: str, place: Place) -> Tensor:
    """Return a tensor of a file whose bytes are given."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind, shape = GGMLQuantizationType(place.kind), place.shape
    block, size = GGML_QUANT_SIZES[kind]
    if shape[-1] % block or min(shape) < 1:
        raise ValueError(f"rows of {name} are no whole blocks of {block} numbers")
    rows = (*shape[:-1], shape[-1] // block * size)
    end = place.offset + math.prod(rows)
    if end > len(data):
        raise ValueError(f"{name} lies behind the file's end")
    return Tensor(kind, shape, np.asarray(data[place.offset : end]).reshape(rows))
