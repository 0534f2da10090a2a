"""Prompts and continuations: a tree of two levels, whose last tokens are not computed.

Symbols: Q prompts of at most P tokens, N continuations of at most C tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding.scoring.levels import Level, run_levels
from jkv.decoding.scoring.one_call import run_tree
from jkv.decoding.scoring.scored import Scored
from jkv.decoding.texts.prompts import count_tokens, refuse_unknown
from jkv.decoding.texts.text_tree import TextTree


def check_counts(prompts: jax.Array, continuations: jax.Array) -> None:
    """Reject continuations that cannot be dealt to the prompts."""
    num_prompts, num_continuations = prompts.shape[0], continuations.shape[0]
    if not num_prompts or not num_continuations or num_continuations % num_prompts:
        raise ValueError(
            f"continuations must be as many for each prompt, so a multiple of "
            f"{num_prompts}, got {num_continuations}"
        )
    if not prompts.shape[1] or not continuations.shape[1]:
        raise ValueError("prompts and continuations need room for a token at least")


def score_two_levels(
    scored: Scored, prompts: jax.Array, continuations: jax.Array
) -> jax.Array:
    """Score continuations, i32[N, C], of prompts, i32[Q, P]."""
    if scored.config.state_groups:
        logits = _run_two_levels(scored, prompts, continuations)
    else:
        tree = _join(prompts, continuations)
        rows = _list_asked_rows(prompts, tree.num_rows)
        logits, _ = run_tree(scored, tree, rows)
    for name, texts in (("prompt", prompts), ("continuation", continuations)):
        refuse_unknown(name, texts, logits.shape[-1])
    lengths = count_tokens(prompts)
    return _score_tokens(logits.astype(jnp.float32), lengths, continuations)


def _join(prompts: jax.Array, continuations: jax.Array) -> TextTree:
    """Return prompts and continuations as a tree, with a row for each place.

    The last token of a continuation is not in it: nothing is asked after it.
    """
    (num_prompts, width), (count, most) = prompts.shape, continuations.shape
    fed = most - 1
    # Continuations of one token bring no rows, and need no segments.
    count = count if fed else 0
    each = count // num_prompts
    texts = (prompts, continuations[:count, :fed])
    firsts, tokens, segments = (0, num_prompts), [], []
    for first, text in zip(firsts, texts, strict=True):
        column = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
        is_token = column < count_tokens(text)[:, None]
        number = first + jnp.arange(text.shape[0], dtype=jnp.int32)[:, None]
        tokens.append(jnp.where(is_token, text, -1).reshape(-1))
        segments.append(jnp.where(is_token, number, -1).reshape(-1))
    roots = np.full(num_prompts, -1, np.int32)
    children = np.repeat(np.arange(num_prompts, dtype=np.int32), each)
    return TextTree(
        tokens=jnp.concatenate(tokens),
        segments=jnp.concatenate(segments),
        parents=jnp.asarray(np.concatenate([roots, children])),
        max_length=width + fed,
    )


def _list_asked_rows(prompts: jax.Array, num_rows: int) -> jax.Array:
    """Return the rows of prompts' ends, R for an empty one, and all that follow."""
    num_prompts, width = prompts.shape
    lengths = count_tokens(prompts)
    last = jnp.arange(num_prompts, dtype=jnp.int32) * width + lengths - 1
    later = jnp.arange(num_prompts * width, num_rows, dtype=jnp.int32)
    return jnp.concatenate([jnp.where(lengths > 0, last, num_rows), later])


def _run_two_levels(
    scored: Scored, prompts: jax.Array, continuations: jax.Array
) -> jax.Array:
    """Compute prompts, then forks of them that go on, for logits as of one step."""
    tree, (num_prompts, width) = _join(prompts, continuations), prompts.shape
    rows = np.arange(tree.num_rows, dtype=np.int32)
    segments = np.arange(tree.num_segments, dtype=np.int32)
    first = num_prompts * width
    levels = [Level(segments[:num_prompts], None, rows[:first], width, asks_all=False)]
    children = segments[num_prompts:]
    if len(children):
        parents = (children - num_prompts) // (len(children) // num_prompts)
        fed = continuations.shape[1] - 1
        levels.append(Level(children, parents, rows[first:], fed, asks_all=True))
    return jnp.concatenate(run_levels(scored, tree, levels))


def _score_tokens(
    logits: jax.Array, lengths: jax.Array, chosen: jax.Array
) -> jax.Array:
    """Return log-probabilities of continuations, i32[N, C], under the logits before.

    Those are f32[Q + N * (C - 1), V], of the prompts' ends and of the rows fed.
    """
    num_prompts, (count, most) = lengths.shape[0], chosen.shape
    normalised = jax.nn.log_softmax(logits, axis=-1)
    first = jnp.where(lengths[:, None] > 0, normalised[:num_prompts], 0.0)
    of_first = jnp.take_along_axis(first, chosen[:, 0].reshape(num_prompts, -1), axis=1)
    later = normalised[num_prompts:].reshape(count, most - 1, logits.shape[1])
    of_later = jnp.take_along_axis(later, chosen[:, 1:, None], axis=2)[..., 0]
    found = jnp.concatenate([of_first.reshape(count, 1), of_later], axis=1)
    is_token = jnp.arange(most)[None] < count_tokens(chosen)[:, None]
    return jnp.where(is_token, found, 0.0)
