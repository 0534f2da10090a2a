"""Sequences of several ranks, and their decoding steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jkv

# Maximum tokens of a sequence per step.
CHUNK = 16


class Sequences(NamedTuple):
    """B sequences per rank, P ranks, at most C tokens; a rank's steps have no P."""

    tokens: jax.Array | np.ndarray  # i32[P, B, C], padded with -1
    lengths: jax.Array | np.ndarray  # i32[P, B]
    limits: jax.Array | np.ndarray  # i32[P, B], length at which to stop

    @classmethod
    def deal(
        cls, prompts: Sequence[Sequence[int]], num_ranks: int, max_new_tokens: int
    ) -> "Sequences":
        """Distribute prompts over ranks in turn; unused rows stay empty."""
        each = -(-len(prompts) // num_ranks)
        longest = max(map(len, prompts)) + max_new_tokens
        tokens = np.full((num_ranks, each, longest), -1, np.int32)
        lengths = np.zeros((num_ranks, each), np.int32)
        for number, prompt in enumerate(prompts):
            row, rank = divmod(number, num_ranks)
            tokens[rank, row, : len(prompt)] = prompt
            lengths[rank, row] = len(prompt)
        limits = np.where(lengths > 0, lengths + max_new_tokens, 0).astype(np.int32)
        return cls(tokens, lengths, limits)

    def collect(self, num_sequences: int) -> list[list[int]]:
        """Return the tokens of each sequence, in the order of the prompts."""
        dealt = (divmod(number, len(self.tokens)) for number in range(num_sequences))
        return [
            self.tokens[rank, row, : self.lengths[rank, row]].tolist()
            for row, rank in dealt
        ]


def take_steps(
    model: jkv.Model,
    params: Any,
    stop_token: int,
    num_steps: int,
    cache: jkv.Cache,
    sequences: Sequences,
) -> tuple[jkv.Cache, Sequences]:
    """Run steps on the sequences of one rank; sequence ids are row numbers."""
    numbers = jnp.arange(sequences.lengths.shape[0], dtype=jnp.int32)

    def take_step(
        _: jax.Array, carry: tuple[jkv.Cache, Sequences]
    ) -> tuple[jkv.Cache, Sequences]:
        cache, (tokens, lengths, limits) = carry
        # Tokens not in the cache yet: the prompt's, later the last token.
        done = jkv.context_lengths(cache)
        counts = jnp.where(lengths < limits, jnp.minimum(lengths - done, CHUNK), 0)
        cache, batch = jkv.append(cache, numbers, counts, max_query_length=CHUNK)
        positions = batch.positions.reshape(-1, CHUNK)
        rows = jnp.take_along_axis(tokens, positions, axis=1, mode="clip")
        logits, cache = model(params, rows.reshape(-1), cache, batch)
        cache = jkv.commit(cache, batch)
        # Fully cached sequences get their next token.
        chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        is_next = (counts > 0) & (done + counts == lengths)
        position = jnp.where(is_next, lengths, tokens.shape[1])
        tokens = tokens.at[numbers, position].set(chosen, mode="drop")
        lengths += is_next.astype(jnp.int32)
        limits = jnp.where(is_next & (chosen == stop_token), lengths, limits)
        return cache, Sequences(tokens, lengths, limits)

    return jax.lax.fori_loop(0, num_steps, take_step, (cache, sequences))
