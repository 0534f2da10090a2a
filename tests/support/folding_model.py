"""A model with a next token that follows, exactly, from all tokens before it.

Layers with a state keep a fold of the tokens; a layer that attends sums a number of
each token and position that it sees, all or those of a window. A state that stands
anywhere else, or is another sequence's, and a block that holds other tokens, change all
tokens that come.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jkv

VOCABULARY = 5  # few, so that guesses are tried, and some are right
FACTORS = np.array([31, 17], np.int32)
SIZES = dict(max_sequences=6, max_context_length=64, block_size=4)
WINDOW = 9
# Groups of layers by name: keys of everything or of a window, alone or beside a state,
# and a state alone.
KINDS = "keys", "window", "keys+state", "window+state", "state"
WITH_STATE = KINDS[2:]


def make_config(
    kind, *, pending=0, num_snapshots=8, every=8, caching=True, num_blocks=96
):
    """The sizes of a cache for one of the `KINDS`."""
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
    """Fold one token in; all numbers wrap around."""
    fold = state["fold"] * FACTORS + given["token"] + 2
    return {"fold": fold}, fold


def number_of(token, position):
    """The summand of a layer that attends: small, so that float32 sums are exact."""
    return (7 * token + 3 * position) % 13


def attend(cache, layer, batch, tokens, *, window):
    """Write rows of a layer, and return the sums over each row's tokens, i32[R]."""
    shape = (tokens.shape[0], 2, 4)
    numbers = number_of(tokens, batch.positions).astype(jnp.float32)
    values = jnp.broadcast_to(numbers[:, None, None], shape)
    # Queries of zeros see all tokens alike: the output is the mean.
    keys, queries = jnp.ones(shape), jnp.zeros(shape)
    cache = jkv.write(cache, layer, batch, keys, values)
    means = jkv.attend(cache, layer, batch, queries, window=window).mean(axis=(1, 2))
    count = batch.positions + 1
    count = count if window is None else jnp.minimum(count, window)
    return jnp.round(means * count.astype(jnp.float32)).astype(jnp.int32), cache


def _compute(_params, tokens, cache, batch, *, all_rows=False, window):
    """Logits that point at the next token of each row."""
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


# By kind: all that differs is how far its layer sees, as the cache of `score` has no
# windows.
MODELS = {
    kind: functools.partial(_compute, window=_find_window(kind)) for kind in KINDS
}


def fold_text(text):
    """The state after a text, in each layer that has one."""
    fold = np.zeros(2, np.int64)
    for token in text:
        fold = _wrap(fold * FACTORS + token + 2)
    return fold


def continue_text(prompt, count, kind):
    """The tokens that follow a prompt in a model of one of the `KINDS`."""
    text = list(prompt)
    for _ in range(count):
        total = 2 * fold_text(text).sum() if kind in WITH_STATE else 0
        if kind != "state":
            first = max(0, len(text) - (_find_window(kind) or len(text)))
            total += sum(number_of(text[i], i) for i in range(first, len(text)))
        text.append(int(abs(_wrap(total))) % VOCABULARY)
    return text[len(prompt) :]


def _wrap(number):
    return (number + 2**31) % 2**32 - 2**31
