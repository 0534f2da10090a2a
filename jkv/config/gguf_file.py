"""A GGUF file: its metadata, and its tensors by name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SUFFIX = ".gguf"

# Kinds of tensors that are served, as `gguf.GGMLQuantizationType` names them.
KINDS = (
    *("F32", "F16", "BF16"),
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
EXTRA = "GGUF files need the package gguf: pip install gguf"


class Metadata(Mapping[str, Any]):
    """What a file says of its model; lists of tokens are long, and read once."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Take the fields of a `gguf.GGUFReader`."""
        self._fields = fields
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            value = self._fields[name].contents()
            if isinstance(value, float):
                # Kept as float32: the decimal that was meant, not 9.99999997e-07.
                value = float(str(np.float32(value)))
            self._read[name] = value
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class GGUFile(NamedTuple):
    """One model, in one file or in several that it was split into."""

    paths: tuple[Path, ...]
    metadata: Metadata
    tensors: Mapping[str, Any]  # by GGUF's names: `gguf.ReaderTensor`

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
        """As GGUF calls it."""
        return str(self.metadata.get("general.architecture"))

    @property
    def num_weights(self) -> int:
        """Numbers of all tensors together."""
        return sum(int(tensor.n_elements) for tensor in self.tensors.values())


def find_file(model: str | Path) -> Path | None:
    """Return the GGUF file that is named, or the one of a folder without a config.json.

    Raises:
        ValueError: for a folder that holds several models.
    """
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

    Raises:
        ModuleNotFoundError: without the package gguf.
        FileNotFoundError: when the file or a part of it is missing.
        ValueError: for a file that is damaged or cut off, or holds kinds of tensors
            that are not served.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    paths = _find_parts(path)
    readers = [_open(each) for each in paths]
    metadata = Metadata(readers[0].fields)
    tensors = {each.name: each for reader in readers for each in reader.tensors}
    kinds = {tensor.tensor_type.name for tensor in tensors.values()} - {*KINDS}
    if kinds:
        raise ValueError(
            f"{path} holds tensors of the kinds {sorted(kinds)}; served are "
            f"{', '.join(KINDS)}: take another quantization of the model, or its "
            "safetensors"
        )
    return GGUFile(paths, metadata, tensors)


def dequantize(tensor: Any, index: int | None = None) -> np.ndarray[Any, Any]:
    """Return a tensor's numbers, float32 or float16, or those of a part of it.

    Args:
        tensor: a `gguf.ReaderTensor`.
        index: of the first axis, such as an expert's number; None for all.
    """
    from gguf.quants import dequantize

    data = tensor.data if index is None else tensor.data[index]
    if tensor.tensor_type.name == "F16":
        return np.asarray(data)
    return np.asarray(dequantize(data, tensor.tensor_type))


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


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(EXTRA, name="gguf") from error
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise ValueError(f"{path} is no GGUF file: it begins with {start!r}")
    try:
        return GGUFReader(path)
    except Exception as error:  # of many kinds, as the damage has it
        raise ValueError(
            f"{path} is damaged or cut off, or its version is not known ({error})"
        ) from error
