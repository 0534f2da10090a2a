"""What formats of keys and values cost a model, and what they give: it is measured.

A text is read once for each format, in chunks, as a prompt is: what a token sees of the
text before it comes out of the cache. The model's predictions of each next token are
compared with those that it makes on a cache in float32.
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
from jkv.decoding.model.protocol import Model
from jkv.decoding.model.runner import Runner
from jkv.decoding.sampling.draws import pick_logprobs
from jkv.decoding.scoring.scored import resize
from jkv.making.initialization import init
from jkv.metadata.requests import as_prompts
from jkv.verbs.allocation import allocate

Stored: TypeAlias = Any | tuple[Any, Any]  # dtype, or those of keys and of values

FORMATS: tuple[Stored, ...] = ("bfloat16", "int8", "fp8", ("int8", "int4"), "int4")
CHUNK_SIZE = 128  # tokens of a call of the model, each with logits


class FormatAccuracy(NamedTuple):
    """What one format costs a model, and what it gives."""

    name: str  # of the dtypes of keys and values
    perplexity: float  # exp of the mean loss of a token
    ratio: float  # this by that of float32
    equal_tokens: float  # share of positions whose likeliest token is float32's
    bytes_per_token: int  # in all layers that keep it
    num_tokens: int  # that fit the bytes of the configuration's keys and values


@explains_arguments
def measure_formats(
    model: Model,
    params: Any,
    tokens: Sequence[int] | np.ndarray[Any, Any],
    config: CacheConfig | GroupedConfig,
    formats: Sequence[Stored] = FORMATS,
) -> list[FormatAccuracy]:
    """Measure what formats of keys and values cost a model on a text, and give.

    Some thousands of tokens of the kind that the model is for tell differences of 1%.
    Numbers of a model as it serves are had with its weights in the dtype that it serves
    with; float32 shows what the format alone does.

    Args:
      model: see `Model`.
      params: its weights.
      tokens: i32[T], a text of at least two tokens. What is longer than the
        configuration's `max_context_length` is cut into several.
      config: of the cache that is planned. Its dtypes and counts are not used, but for
        the bytes that are to be filled.
      formats: as `CacheConfig` takes them: dtypes, each for keys and values alike, or
        pairs of the keys' and the values'.

    Returns:
      One for each format, in order, float32 before them.

    Raises:
      ValueError: for a text that is too short, or a dtype that there is not.

    Example:
      >>> import jax, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 50)[batch.last_rows] * 50.0, cache
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=32)
      >>> for found in jkv.measure_formats(
      ...         count_on, None, range(40), config, formats=["int8"]):
      ...     print(found.name, round(found.ratio, 3), found.equal_tokens,
      ...         found.bytes_per_token, found.num_tokens)
      float32 1.0 1.0 64 32
      int8 1.0 1.0 20 102
    """
    texts = _cut(tokens, config.max_context_length)
    rows, exact, exact_mean = [], None, 0.0
    for stored in ("float32", *formats):
        planned = _plan(as_grouped(config), stored)
        read = jax.jit(functools.partial(_read, model, planned))
        found = [jax.device_get(read(params, *text)) for text in texts]
        losses, likeliest = map(np.concatenate, zip(*found, strict=True))
        is_token = np.concatenate([np.arange(len(t)) < n - 1 for t, n in texts])
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
    """Return texts, i32[T] of one length, and how many tokens each has."""
    (whole,) = np.asarray(as_prompts([np.asarray(tokens).tolist()]))
    size = min(max_context_length, len(whole))
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    pieces = [each for each in pieces if len(each) > 1]
    if not pieces:
        raise ValueError(
            f"tokens must be a text of two tokens or more, got {len(whole)}, of which "
            f"a cache has {max_context_length} at most"
        )
    padded = -(-size // CHUNK_SIZE) * CHUNK_SIZE
    return [(np.pad(each, (0, padded - len(each))), len(each)) for each in pieces]


def _plan(config: GroupedConfig, stored: Stored) -> GroupedConfig:
    """Return a configuration for one text, in other dtypes of keys and values."""
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
    text: jax.Array,  # i32[T], T a multiple of the chunks'
    length: jax.Array,  # i32[]
) -> tuple[jax.Array, jax.Array]:
    """Return the loss of each next token, f32[T], and which was likeliest, i32[T]."""
    cache, opened = allocate(init(config), [0])
    rows = jnp.arange(CHUNK_SIZE, dtype=jnp.int32)
    runner = Runner(model, params)

    def step(cache: Any, chunk: Any) -> Any:
        start, tokens, following = chunk
        count = jnp.clip(length - start, 0, CHUNK_SIZE)[None]
        cache, _, logits = runner.run(
            cache, opened.seq_ids, tokens, count, asked_rows=rows
        )
        likeliest = jnp.argmax(logits, axis=1).astype(jnp.int32)
        return cache, (-pick_logprobs(logits, following), likeliest)

    starts = jnp.arange(0, text.shape[0], CHUNK_SIZE, dtype=jnp.int32)
    following = jnp.append(text[1:], text[:1])
    cut = (each.reshape(-1, CHUNK_SIZE) for each in (text, following))
    _, found = jax.lax.scan(step, cache, (starts, *cut))
    losses, likeliest = (each.reshape(-1) for each in found)
    return losses, likeliest
