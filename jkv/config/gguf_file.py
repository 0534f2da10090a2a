"""Reader of the head of a GGUF file: metadata, tensor locations and model sizes.

The format is ggml's (docs/gguf.md there), versions 2 and 3, which do not differ in the
parts read here. The package gguf makes an array of each token of a vocabulary, 9
seconds for Gemma's 262,144; here a token is a slice.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jkv.config.gguf_kinds import check_metadata

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)

# Types of metadata by the format's numbers: a string follows its length, an array its
# type and number of elements, and numbers are in numpy's representation.
TEXT, ARRAY = 8, 9
NUMBERS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}

# Supported architectures, and their model types in transformers.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "granite": "granite",
    "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe",
    "glm4moe": "glm4_moe",
}
HAVE_WINDOWS = {"gemma2", "gemma3", "phi3"}


class TensorInfo(NamedTuple):
    """The location of a tensor in a file."""

    path: Path
    shape: tuple[int, ...]  # in elements, last axis contiguous
    kind: int  # type number of the format
    offset: int  # from the start of the file


class GGUFile(NamedTuple):
    """One model in one file, or split over several."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]  # by GGUF name

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field of the architecture, such as "block_count"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Return a field of the architecture, or raise ValueError without it."""
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
    def model_type(self) -> str:
        """Model type in transformers; raises ValueError if it is not supported."""
        kind = self.architecture
        if kind not in MODEL_TYPES:
            raise ValueError(
                f"{self.paths[0]} holds a model of architecture {kind!r}; supported "
                f"in GGUF files are {', '.join(MODEL_TYPES)}; use the model's "
                "safetensors"
            )
        is_mixtral = kind == "llama" and self.get("expert_count")
        return "mixtral" if is_mixtral else MODEL_TYPES[kind]

    @property
    def num_layers(self) -> int:
        """Layers of the model, without layers for multi-token prediction."""
        return int(self.need("block_count") - self.get("nextn_predict_layers", 0))

    @property
    def num_weights(self) -> int:
        """Number of weights in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def find_file(model: str | Path) -> Path | None:
    """Return the path of a GGUF file, also in a folder without a config.json."""
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
    """Read the head of a GGUF file and of the files that it was split into.

    Raises:
      FileNotFoundError: a missing file or part.
      ValueError: a damaged file, or metadata of wrong types.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    paths = _find_parts(path)
    heads = [_read_head(each) for each in paths]
    if str(heads[0][0].get("general.architecture")) in MODEL_TYPES:
        check_metadata(paths[0], heads[0][0])
    tensors = {name: tensor for _, own in heads for name, tensor in own.items()}
    return GGUFile(paths, heads[0][0], tensors)


def describe_model(file: GGUFile) -> dict[str, Any]:
    """Return the fields of an equivalent config.json that determine the cache."""
    model_type, kind, path = file.model_type, file.architecture, file.paths[0]
    window = file.get("attention.sliding_window") or None
    if kind == "olmo2" and window:
        raise ValueError(
            f"{path}: olmo2.attention.sliding_window is {window}, as of Olmo 3, which "
            "is not supported in GGUF files; use the model's safetensors"
        )
    heads, hidden = file.need("attention.head_count"), file.need("embedding_length")
    kv_heads = file.get("attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise ValueError(f"{path}: layers with different heads are not supported")
    sizes = dict(
        model_type=model_type,
        hidden_size=hidden,
        num_hidden_layers=file.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=file.get("attention.key_length", hidden // heads),
        max_position_embeddings=file.need("context_length"),
        torch_dtype="bfloat16",
    )
    has_window = window and kind in HAVE_WINDOWS
    return sizes | dict(sliding_window=window) if has_window else sizes


def _find_parts(path: Path) -> tuple[Path, ...]:
    """Return all parts of a split file, NAME-00001-of-00003.gguf first."""
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
        raise FileNotFoundError(f"{path} is split, and lacks the parts {missing}")
    return parts


def _read_head(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Return the metadata and tensor locations of one file."""
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC:
        raise ValueError(f"{path} is not a GGUF file: it begins with {start!r}")
    try:
        return _Reader(path).read_head()
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged or cut off, or of an unknown version ({error})"
        ) from error


class _Reader:
    """Sequential reader of values; raises ValueError at the end of the file."""

    def __init__(self, path: Path) -> None:
        self._path, self._data = path, np.memmap(path, mode="r").data
        self._position = len(MAGIC)

    def read_head(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if (version := self._read_number("<u4")) not in VERSIONS:
            raise ValueError(
                f"its version must be one of {VERSIONS}, got {version}; big-endian "
                "files are not supported"
            )
        num_tensors, num_fields = self._read_number("<u8"), self._read_number("<u8")
        metadata = self._read_table(num_fields, self._read_field)
        tensors = self._read_table(num_tensors, self._read_tensor)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment must be an int >= 1, got {alignment!r}")
        begin = -(-self._position // alignment) * alignment
        for name, tensor in tensors.items():
            tensors[name] = tensor._replace(offset=begin + tensor.offset)
        return metadata, tensors

    def _read_table(self, count: int, read: Callable[[], Any]) -> dict[str, Any]:
        """Read `count` named values."""
        found: dict[str, Any] = {}
        for _ in range(self._check(count)):
            name = self._read_text()
            if name in found:
                raise ValueError(f"it holds {name} twice")
            found[name] = read()
        return found

    def _read_field(self) -> Any:
        return self._read_value(self._read_number("<u4"))

    def _read_tensor(self) -> TensorInfo:
        """Read a tensor's location, relative to the end of the head."""
        shape = tuple(self._read_numbers("<u8", self._read_number("<u4"))[::-1])
        kind, offset = self._read_number("<u4"), self._read_number("<u8")
        return TensorInfo(self._path, shape or (1,), kind, offset)

    def _read_number(self, dtype: str) -> Any:
        return self._read_numbers(dtype, 1)[0]

    def _read_value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._read_text()
        if kind == ARRAY:
            kind, count = self._read_number("<u4"), self._read_number("<u8")
            if kind in NUMBERS:
                return self._read_numbers(NUMBERS[kind], count)
            return [self._read_value(kind) for _ in range(self._check(count))]
        if kind not in NUMBERS:
            raise ValueError(f"it holds metadata of the unknown kind {kind}")
        value = self._read_number(NUMBERS[kind])
        # The shortest decimal of the float32, not 9.99999997e-07.
        return float(str(np.float32(value))) if NUMBERS[kind] == "<f4" else value

    def _read_text(self) -> str:
        first = self._position + 8
        size = int.from_bytes(self._data[self._position : first], "little")
        self._position = first + self._check(size)
        return str(self._data[first : self._position], "utf-8")

    def _read_numbers(self, dtype: str, count: int) -> list[Any]:
        self._check(count)
        found = np.frombuffer(self._data, dtype, count, self._position)
        self._position += found.nbytes
        return found.tolist()

    def _check(self, count: int) -> int:
        """Return the count if that many bytes remain, or raise ValueError."""
        if count > len(self._data) - self._position:
            raise ValueError("it ends before its metadata does")
        return count
