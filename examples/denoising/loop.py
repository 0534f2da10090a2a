"""Block diffusion in one jit: canvases that follow a shared prompt.

A canvas is a block of C tokens with bidirectional attention to each other and to all
earlier tokens. Each of T steps computes the canvas, keeps the most confident tokens and
redraws the others; then a causal pass writes the final keys and values. Only the tokens
change between steps, so prompts, forks and finished blocks stay in the cache.

Symbols: N samples, C tokens of a canvas, T steps, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jkv

from .checkpoint import Denoiser


class Sizes(NamedTuple):
    """Static sizes of a call."""

    num_samples: int  # N
    num_blocks: int  # canvases per sample
    num_steps: int  # T
    max_context_length: int


def make_cache(denoiser: Denoiser, sizes: Sizes, prompt_length: int, dtype: Any = None):
    """Return an empty cache for a prompt and its samples."""
    own = sizes.num_blocks * denoiser.canvas_length
    config = denoiser.model.cache_config(
        sizes.max_context_length,
        num_blocks=(prompt_length // 16 + 2) + sizes.num_samples * (own // 16 + 2),
        max_sequences=sizes.num_samples + 1,
        dtype=dtype,
    )
    return jkv.init(config)


def denoise(denoiser: Denoiser, cache, prompt, key, sizes: Sizes):
    """Generate N samples of several canvases each.

    Args:
        denoiser: the model.
        cache: an empty cache of `make_cache`; donated.
        prompt: i32[P].
        key: PRNG key of the random tokens.
        sizes: static sizes.

    Returns:
        The cache with all samples open, and the tokens, i32[N, num_blocks * C].
    """
    params = denoiser.encoder, denoiser.decoder, denoiser.conditioning
    static = denoiser.model, denoiser.canvas_length, sizes
    return _denoise(static, params, cache, jnp.asarray(prompt), key)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _denoise(static, params, cache, prompt, key):
    model, length, sizes = static
    encoder, decoder, conditioning = params
    num_samples = sizes.num_samples
    num_rows = num_samples * length
    # The prompt is computed once; forks share its blocks.
    cache, opened = jkv.allocate(cache, [0])
    cache, batch = jkv.append(
        cache, opened.seq_ids, prompt.shape[0], capacity=prompt.shape[0]
    )
    _, cache = model(encoder, prompt, cache, batch)
    cache, forked = jkv.fork(cache, jnp.repeat(opened.seq_ids, num_samples))
    cache, _ = jkv.free(cache, opened.seq_ids)
    vocabulary = model.config.vocab_size
    canvas = jkv.SpanMask(jnp.full((num_rows,), length - 1), one_window=True)

    def make_block(cache, key):
        cache, batch = jkv.append(
            cache,
            forked.seq_ids,
            length,
            capacity=num_rows,
            mask=canvas,
            max_span=length,
        )

        def step(carry, number):
            cache, tokens, logits = carry
            rows = condition(model.config, decoder, conditioning, tokens, logits)
            # Input rows replace embeddings: ids past the vocabulary select them.
            ids = vocabulary + jnp.arange(num_rows, dtype=jnp.int32)
            given = decoder | {"given_rows": rows}
            logits, cache = model(given, ids, cache, batch, all_rows=True)
            noise = jax.random.randint(
                jax.random.fold_in(key, number + 1), tokens.shape, 0, vocabulary
            )
            num_kept = (number + 1) * length // sizes.num_steps
            tokens = keep_surest(logits, noise, num_kept, num_samples)
            return (cache, tokens, logits), None

        tokens = jax.random.randint(
            jax.random.fold_in(key, 0), (num_rows,), 0, vocabulary
        )
        # Logits of -inf mark a missing prediction in `condition`.
        nothing = jnp.full((num_rows, vocabulary), -jnp.inf, jnp.float32)
        numbers = jnp.arange(sizes.num_steps, dtype=jnp.int32)
        (cache, tokens, _), _ = lax.scan(step, (cache, tokens, nothing), numbers)
        final = jkv.with_mask(batch, jkv.CausalMask())
        _, cache = model(encoder, tokens, cache, final)
        return jkv.commit(cache, final), tokens

    keys = jax.random.split(key, sizes.num_blocks)
    cache, blocks = lax.scan(make_block, cache, keys)
    blocks = blocks.reshape(sizes.num_blocks, num_samples, length)
    return cache, jnp.moveaxis(blocks, 1, 0).reshape(num_samples, -1)


def condition(config, params, weights, tokens, logits):
    """Return the input rows of a canvas, [R, E]: embeddings plus the last prediction.

    Args:
        config: the model's configuration.
        params: parameters of the decoder.
        weights: parameters of the conditioning MLP.
        tokens: i32[R], the canvas.
        logits: f32[R, V], of the last step; -inf for none.
    """
    table = params["embedding"]
    embedded = table[tokens] * config.embedding_scale
    has_guess = jnp.isfinite(logits).any(axis=-1, keepdims=True)
    weighed = jax.nn.softmax(jnp.where(has_guess, logits, 0.0)).astype(table.dtype)
    soft = jnp.where(has_guess, weighed @ table * config.embedding_scale, 0)
    normed = _norm(config, soft) * weights["norm"][None]
    gate = jax.nn.gelu(normed @ weights["gate"].T, approximate=True)
    fed = (gate * (normed @ weights["up"].T)) @ weights["down"].T
    return _norm(config, embedded + fed)


def _norm(config, rows):
    """Normalize rows by their root mean square."""
    wide = rows.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_epsilon
    return (wide / jnp.sqrt(mean)).astype(rows.dtype)


def keep_surest(logits, noise, num_kept, num_samples):
    """Return the `num_kept` most confident tokens per canvas, noise elsewhere, i32[R].

    Args:
        logits: f32[N * C, V].
        noise: i32[N * C], random tokens.
        num_kept: i32[], from 0 to C.
        num_samples: N.
    """
    chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sureness = jax.nn.log_softmax(logits).max(axis=-1).reshape(num_samples, -1)
    order = jnp.argsort(-sureness, axis=1, stable=True)
    rank = jnp.argsort(order, axis=1, stable=True).reshape(-1)
    return jnp.where(rank < num_kept, chosen, noise)
