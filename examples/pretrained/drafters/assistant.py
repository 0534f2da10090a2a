"""Gemma 4's assistants: small models that attend to the target's keys.

The assistant's layers have queries only. A layer attends to the keys of the target's
last layer of its kind, full attention or sliding window. A row's input concatenates the
target's embedding of a token and the hidden state before it.
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
from ..settings import Settings
from .sizes import Target
from .tensors import Checkpoint

NUM_TOKENS = 4

# Distance of other tokens' logits below the lowest selected one, as in transformers.
BELOW = 1.0


@dataclasses.dataclass(frozen=True)
class AssistantModel:
    """The layers of an assistant, a `jkv.drafters.Reader`.

    decoder: its layers; `key_layers` are indices into `producers`, plus the number of
        layers.
    producers: layers of the target with the keys.
    embedding_scale: float, factor of the target's embeddings.
    clusters: (int, int), number of token clusters, and number of clusters with logits
        per row; None: logits of all tokens.
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
        """Return logits f32[R, V] and the next hidden states, one row per sequence."""
        config = self.decoder.config
        embedded = jnp.take(params["target_embedding"], tokens, axis=0, mode="clip")
        embedded = embedded * self.embedding_scale
        both = jnp.concatenate([embedded, hidden.astype(embedded.dtype)], axis=-1)
        rows = linear(both, params, "into")
        # Group and index of each producer in the target's cache.
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
        """Return logits of each row's best clusters, and a lower value elsewhere.

        All clusters have equally many tokens of the vocabulary.
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

    In transformers it attends to one cached token more than the window. A group that
    releases blocks may lack the two oldest tokens.
    """
    if window is None or (most is not None and most < window + 2):
        return window
    return window + 2


def read_assistant(
    folder: Path, raw: Mapping[str, Any], target: Target, num_tokens: int | None
) -> Assistant:
    """Read a Gemma 4 assistant for its target.

    Raises:
        ValueError: for an invalid checkpoint, or a drafter of another target.
    """
    own, settings = target.model.config, Settings(raw)
    text = dict(settings.part("text_config"))
    backbone = settings.count("backbone_hidden_size")
    target.check_hidden_size(backbone)
    # All layers use the target's keys; parse them as layers with their own keys.
    text["num_kv_shared_layers"] = 0
    parsed = parse_config(text | {"tie_word_embeddings": True})
    target.check_vocab_size(parsed.vocab_size)
    producers, key_layers = _find_producers(parsed, own)
    # Rows of a peek have no causal order, in any layer.
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
    if settings.flag("use_ordered_embeddings"):
        clusters = _read_clusters(settings, config.vocab_size)
        name = "masked_embedding"
        shape = clusters[0], hidden
        params["centroids"] = files.read(f"{name}.centroids.weight", shape)
        sizes = config.vocab_size, config.vocab_size
        params["cluster_tokens"] = files.read_ids(f"{name}.token_ordering", *sizes)
    params["target_embedding"] = target.params["embedding"]
    reader = AssistantModel(Decoder(config), producers, own.embedding_scale, clusters)
    return Assistant(
        reader=reader,
        params=params,
        last=own.num_layers,
        num_tokens=num_tokens or NUM_TOKENS,
    )


_BESIDE = ("pre_projection.", "post_projection.", "masked_embedding.")


def _read_clusters(settings: Settings, vocab_size: int) -> tuple[int, int]:
    """Return the number of clusters, and how many have logits per row."""
    count = settings.count("num_centroids")
    most = settings.count("centroid_intermediate_top_k")
    if vocab_size % count or most > count:
        raise ValueError(
            f"config.json: num_centroids {count} must divide the {vocab_size} tokens, "
            f"and centroid_intermediate_top_k {most} must not exceed it"
        )
    return count, most


def _find_producers(
    drafting: DecoderConfig, target: DecoderConfig
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the target's layers with keys, and each layer's index among them.

    The number of layers is added to each index, to differ from every layer's own.
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
