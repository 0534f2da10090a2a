"""What the model needs to know of a kind of layer with a state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ..config import DecoderConfig
from ..layers import Weights
from ..sources import Source

# Takes states along, as ``jkv.fold_state`` does those of a layer of a cache:
# (rule, inputs, chunk_rule=, chunk_size=) -> (outputs, what holds the new states).
Fold = Callable[..., tuple[Any, Any]]


class Mixer(NamedTuple):
    """A kind of layer with a state: its parameters, and what it computes of a rule.

    What it keeps is `DecoderConfig.state`, with the names that the rule has.
    """

    # config -> where its parameters come from, by names that begin alike.
    list_tensors: Callable[[DecoderConfig], dict[str, Source]]
    # (config, weights, x [R, E], fold) -> [R, E], and what fold returns beside outputs.
    apply: Callable[[DecoderConfig, Weights, jax.Array, Fold], tuple[jax.Array, Any]]
