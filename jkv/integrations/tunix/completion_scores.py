"""Log-probabilities of completions, whose prompt is computed once for all of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jkv
from jkv.integrations.tunix.padding import check_texts, pad_right
from jkv.integrations.tunix.paged_model import PagedModel, Pages, Params
from jkv.integrations.tunix.repeats import find_repeats

_score = jax.jit(jkv.score, static_argnames=("model", "config"))


def score_completions(
    model: PagedModel,
    weights: nnx.State[Any, Any],
    pages: Pages,
    prompt_tokens: jax.Array,  # i32[B, P]
    completion_tokens: jax.Array,  # i32[B, C]
    *,
    pad_id: int,
    block_size: int,
) -> jax.Array:
    """Return the log-probabilities of completions, f32[B, C], 0 past their ends.

    A padding token with another token behind it was chosen, and is a token like any
    other. Of those at the end the first is scored too: where texts are padded with the
    token that ends them, it is that one.

    Args:
      model: of tunix.
      weights: its state.
      pages: what its layers keep.
      prompt_tokens: i32[B, P], padded on the left.
      completion_tokens: i32[B, C], padded on the right.
      pad_id: the padding.
      block_size: tokens a block.

    Raises:
      ValueError: for a prompt without tokens.
    """
    given = np.asarray(prompt_tokens, np.int32)
    texts = [row[row != pad_id].tolist() for row in given]
    check_texts(texts)
    repeats = find_repeats(texts)
    prompts = pad_right([texts[prompt] for prompt in repeats.first], given.shape[1])
    completions = np.asarray(completion_tokens, np.int32)[repeats.prompts]
    ends = find_ends(completions, pad_id)
    is_past = np.arange(completions.shape[1]) > ends[:, None]
    scores = _score(
        model,
        Params(weights, 1.0),
        prompts,
        np.where(is_past, np.int32(-1), completions),
        config=_configure(pages, block_size),
    )
    return jnp.zeros_like(scores).at[repeats.prompts].set(scores)


def find_ends(completions: np.ndarray, pad_id: int) -> np.ndarray:
    """Return where the padding of each completion begins, i64[B], C without any."""
    is_token = completions != pad_id
    behind = np.argmax(is_token[:, ::-1], axis=1)  # the padding of texts that have any
    return np.where(is_token.any(axis=1), completions.shape[1] - behind, 0)


@functools.cache
def _configure(pages: Pages, block_size: int) -> jkv.CacheConfig:
    """Return what `jkv.score` wants to know of a model; it counts blocks itself."""
    return jkv.CacheConfig(
        num_layers=pages.num_layers,
        num_kv_heads=pages.num_kv_heads,
        head_dim=pages.head_dim,
        block_size=block_size,
        num_blocks=1,
        max_sequences=1,
        max_context_length=1,
    )
