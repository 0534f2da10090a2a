"""A model whose next token follows, exactly, from a fold of all tokens before it.

Two layers keep a state, which is the fold; between them a layer may attend. A state
that stands anywhere else, or is another sequence's, changes all tokens after it.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jkv

VOCABULARY = 5  # few, so that guesses are tried, and some are right
FACTORS = np.array([31, 17], np.int32)
SIZES = dict(max_sequences=6, max_context_length=64, block_size=4)
KINDS = ("full", "window", "alone")


def make_config(
    kind, *, pending=0, num_snapshots=8, every=8, caching=True, num_blocks=96
):
    """Groups of layers: the states and keys of all tokens, of a window, or no keys."""
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
    if kind == "alone":
        return jkv.GroupedConfig(
            groups=(state,), layer_groups=(0, 0), prefix_caching=caching
        )
    keys = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=2,
        head_dim=4,
        num_blocks=num_blocks,
        dtype="float32",
        sliding_window=9 if kind == "window" else None,
        **SIZES,
    )
    return jkv.GroupedConfig(
        groups=(state, keys), layer_groups=(0, 1, 0), prefix_caching=caching
    )


def _rule(state, given):
    """Fold one token in; all numbers wrap around."""
    fold = state["fold"] * FACTORS + given["token"] + 2
    return {"fold": fold}, fold


def model(_params, tokens, cache, batch, *, all_rows=False):
    """Logits that point at the next token of each row."""
    inputs, total = {"token": tokens.astype(jnp.int32)}, jnp.int32(0)
    for layer, groups in enumerate(cache.layer_groups):
        if {*groups} & {*cache.state_numbers}:
            fold, cache = jkv.fold_state(cache, layer, batch, _rule, inputs)
            total += fold
            continue
        rows = jax.nn.one_hot(tokens % 4, 4)[:, None] * jnp.ones((1, 2, 1))
        cache = jkv.write(cache, layer, batch, rows, rows)
        window = cache.metadata.groups[0].window.length
        attended = jkv.attend(cache, layer, batch, rows, window=window)
        # Part of what follows, so that it is not left out.
        total += (jnp.sum(attended) > 1e9).astype(jnp.int32)
    chosen = jnp.abs(jnp.sum(total, axis=1)) % VOCABULARY
    logits = 5.0 * jax.nn.one_hot(chosen, VOCABULARY)
    if all_rows:
        return logits, cache
    last = jnp.take(logits, batch.last_rows, axis=0, mode="fill", fill_value=0)
    return last, cache


def continue_text(prompt, count):
    """The tokens that follow a prompt."""
    fold, text = np.zeros(2, np.int64), list(prompt)
    for place in range(len(prompt) + count):
        if place >= len(prompt):
            # Both layers have the same fold.
            total = (2 * fold.sum() + 2**31) % 2**32 - 2**31
            text.append(int(abs(total)) % VOCABULARY)
        fold = (fold * FACTORS + text[place] + 2 + 2**31) % 2**32 - 2**31
    return text[len(prompt) :]
