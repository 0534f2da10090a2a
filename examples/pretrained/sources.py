"""Sources of a model's parameters in the tensors of a checkpoint."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Source(NamedTuple):
    """Source of a parameter.

    shape: shape of the parameter.
    stored: shape of the tensor, or of each expert's tensor.
    take: converts the tensor, or each expert's tensor, to the parameter.
    num_experts: number of stacked tensors or parts of a tensor; 0 without experts.
    name: tensor name within the layer; {} is replaced by the expert's number.
    """

    shape: Shape
    stored: Shape
    take: Callable[[np.ndarray], np.ndarray] = lambda tensor: tensor
    num_experts: int = 0
    name: str = ""


def list_whole(**shapes: Shape) -> dict[str, Source]:
    """Return sources of parameters that equal their tensors."""
    return {name: Source(shape, shape) for name, shape in shapes.items()}
