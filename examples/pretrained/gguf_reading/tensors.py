"""Tensors of a GGUF file under the names and in the layout of a checkpoint."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from jkv.config import GGUFile

from .settings import KINDS
from .stored import read_file, read_tensor

# Tensors that are computed from the config instead.
ROPES = ("freqs", "factors_short", "factors_long")
DERIVED = {f"rope_{name}.weight" for name in ROPES}
# Tensor of one expert in a checkpoint; GGUF stacks all experts of a layer.
EXPERT = re.compile(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight")
STACKED = dict(gate_proj="gate", up_proj="up", down_proj="down")
STACKED |= dict(w1="gate", w3="up", w2="down")
# Matrices with one row, which GGUF may store as vectors.
ROWS = ("mlp.shared_expert_gate.weight", "moe_statics.e_score_correction_bias")


def name_tensors(file: GGUFile, known: set[str]) -> dict[str, str]:
    """Map a checkpoint's tensor names to GGUF's names.

    Args:
        file: the file. Unknown tensors keep their names; layers for speculative
            decoding are omitted.
        known: the checkpoint's names.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    layers = file.num_layers
    names = get_tensor_name_map(numbers[file.architecture], layers)

    def find(name: str) -> str | None:
        if expert := EXPERT.fullmatch(name):
            return f"blk.{expert[1]}.ffn_{STACKED[expert[3]]}_exps.weight"
        # Biases without a layer, such as e_score_correction_bias.
        name = re.sub("_bias$", ".bias", name)
        return names.get_name(name, try_suffixes=(".weight", ".bias"))

    named = {name: find(name) for name in known}
    found = {name: other for name, other in named.items() if other in file.tensors}
    strange = file.tensors.keys() - {*found.values()} - DERIVED
    past = tuple(f"blk.{i}." for i in range(layers, file.need("block_count")))
    return found | {name: name for name in strange if not name.startswith(past)}


class GGUFTensors:
    """A GGUF file with the interface of `safetensors.safe_open`."""

    def __init__(self, index: Path) -> None:
        """Open the file of an index."""
        written = json.loads(index.read_text(encoding="utf-8"))
        self._names = written["weight_map"]
        self._file = read_file(Path(written["file"]))
        self._kind = KINDS[self._file.model_type]

    def get_slice(self, name: str) -> "_Stored":
        """Return a tensor that is read when indexed."""
        return _Stored(functools.partial(self.get_tensor, name))

    def get_tensor(self, name: str) -> np.ndarray:
        """Return a tensor in the checkpoint's layout."""
        expert = EXPERT.fullmatch(name)
        index = int(expert[2]) if expert else None
        tensor = read_tensor(self._file, self._names[name], index)
        if self._kind.norm_offset and name.endswith("norm.weight"):
            tensor = tensor - np.float32(self._kind.norm_offset)
        if name.endswith(ROWS):
            tensor = tensor.reshape(1, -1)
        if self._kind.is_permuted:
            for part, key in (("q_proj", "head_count"), ("k_proj", "head_count_kv")):
                if f".{part}." in name:
                    heads = self._file.need(f"attention.{key}")
                    tensor = _halve_heads(tensor, heads)
        return tensor


class _Stored:
    """A float tensor, read on demand."""

    def __init__(self, read: Any) -> None:
        self._read = read

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._read()[index]


def _halve_heads(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Convert rows [H * D, ...] from adjacent RoPE pairs to pairs of half heads."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
