"""Gemma 4's assistants: small models on the target's own keys.

The assistant's layers have queries alone. A layer attends to the keys of the target's
last layer of its kind, with a window or without one. A row joins the target's embedding
of a token with the hidden states before it.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jkv
from jkv.drafters import Assistant

from ..checkpoint import read_params
from ..config import DecoderConfig, parse_config
from ..layers import linear, multiply, norm
from ..model import Decoder, find_logits
from .sizes import Target
from .tensors import Checkpoint

NUM_TOKENS = 4

# Below the least logit of the chosen clusters, as transformers has it.
BELOW = 1.0


@dataclasses.dataclass(frozen=True)
class AssistantModel:
    """The layers of an assistant, a `jkv.drafters.Reader`.

    decoder: its layers; `key_layers` names a producer of each layer's keys, behind the
        layers' own numbers.
    producers: layers of the target with the keys, in the order of those numbers.
    embedding_scale: float, multiplies the target's embeddings.
    clusters: how many clusters of tokens there are, and how many of them get logits;
        None for logits of all tokens.
    """

    decoder: Decoder
    producers: tuple[int, ...]
    embedding_scale: float
    clusters: tuple[int, int] | None

    def __call__(
        self,
        params: dict[str, Any],
        tokens: jax.Array,
        hidden: jax.Array,
        cache: jkv.Cache,
        batch: jkv.Batch,
    ) -> tuple[jax.Array, jax.Array]:
        """Compute a row of each sequence."""
        config = self.decoder.config
        embedded = jnp.take(params["target_embedding"], tokens, axis=0, mode="clip")
        embedded = embedded * self.embedding_scale
        both = jnp.concatenate([embedded, hidden.astype(embedded.dtype)], axis=-1)
        rows = linear(both, params, "into")
        # The producers' places in the target's groups.
        number = config.num_layers
        places = tuple(
            cache.find_layer(self.producers[each - number])
            for each in config.key_layers
        )
        windows = tuple(
            _widen(window, cache.metadata.groups[place.group].window.length)
            for window, place in zip(config.windows, places, strict=True)
        )
        config = dataclasses.replace(config, key_layers=places, windows=windows)
        decoder = Decoder(config)
        rows, _, _ = decoder.run_layers(params, rows, cache, batch)
        normed = norm(config, rows, params, "final_norm")
        after = linear(normed, params, "out_of")
        if self.clusters is None:
            return find_logits(config, params, normed), after
        return self._find_clustered(params, normed), after

    def _find_clustered(self, params: dict[str, Any], rows: jax.Array) -> jax.Array:
        """Return logits of the tokens in each row's best clusters, and less elsewhere.

        Each cluster holds as many tokens of the vocabulary.
        """
        count, most = self.clusters
        _, best = jax.lax.top_k(multiply(rows, params["centroids"], jnp.float32), most)
        tokens = params["cluster_tokens"].reshape(count, -1)[best]
        tokens = tokens.reshape(rows.shape[0], -1)
        chosen = jnp.take(params["embedding"], tokens, axis=0)
        logits = jnp.einsum("re,rte->rt", rows, chosen).astype(jnp.float32)
        least = jnp.min(logits, axis=1, keepdims=True) - BELOW
        every = jnp.broadcast_to(least, (rows.shape[0], params["embedding"].shape[0]))
        row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
        return every.at[row, tokens].set(logits)


def _widen(window: int | None, most: int | None) -> int | None:
    """Return the window of an assistant's row, which is not cached itself.

    transformers lets it see one cached token more than the window has. A group of
    layers that releases blocks may lack the two oldest of them.
    """
    if window is None or (most is not None and most < window + 2):
        return window
    return window + 2


def read_assistant(
    folder: Path, raw: Mapping[str, Any], target: Target, num_tokens: int | None
) -> Assistant:
    """Read an assistant of Gemma 4 for its target.

    Raises:
        ValueError: for a checkpoint of another kind, or for another target.
    """
    own = target.model.config
    text = dict(raw["text_config"])
    backbone = raw.get("backbone_hidden_size")
    target.check_hidden_size(backbone)
    # All layers share keys, which the target holds: parsed as layers of their own.
    text["num_kv_shared_layers"] = 0
    parsed = parse_config(text | {"tie_word_embeddings": True})
    if own.vocab_size != parsed.vocab_size:
        raise ValueError(
            f"the assistant has a vocabulary of {parsed.vocab_size} tokens, the target "
            f"{own.vocab_size}; take an assistant made for this target"
        )
    producers, key_layers = _find_producers(parsed, own)
    # A peek has no causal order.
    config = dataclasses.replace(parsed, key_layers=key_layers, span_layers=())
    files = Checkpoint(folder, target.params["embedding"].dtype)
    hidden, clusters = config.hidden_size, None
    params = read_params(folder, config, files.dtype, ignored=_BESIDE)
    params |= files.read_all(
        dict(
            into=("pre_projection.weight", (hidden, 2 * backbone)),
            out_of=("post_projection.weight", (backbone, hidden)),
        )
    )
    if raw.get("use_ordered_embeddings"):
        clusters = raw["num_centroids"], raw["centroid_intermediate_top_k"]
        name = "masked_embedding"
        shape = clusters[0], hidden
        params["centroids"] = files.read(f"{name}.centroids.weight", shape)
        ordering = files.read_ids(f"{name}.token_ordering", config.vocab_size)
        params["cluster_tokens"] = jnp.asarray(ordering)
    params["target_embedding"] = target.params["embedding"]
    reader = AssistantModel(Decoder(config), producers, own.embedding_scale, clusters)
    return Assistant(
        reader=reader,
        params=params,
        last=own.num_layers,
        num_tokens=num_tokens or NUM_TOKENS,
    )


_BESIDE = ("pre_projection.", "post_projection.", "masked_embedding.")


def _find_producers(
    drafting: DecoderConfig, target: DecoderConfig
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the target's layers with keys, and which of them each layer attends to.

    The latter as numbers behind the assistant's layers, which no layer has.
    """
    last: dict[bool, int] = {}
    for layer in range(target.num_cached_layers):
        last[target.windows[layer] is not None] = layer
    kinds = [window is not None for window in drafting.windows]
    missing = set(kinds) - last.keys()
    if missing:
        raise ValueError(
            "the assistant has a kind of layers, with or without a window, that the "
            "target has not; take an assistant made for this target"
        )
    producers = tuple(dict.fromkeys(last[kind] for kind in kinds))
    numbers = tuple(drafting.num_layers + producers.index(last[kind]) for kind in kinds)
    return producers, numbers
