"""What the model needs to know of a kind of layer with a state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import jkv

from ..config import DecoderConfig
from ..layers import Weights
from ..sources import Shape, Source

# By name, a shape and a dtype.
Arrays = dict[str, tuple[Shape, str]]


class Mixer(NamedTuple):
    """A kind of layer with a state: its parameters, what it keeps, what it computes."""

    # config -> where its parameters come from, by names that begin alike.
    list_tensors: Callable[[DecoderConfig], dict[str, Source]]
    # config -> the state of a sequence in one layer.
    list_state: Callable[[DecoderConfig], Arrays]
    # config -> of one token, what the state after it follows from; named as the rule's
    # inputs are.
    list_inputs: Callable[[DecoderConfig], Arrays]
    # The axis of each array, of state and inputs, that devices of a mesh may share.
    heads_axes: dict[str, int]
    # (config, weights, x [R, E], cache, layer, batch) -> [R, E], cache.
    apply: Callable[
        [DecoderConfig, Weights, jax.Array, jkv.Cache, Any, jkv.Batch],
        tuple[jax.Array, jkv.Cache],
    ]
