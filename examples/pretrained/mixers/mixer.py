"""Interface between the model and token mixers with a recurrent state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ..config import DecoderConfig
from ..layers import Weights
from ..sources import Source

# Updates states by a rule, as ``jkv.fold_state`` for a layer of a cache: (rule,
# inputs, chunk_rule=, chunk_size=) -> (outputs, the holder of the new states).
Fold = Callable[..., tuple[Any, Any]]


class Mixer(NamedTuple):
    """A token mixer with a recurrent state: its parameters and its computation.

    The rule reads and returns the arrays of `DecoderConfig.state`, by name.
    """

    # config -> sources of its parameters, by names with a common prefix.
    list_tensors: Callable[[DecoderConfig], dict[str, Source]]
    # (config, weights, x [R, E], fold) -> [R, E], and fold's second result.
    apply: Callable[[DecoderConfig, Weights, jax.Array, Fold], tuple[Any, Any]]
    # True: instead of [R, E], `apply` returns the inputs of attention by name, "query"
    # [R, H * D], "key" and "value" [R, K * D].
    feeds_attention: bool = False
