"""A model whose next token is an exact function of all tokens before it.

Recurrent layers fold the tokens; an attention layer sums a number per visible token and
position, over all tokens or a window. A state at the wrong token or of another
sequence, and a block with other tokens, change all following tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jkv

VOCABULARY = 5  # few, so that some draft tokens are accepted
FACTORS = np.array([31, 17], np.int32)
SIZES = dict(max_sequences=6, max_context_length=64, block_size=4)
WINDOW = 9
# Groups of layers by name: keys with full or windowed attention, alone or with a state,
# and a state alone.
KINDS = "keys", "window", "keys+state", "window+state", "state"
WITH_STATE = KINDS[2:]


def make_config(
    kind, *, pending=0, num_snapshots=8, every=8, caching=True, num_blocks=96
):
    """Return the cache configuration for one of the `KINDS`."""
    state = jkv.StateConfig(
        num_layers=2,
        arrays={"fold": ((2,), "int32")},
        inputs={"token": ((), "int32")} if pending else None,
        max_pending=pending,
        num_snapshots=num_snapshots,
        snapshot_every=every,
        heads_axes={"fold": 0},
        **SIZES,
    )
    keys = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=2,
        head_dim=4,
        num_blocks=num_blocks,
        dtype="float32",
        sliding_window=_find_window(kind),
        **SIZES,
    )
    groups, layers = {
        "state": ((state,), (0, 0)),
        "keys+state": ((state, keys), (0, 1, 0)),
        "keys": ((keys,), (0,)),
    }[kind.replace("window", "keys")]
    return jkv.GroupedConfig(groups=groups, layer_groups=layers, prefix_caching=caching)


def _find_window(kind):
    return WINDOW if "window" in kind else None


def _rule(state, given):
    """Fold in one token; all numbers wrap around."""
    fold = state["fold"] * FACTORS + given["token"] + 2
    return {"fold": fold}, fold


def number_of(token, position):
    """Return an attention layer's summand, small enough for exact float32 sums."""
    return (7 * token + 3 * position) % 13


def attend(cache, layer, batch, tokens, *, window):
    """Write rows of a layer; return sums over each row's visible tokens, i32[R]."""
    shape = (tokens.shape[0], 2, 4)
    numbers = number_of(tokens, batch.positions).astype(jnp.float32)
    values = jnp.broadcast_to(numbers[:, None, None], shape)
    # Zero queries weigh all tokens equally: the output is the mean.
    keys, queries = jnp.ones(shape), jnp.zeros(shape)
    cache = jkv.write(cache, layer, batch, keys, values)
    means = jkv.attend(cache, layer, batch, queries, window=window).mean(axis=(1, 2))
    count = batch.positions + 1
    count = count if window is None else jnp.minimum(count, window)
    return jnp.round(means * count.astype(jnp.float32)).astype(jnp.int32), cache


def _compute(_params, tokens, cache, batch, *, all_rows=False, window):
    """Return logits that select the next token of each row."""
    tokens = tokens.astype(jnp.int32)
    total = jnp.zeros(tokens.shape, jnp.int32)
    for layer, groups in enumerate(cache.layer_groups):
        if any(cache.storage[group].kind == "states" for group in groups):
            inputs = {"token": tokens}
            folds, cache = jkv.fold_state(cache, layer, batch, _rule, inputs)
            total += jnp.sum(folds, axis=1)
        else:
            sums, cache = attend(cache, layer, batch, tokens, window=window)
            total += sums
    chosen = jnp.abs(total) % VOCABULARY
    logits = 5.0 * jax.nn.one_hot(chosen, VOCABULARY)
    if all_rows:
        return logits, cache
    last = jnp.take(logits, batch.last_rows, axis=0, mode="fill", fill_value=0)
    return last, cache


# By kind: the models differ only in the window, as the cache of `score` has none.
MODELS = {
    kind: functools.partial(_compute, window=_find_window(kind)) for kind in KINDS
}


def fold_tokens(tokens):
    """Return the state after a sequence, in each recurrent layer."""
    fold = np.zeros(2, np.int64)
    for token in tokens:
        fold = _wrap(fold * FACTORS + token + 2)
    return fold


def continue_prompt(prompt, count, kind):
    """Return the tokens that follow a prompt in a model of one of the `KINDS`."""
    tokens = list(prompt)
    for _ in range(count):
        total = 2 * fold_tokens(tokens).sum() if kind in WITH_STATE else 0
        if kind != "state":
            first = max(0, len(tokens) - (_find_window(kind) or len(tokens)))
            total += sum(number_of(tokens[i], i) for i in range(first, len(tokens)))
        tokens.append(int(abs(_wrap(total))) % VOCABULARY)
    return tokens[len(prompt) :]


def _wrap(number):
    return (number + 2**31) % 2**32 - 2**31
