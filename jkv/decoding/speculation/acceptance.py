"""Whether a drafted token is accepted, and what is drawn instead of it.

With p the model's distribution after all filters, and q the one that the draft was
drawn from, a draft x is accepted with probability min(1, p(x) / q(x)); else a token is
drawn from max(0, p - q), normalised. Either way it has the distribution p (Leviathan et
al., 2023, and Chen et al., 2023).

Symbols: W places, K drafts of each, R rows of a step, V tokens in the vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jkv.decoding.sampling.draws import (
    draw,
    draw_uniforms,
    find_best,
    pick_logprobs,
    sample,
)
from jkv.decoding.sampling.filters import by_row, filter_logits
from jkv.decoding.sampling.options import Sampling
from jkv.decoding.speculation.guesses import Guesses, Rows
from jkv.decoding.speculation.verification import Sampler

# What random numbers of one sequence and one position are for, beside plain draws.
DRAFT, ACCEPT, REPLACE = 1, 2, 3


def sample_rows(
    logits: jax.Array,
    rows: Rows,
    sampling: Sampling,
    counts: jax.Array,
    seen: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Choose tokens as plain steps would: a `Sampler`.

    A guess that is looked up is no draw: to draw a token and to see whether it is the
    guess accepts it as often as it should be.
    """
    del rows
    return sample(logits, sampling, counts, seen=seen)


def make_rejection_sampler(
    guesses: Guesses,
    draft_logits: jax.Array,  # f32[W, K, V]
) -> Sampler:
    """Return how tokens are chosen where drafts were drawn, from filtered logits."""

    def choose(
        logits: jax.Array,
        rows: Rows,
        sampling: Sampling,
        counts: jax.Array,
        seen: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        by = by_row(sampling, logits.shape[0])
        is_greedy = by.temperature <= 0
        # The draft after each row, if there is one.
        draft = rows.places, jnp.minimum(rows.before, guesses.tokens.shape[1] - 1)

        def reject() -> tuple[jax.Array, jax.Array]:
            wanted = filter_logits(logits, sampling, seen=seen)
            tokens = accept_or_replace(
                wanted,
                draft_logits[draft],
                guesses.tokens[draft],
                rows.before < guesses.counts[rows.places],
                by.seeds,
                counts,
            )
            tokens = jnp.where(is_greedy, find_best(wanted), tokens)
            return tokens, pick_logprobs(logits, tokens)

        return lax.cond(
            jnp.all(is_greedy),
            lambda: sample(logits, sampling, counts, seen=seen),
            reject,
        )

    return choose


def accept_or_replace(
    wanted: jax.Array,  # f32[R, V], filtered logits of the model
    drafted: jax.Array,  # f32[R, V], those that the draft was drawn from
    guesses: jax.Array,  # i32[R], the draft
    is_drafted: jax.Array,  # bool[R], whether there is one; else a token is drawn
    seeds: jax.Array,  # i32[R], of each sequence
    counts: jax.Array,  # i32[R], tokens that it has generated
) -> jax.Array:
    """Return the draft or what stands in for it, i32[R], distributed as wanted."""
    probability, of_draft = jax.nn.softmax(wanted), jax.nn.softmax(drafted)

    def at_guess(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, guesses[:, None], axis=-1)[:, 0]

    chance = draw_uniforms(seeds, counts, ACCEPT)[:, 0]
    accepts = is_drafted & (chance * at_guess(of_draft) < at_guess(probability))

    rest = jnp.where(is_drafted[:, None], probability - of_draft, probability)
    # Equal distributions leave a rest of rounding errors, or none at all.
    is_empty = jnp.max(rest, axis=-1, keepdims=True) <= 0
    rest = jnp.where(is_empty, probability, jnp.maximum(rest, 0.0))
    log_rest = jnp.log(rest)
    log_rest -= jnp.max(log_rest, axis=-1, keepdims=True)
    return jnp.where(accepts, guesses, draw(log_rest, seeds, counts, REPLACE))
