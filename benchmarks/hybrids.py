"""Hybrid models for benchmarks: sizes, random weights, and states outside the cache.

Layers are those of `examples/pretrained`, three with the gated delta rule before each
one with attention, as in Qwen3-Next and Qwen3.5. The states of a `BareModel` are plain
arrays outside the cache, the lower bound of a model's cost.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # the examples are no package

import pretrained  # noqa: E402  (found through the line above)
from pretrained.mixers import MIXERS, delta_layer  # noqa: E402

NUM_LAYERS, BLOCK_SIZE = 8, 16

# Independent of the hidden size; the delta rule as in the released models, with a key
# head per 128 components and twice as many value heads.
FIELDS: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "full_attention_interval": 4,
    "vocab_size": 8_192,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8_192,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
    },
}
# The released Qwen3-Next; only its sizes are used.
QWEN3_NEXT_80B: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "vocab_size": 151_936,
}
# Arrays by name: [L, S, ...], or for each of the L layers [S, ...].
States = dict[str, Any]


def dense_fields(hidden: int) -> dict[str, Any]:
    """Return the config.json of a Qwen3.5 of 8 layers with MLPs."""
    return FIELDS | {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 64,
        "linear_num_key_heads": hidden // 128,
        "linear_num_value_heads": hidden // 64,
    }


def experts_fields(hidden: int) -> dict[str, Any]:
    """Return the config.json of a Qwen3-Next; 100 million parameters at 512."""
    return dense_fields(hidden) | {
        "model_type": "qwen3_next",
        "num_experts": 24,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    }


def describe_model(fields: dict[str, Any]) -> Any:
    """Return a model without weights."""
    return pretrained.Decoder(pretrained.parse_config(fields))


def make_model(fields: dict[str, Any]) -> tuple[Any, Any]:
    """Return a model and random weights in float32."""
    model, key = describe_model(fields), jax.random.key(0)
    return model, pretrained.random_params(model.config, key, jnp.float32)


def make_config(
    model: Any, length: int, num_sequences: int, **options: Any
) -> jkv.GroupedConfig:
    """Return a float32 cache configuration with room for all sequences' tokens."""
    return model.cache_config(
        length,
        max_sequences=num_sequences,
        block_size=BLOCK_SIZE,
        dtype=jnp.float32,
        **options,
    )


def find_states(config: jkv.GroupedConfig) -> jkv.StateConfig:
    """Return the group of recurrent-state layers."""
    (group,) = (each for each in config.groups if isinstance(each, jkv.StateConfig))
    return group


class BareModel:
    """A model with its states in arrays outside the cache, one row per sequence.

    Attention uses the cache. The arrays are [L, S, ...], or a tuple of [S, ...] for
    each of the L layers: XLA updates either in place, and the second without slicing
    out a layer.
    """

    def __init__(self, model: Any, by_layer: bool) -> None:
        """Register a mixer that reads and writes these arrays."""
        config, self.by_layer = model.config, by_layer
        self.name = f"bare_{config.hidden_size}_{by_layer}"
        MIXERS[self.name] = MIXERS["delta_rule"]._replace(apply=self._apply)
        named = {"delta_rule": self.name, "attention": "attention"}
        mixers = tuple((named[kind],) for (kind,) in config.layer_mixers)
        self.model = pretrained.Decoder(dataclasses.replace(config, mixers=mixers))
        has_state = [kinds == (self.name,) for kinds in mixers]
        self.numbers = np.cumsum(has_state) - 1  # index of a layer among the L
        self._arrays: States = {}

    def init(self, config: jkv.GroupedConfig) -> tuple[jkv.Cache, States]:
        """Return a cache without states, and zero arrays for them."""
        group = find_states(config)
        kept = tuple(each for each in config.groups if each is not group)
        groups = (config.groups[number] for number in config.layer_groups)
        numbers = tuple(() if g is group else kept.index(g) for g in groups)
        arrays: States = {}
        for name, (shape, dtype) in group.arrays.items():
            shape = group.max_sequences, *shape
            if self.by_layer:
                layers = range(group.num_layers)
                arrays[name] = tuple(jnp.zeros(shape, dtype) for _ in layers)
            else:
                arrays[name] = jnp.zeros((group.num_layers, *shape), dtype)
        bare = jkv.GroupedConfig(groups=kept, layer_groups=numbers)
        return jkv.init(bare), arrays

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,
        carry: tuple[jkv.Cache, States],
        batch: jkv.Batch,
    ) -> tuple[jax.Array, tuple[jkv.Cache, States]]:
        """Return the logits, the cache and the arrays, after one token per row."""
        # During tracing the layers read and replace these arrays.
        cache, self._arrays = carry
        logits, cache = self.model(params, tokens, cache, batch)
        arrays, self._arrays = self._arrays, {}
        return logits, (cache, arrays)

    def _apply(
        self, config: Any, weights: Any, x: jax.Array, fold: functools.partial[Any]
    ) -> tuple[jax.Array, Any]:
        cache, layer, _ = fold.args  # arguments of a fold in a cache
        fold = functools.partial(self._fold, int(self.numbers[layer]))
        mixed, self._arrays = delta_layer.apply(config, weights, x, fold)
        return mixed, cache

    def _fold(self, number: int, rule: Any, inputs: Any, **_: Any) -> Any:
        old = {name: array[number] for name, array in self._arrays.items()}
        new, outputs = jax.vmap(rule)(old, inputs)
        return outputs, {
            name: self._put(array, number, new[name])
            for name, array in self._arrays.items()
        }

    def _put(self, array: Any, number: int, new: jax.Array) -> Any:
        if self.by_layer:
            return *array[:number], new, *array[number + 1 :]
        return array.at[number].set(new)
