"""The tensors of a GGUF file as they are stored, and their numbers."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from jkv.config import GGUFile
from jkv.config import read_file as read_head

# Kinds of tensors that are served, as `gguf.GGMLQuantizationType` names them.
KINDS = (
    *("F32", "F16", "BF16"),
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
BYTES_AT_A_TIME = 2**16  # that a row to dequantize has at most
EXTRA = "GGUF files need the package gguf: pip install gguf"


def read_file(path: Path) -> GGUFile:
    """Read the head of a GGUF file, and see whether its tensors are there.

    Raises:
        ModuleNotFoundError: without the package gguf.
        FileNotFoundError: for a file, or a part of one, that is not there.
        ValueError: for a file that is damaged or holds kinds that are not served.
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
            f"{path} holds tensors of the kinds {sorted(kinds)}; served are "
            f"{', '.join(KINDS)}: take another quantization of the model, or its "
            "safetensors"
        )
    return file


def read_tensor(file: GGUFile, name: str, index: int | None = None) -> np.ndarray:
    """Return a tensor's numbers, float32 or float16, or a part of them.

    Args:
        file: that holds it.
        name: GGUF's.
        index: of the first axis, such as an expert's number; None for all.
    """
    from gguf.quants import dequantize

    data, kind = _map(file, name)
    shape = file.tensors[name].shape
    if index is not None:
        data, shape = data[index], shape[1:]
    if kind.name == "F16":
        return data.view(np.float16)
    # The package takes 16 rows at a time, so that long ones cost it less.
    num_rows, most = data.size // data.shape[-1], BYTES_AT_A_TIME // data.shape[-1]
    most = max(n for n in range(1, max(most, 1) + 1) if num_rows % n == 0)
    long_rows = data.reshape(num_rows // most, most * data.shape[-1])
    return np.asarray(dequantize(long_rows, kind)).reshape(shape)


def _map(file: GGUFile, name: str) -> tuple[np.ndarray, Any]:
    """Return a tensor's bytes, mapped, row by row, and its `gguf.GGMLQuantizationType`.

    They are u8[*shape[:-1], bytes of a row].
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    path, shape, number, offset = file.tensors[name]
    kind = GGMLQuantizationType(number)
    block, size = GGML_QUANT_SIZES[kind]
    if shape[-1] % block or min(shape) < 1:
        raise ValueError(f"rows of {name} are no whole blocks of {block} numbers")
    rows = (*shape[:-1], shape[-1] // block * size)
    if offset + math.prod(rows) > path.stat().st_size:
        raise ValueError(f"{name} lies behind the file's end")
    return np.asarray(np.memmap(path, mode="r", offset=offset, shape=rows)), kind
