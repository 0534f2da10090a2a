"""Dequantization of a checkpoint's matrices.

* "mxfp4" (gpt-oss): blocks of 32 adjacent 4-bit values, two per byte with the first in
  the low bits, share a power of two (Open Compute Project, Microscaling Formats,
  version 1.0).
* "fp8": 8-bit floats share a scale per block of rows and columns (DeepSeek) or per
  matrix (Mistral).
"""

import dataclasses

import numpy as np

from .settings import Settings, is_int

METHODS = ("mxfp4", "fp8")

# Values of the low three bits; the fourth bit is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.asarray([*MAGNITUDES, *(-m for m in MAGNITUDES)], np.float32)
EXPONENT_OF_ONE = 127


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Storage format of a checkpoint's matrices.

    method: one of ``METHODS``.
    block: for "fp8", rows and columns per scale; None for one scale per matrix.
    """

    method: str
    block: tuple[int, int] | None = None


def read_quantization(settings: Settings) -> Quantization | None:
    """Read ``quantization_config``; return None for unquantized weights.

    Raises:
        ValueError: for a method that is not supported.
    """
    given = settings.part("quantization_config", {})
    if not given:
        return None
    method = given.get("quant_method")
    if method not in METHODS:
        raise ValueError(
            f"config.json: checkpoints quantized by {method!r} (quant_method) are not "
            f"supported, only by {' and '.join(METHODS)}; use the float16, bfloat16 or "
            "float32 original"
        )
    if method == "mxfp4":
        return Quantization(method)
    block = given.get("weight_block_size")
    if block is None:
        return Quantization(method)
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(is_int(size) and size > 0 for size in block):
        raise ValueError(
            "config.json: the weight_block_size of an fp8 checkpoint must be null or "
            f"two ints >= 1, got {block!r}"
        )
    return Quantization(method, (block[0], block[1]))


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return f32[..., 32 G] from values u8[..., G, 16] and exponents u8[..., G]."""
    decoded = np.empty((*blocks.shape, 2), np.float32)
    decoded[..., 0] = VALUES[blocks & 15]
    decoded[..., 1] = VALUES[blocks >> 4]
    exponents = scales.astype(np.int32) - EXPONENT_OF_ONE
    decoded = np.ldexp(decoded, exponents[..., None, None])
    return decoded.reshape(*blocks.shape[:-2], -1)


def scale_blocks(
    matrix: np.ndarray, scales: np.ndarray, block: tuple[int, int] | None
) -> np.ndarray:
    """Return f32[O, I], a matrix times its only scale or the scales of its blocks."""
    scaled = matrix.astype(np.float32)
    if block is None:
        if scales.size != 1:
            raise ValueError(
                f"a matrix without weight_block_size needs one scale, got {scales.size}"
            )
        scaled *= scales.reshape(-1)[0].astype(np.float32)
        return scaled
    rows, columns = (-(-n // size) for n, size in zip(matrix.shape, block, strict=True))
    if scales.shape != (rows, columns):
        raise ValueError(
            f"a matrix of shape {matrix.shape} in blocks of {block} needs scales of "
            f"shape {(rows, columns)}, got {scales.shape}"
        )
    for row in range(rows):
        wide = np.repeat(scales[row].astype(np.float32), block[1])[: matrix.shape[1]]
        scaled[row * block[0] : (row + 1) * block[0]] *= wide
    return scaled
