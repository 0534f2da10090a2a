"""Where parameters of a model come from: tensors of a checkpoint, or parts of them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Source(NamedTuple):
    """Where a parameter comes from.

    shape: of the parameter.
    stored: of the tensor, or of each expert's.
    take: makes the parameter, or each expert's, from the tensor.
    num_experts: tensors, or parts of one, that are stacked; 0 for none.
    name: of the tensor in its layer; {} stands for the number of the expert.
    """

    shape: Shape
    stored: Shape
    take: Callable[[np.ndarray], np.ndarray] = lambda tensor: tensor
    num_experts: int = 0
    name: str = ""


def list_whole(**shapes: Shape) -> dict[str, Source]:
    """Return sources of parameters that are tensors as they are."""
    return {name: Source(shape, shape) for name, shape in shapes.items()}
