"""Stored tensors of a GGUF file and their dequantization."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from jkv.config import GGUFile
from jkv.config import read_file as read_head

# Supported tensor types, by names of `gguf.GGMLQuantizationType`.
KINDS = (
    *("F32", "F16", "BF16"),
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
BYTES_AT_A_TIME = 2**16  # maximum per dequantized row
EXTRA = "GGUF files need the package gguf: pip install gguf"


def read_file(path: Path) -> GGUFile:
    """Read the header of a GGUF file, and check its tensors.

    Raises:
        ModuleNotFoundError: if the package gguf is not installed.
        FileNotFoundError: if the file or a part of it does not exist.
        ValueError: if the file is damaged or has unsupported tensor types.
    """
    file = read_head(path)
    try:
        kinds = {_map(file, name)[1].name for name in file.tensors} - {*KINDS}
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(EXTRA, name="gguf") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged or cut off ({error})") from error
    if kinds:
        raise ValueError(
            f"{path} holds tensors of types {sorted(kinds)}; supported are "
            f"{', '.join(KINDS)}; use another quantization of the model or its "
            "safetensors"
        )
    return file


def read_tensor(file: GGUFile, name: str, index: int | None = None) -> np.ndarray:
    """Return a tensor or a part of it, dequantized to float32 or float16.

    Args:
        file: the file.
        name: GGUF's name.
        index: on the first axis, such as an expert's number; None for the whole tensor.
    """
    from gguf.quants import dequantize

    data, kind = _map(file, name)
    shape = file.tensors[name].shape
    if index is not None:
        data, shape = data[index], shape[1:]
    if kind.name == "F16":
        return data.view(np.float16)
    # gguf dequantizes 16 rows at a time; longer rows have less overhead.
    num_rows, most = data.size // data.shape[-1], BYTES_AT_A_TIME // data.shape[-1]
    most = max(n for n in range(1, max(most, 1) + 1) if num_rows % n == 0)
    long_rows = data.reshape(num_rows // most, most * data.shape[-1])
    return np.asarray(dequantize(long_rows, kind)).reshape(shape)


def _map(file: GGUFile, name: str) -> tuple[np.ndarray, Any]:
    """Memory-map a tensor; also return its `gguf.GGMLQuantizationType`.

    The bytes have shape u8[*shape[:-1], bytes per row].
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if name not in file.tensors:
        raise ValueError(f"{file.paths[0]} lacks the tensor {name}")
    path, shape, number, offset = file.tensors[name]
    kind = GGMLQuantizationType(number)
    block, size = GGML_QUANT_SIZES[kind]
    if shape[-1] % block or min(shape) < 1:
        raise ValueError(f"rows of {name} are not whole blocks of {block} numbers")
    rows = (*shape[:-1], shape[-1] // block * size)
    if offset + math.prod(rows) > path.stat().st_size:
        raise ValueError(f"{name} lies behind the file's end")
    return np.asarray(np.memmap(path, mode="r", offset=offset, shape=rows)), kind
