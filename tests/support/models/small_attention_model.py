"""A small attention model with learned positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jkv

VOCABULARY, LAYERS, HEADS, KV_HEADS, DIM = 19, 2, 4, 2, 4


@functools.cache
def attention_params():
    rng = np.random.default_rng(3)
    width = HEADS * DIM

    def draw(*shape):
        return rng.standard_normal(shape, np.float32) / np.float32(shape[-2] ** 0.5)

    params = dict(
        embedding=4 * draw(VOCABULARY, width),
        positions=4 * draw(64, width),
        layers=dict(
            query=draw(LAYERS, width, HEADS * DIM),
            key=draw(LAYERS, width, KV_HEADS * DIM),
            value=draw(LAYERS, width, KV_HEADS * DIM),
        ),
        head=2 * draw(width, VOCABULARY),
    )
    return jax.device_put(params)


def attention_model(
    params,
    tokens,
    cache,
    batch,
    *,
    all_rows=False,
    aux_layers=(),
    window=None,
    implementation=None,
):
    hidden = params["embedding"][tokens] + params["positions"][batch.positions]
    num_rows = tokens.shape[0]

    def run_layer(carry, scanned):
        hidden, cache = carry
        layer, weights = scanned
        keys = (hidden @ weights["key"]).reshape(num_rows, KV_HEADS, DIM)
        values = (hidden @ weights["value"]).reshape(num_rows, KV_HEADS, DIM)
        queries = (hidden @ weights["query"]).reshape(num_rows, HEADS, DIM)
        cache = jkv.write(cache, layer, batch, keys, values)
        cache = jkv.observe(cache, layer, batch, queries)
        attended = jkv.attend(
            cache,
            layer,
            batch,
            queries,
            window=window,
            implementation=implementation,
        )
        after = jnp.tanh(hidden + attended.reshape(num_rows, -1))
        return (after, cache), hidden if aux_layers else None

    layers = (jnp.arange(LAYERS, dtype=jnp.int32), params["layers"])
    (hidden, cache), inputs = jax.lax.scan(run_layer, (hidden, cache), layers)
    if aux_layers:
        every = [*inputs, hidden]
        aux = jnp.concatenate([every[layer] for layer in aux_layers], axis=-1)
    if not all_rows:
        hidden = hidden[jnp.minimum(batch.last_rows, num_rows - 1)]
    logits = hidden @ params["head"]
    return (logits, cache, aux) if aux_layers else (logits, cache)


def dense_rows(params, tokens, xp=np, ends=(), aux_layers=(), window=None):
    """Return the logits of one whole sequence, without jkv: f32[length, V].

    Args:
        params: arrays of `xp`.
        tokens: i32[length].
        xp: numpy or jax.numpy.
        ends: the last position that each of the first tokens attends to.
        aux_layers: return the inputs of these layers instead, concatenated.
        window: tokens that a row attends to, itself included; None for all.
    """
    length, inputs = len(tokens), []
    hidden = params["embedding"][tokens] + params["positions"][:length]
    is_past = np.tril(np.ones((length, length), bool))[None]
    if window is not None:
        is_past &= ~np.tril(np.ones((length, length), bool), -window)[None]
    for row, end in enumerate(ends):
        is_past[0, row, : end + 1] |= True
    for layer in range(LAYERS):
        inputs.append(hidden)
        query, key, value = (
            hidden @ params["layers"][name][layer] for name in ("query", "key", "value")
        )
        groups = HEADS // KV_HEADS
        keys = xp.repeat(key.reshape(length, KV_HEADS, DIM), groups, axis=1)
        values = xp.repeat(value.reshape(length, KV_HEADS, DIM), groups, axis=1)
        queries = query.reshape(length, HEADS, DIM)
        scores = xp.einsum("qhd,khd->hqk", queries, keys) / DIM**0.5
        weights = xp.exp(xp.where(is_past, scores, -np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = xp.einsum("hqk,khd->qhd", weights, values)
        hidden = xp.tanh(hidden + attended.reshape(length, -1))
    if aux_layers:
        inputs.append(hidden)
        return np.concatenate([inputs[layer] for layer in aux_layers], axis=-1)
    return hidden @ params["head"]


def continue_densely(prompt, ends=(), count=5, params=None, window=None):
    """Return greedy tokens after a prompt with spans, by `dense_rows`."""
    params = jax.tree.map(np.asarray, params or attention_params())
    tokens = [int(token) for token in prompt]
    for _ in range(count):
        logits = dense_rows(params, np.array(tokens), ends=ends, window=window)
        tokens.append(int(np.argmax(logits[-1])))
    return tokens[len(prompt) :]
