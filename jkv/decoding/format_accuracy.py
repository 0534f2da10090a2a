"""Accuracy and memory of KV cache formats, measured on a model.

A sequence is run once per format in chunks, like a prompt, so that earlier tokens are
read from the cache. Next-token predictions are compared with a float32 cache's.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import explains_arguments
from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig, as_grouped
from jkv.decoding.model.runner import Runner
from jkv.decoding.model.steps import Model
from jkv.decoding.sampling.draws import pick_logprobs
from jkv.decoding.scoring.scored import resize
from jkv.making.initialization import init
from jkv.metadata.requests import as_prompts
from jkv.verbs.allocation import allocate

Stored: TypeAlias = Any | tuple[Any, Any]  # dtype, or one for keys and one for values

FORMATS: tuple[Stored, ...] = ("bfloat16", "int8", "fp8", ("int8", "int4"), "int4")
CHUNK_SIZE = 128  # tokens per call of the model, all with logits


class FormatAccuracy(NamedTuple):
    """Accuracy and memory of one format."""

    name: str  # dtypes of keys and values
    perplexity: float  # exp of the mean loss per token
    ratio: float  # perplexity relative to float32
    equal_tokens: float  # share of positions with float32's most likely token
    bytes_per_token: int  # in all layers with keys and values
    num_tokens: int  # that fit the bytes of `config`


@explains_arguments
def measure_formats(
    model: Model,
    params: Any,
    tokens: Sequence[int] | np.ndarray[Any, Any],
    config: CacheConfig | GroupedConfig,
    formats: Sequence[Stored] = FORMATS,
) -> list[FormatAccuracy]:
    """Measure perplexity and memory of KV cache formats on a sequence of tokens.

    A few thousand tokens of the model's domain resolve differences of 1%. Pass the
    weights in their serving dtype for figures as served; float32 weights isolate the
    effect of the format.

    Args:
      model: see `Model`.
      params: its weights.
      tokens: i32[T], at least two tokens. Sequences longer than `max_context_length`
        are split.
      config: of the planned cache. Only its shape and its bytes are used, not its
        dtypes and counts.
      formats: as for `CacheConfig`: dtypes for keys and values alike, or pairs of a
        dtype for keys and one for values.

    Returns:
      A `FormatAccuracy` for float32 and then one for each format, in order.

    Raises:
      ValueError: for fewer than two tokens, or an unknown dtype.

    Example:
      >>> import jax, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 50)[batch.last_rows] * 50.0, cache
      >>> for found in jkv.measure_formats(
      ...         count_on, None, range(40), jkv.CacheConfig.toy(), formats=["int8"]):
      ...     print(found.name, round(found.ratio, 3), found.equal_tokens,
      ...         found.bytes_per_token, found.num_tokens)
      float32 1.0 1.0 64 16
      int8 1.0 1.0 20 51
    """
    sequences = _cut(tokens, config.max_context_length)
    rows, exact, exact_mean = [], None, 0.0
    for stored in ("float32", *formats):
        planned = _plan(as_grouped(config), stored)
        read = jax.jit(functools.partial(_read, model, planned))
        found = [jax.device_get(read(params, *sequence)) for sequence in sequences]
        losses, likeliest = map(np.concatenate, zip(*found, strict=True))
        is_token = np.concatenate([np.arange(len(t)) < n - 1 for t, n in sequences])
        mean = float(losses[is_token].mean(dtype=np.float64))
        if exact is None:
            exact, exact_mean = likeliest, mean
        groups = planned.block_groups
        bytes_per_token = sum(each.bytes_per_token for each in groups)
        rows.append(
            FormatAccuracy(
                name=" and ".join(dict.fromkeys(str(g.sizes.formats) for g in groups)),
                perplexity=float(np.exp(mean)),
                ratio=float(np.exp(mean - exact_mean)),
                equal_tokens=float((likeliest == exact)[is_token].mean()),
                bytes_per_token=bytes_per_token,
                num_tokens=config.storage_bytes // bytes_per_token,
            )
        )
    return rows


def _cut(tokens: Any, max_context_length: int) -> list[tuple[np.ndarray, int]]:
    """Split tokens into sequences, i32[T] of one length, with their token counts."""
    (whole,) = np.asarray(as_prompts([np.asarray(tokens).tolist()]))
    size = min(max_context_length, len(whole))
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    pieces = [each for each in pieces if len(each) > 1]
    if not pieces:
        raise ValueError(
            f"tokens must have at least two tokens, got {len(whole)}; the cache takes "
            f"{max_context_length} at most"
        )
    padded = -(-size // CHUNK_SIZE) * CHUNK_SIZE
    return [(np.pad(each, (0, padded - len(each))), len(each)) for each in pieces]


def _plan(config: GroupedConfig, stored: Stored) -> GroupedConfig:
    """Return a configuration for one sequence, with other dtypes of keys and values."""
    key, value = stored if isinstance(stored, tuple) else (stored, None)

    def of_blocks(group: CacheConfig) -> dict[str, Any]:
        return dict(
            max_sequences=1,
            num_blocks=group.most_blocks(CHUNK_SIZE),
            dtype=key,
            value_dtype=None if group.values_in_keys else value,
        )

    of_states = dict(max_sequences=1, num_snapshots=0, snapshot_every=None)
    return resize(config, of_blocks, of_states)


def _read(
    model: Model,
    config: GroupedConfig,
    params: Any,
    sequence: jax.Array,  # i32[T], T a multiple of CHUNK_SIZE
    length: jax.Array,  # i32[]
) -> tuple[jax.Array, jax.Array]:
    """Return the loss of each next token, f32[T], and the most likely token, i32[T]."""
    cache, opened = allocate(init(config), [0])
    rows = jnp.arange(CHUNK_SIZE, dtype=jnp.int32)
    runner = Runner(model, params)

    def step(cache: Any, chunk: Any) -> Any:
        start, tokens, following = chunk
        count = jnp.clip(length - start, 0, CHUNK_SIZE)[None]
        cache, _, logits = runner.run(
            cache, opened.seq_ids, tokens, count, logit_rows=rows
        )
        likeliest = jnp.argmax(logits, axis=1).astype(jnp.int32)
        return cache, (-pick_logprobs(logits, following), likeliest)

    starts = jnp.arange(0, sequence.shape[0], CHUNK_SIZE, dtype=jnp.int32)
    following = jnp.append(sequence[1:], sequence[:1])
    cut = (each.reshape(-1, CHUNK_SIZE) for each in (sequence, following))
    _, found = jax.lax.scan(step, cache, (starts, *cut))
    losses, likeliest = (each.reshape(-1) for each in found)
    return losses, likeliest
