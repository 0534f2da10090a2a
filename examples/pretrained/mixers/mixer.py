"""What the model needs to know of a kind of layer with a state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ..config import DecoderConfig
from ..layers import Weights
from ..sources import Shape, Source

# By name, a shape and a dtype.
Arrays = dict[str, tuple[Shape, str]]

# Takes states along, as ``jkv.fold_state`` does those of a layer of a cache:
# (rule, inputs, chunk_rule=, chunk_size=) -> (outputs, what holds the new states).
Fold = Callable[..., tuple[Any, Any]]


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
    # (config, weights, x [R, E], fold) -> [R, E], and what fold returns beside outputs.
    apply: Callable[[DecoderConfig, Weights, jax.Array, Fold], tuple[jax.Array, Any]]
