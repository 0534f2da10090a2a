"""The model's interface to a kind of layer with a state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ..config import DecoderConfig
from ..layers import Weights
from ..sources import Source

# Carries states along, as ``jkv.fold_state`` does for a layer of a cache: (rule,
# inputs, chunk_rule=, chunk_size=) -> (outputs, the holder of the new states).
Fold = Callable[..., tuple[Any, Any]]


class Mixer(NamedTuple):
    """A kind of layer with a state: its parameters, and its computation with a rule.

    Its state is `DecoderConfig.state`, with the names that the rule has.
    """

    # config -> where its parameters come from, by names that begin alike.
    list_tensors: Callable[[DecoderConfig], dict[str, Source]]
    # (config, weights, x [R, E], fold) -> [R, E], and fold's second result.
    apply: Callable[[DecoderConfig, Weights, jax.Array, Fold], tuple[Any, Any]]
    # Instead of [R, E] `apply` returns the rows that the layer attends with, by name:
    # "query" [R, H * D], "key" and "value" [R, K * D].
    feeds_attention: bool = False
