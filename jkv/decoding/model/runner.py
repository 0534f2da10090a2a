"""A model with its weights, and the one way in which a step runs rows through it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.protocol import Model, call_model, call_model_for_rows
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.verbs.appending import append
from jkv.verbs.prefixes import commit


class Runner(NamedTuple):
    """A model with its weights.

    Symbols: B sequences of a step, R rows, V tokens in the vocabulary.
    """

    model: Model
    params: Any

    def run(
        self,
        cache: Cache,
        seq_ids: jax.Array,
        tokens: jax.Array,
        counts: jax.Array | None = None,
        *,
        commits: bool = True,
        num_pending: jax.Array | int = 0,
    ) -> tuple[Cache, Batch, jax.Array]:
        """Append tokens to sequences, compute their rows, and commit them.

        Args:
          cache: where the sequences are open.
          seq_ids: i32[B], -1 for none.
          tokens: i32[R], 0 or more, anything where there is no row. Without counts one
            of each sequence; else those of the sequences, one behind the other.
          counts: i32[B], tokens of each.
          commits: whether full blocks can be found afterwards, by a prefix index.
          num_pending: i32[], of each sequence's newest tokens how many may be taken
            back from layers with a state.

        Returns:
          The cache, the batch, and f32[B, V]: the logits after each sequence's last
          row, anything without one.
        """
        recorded = tokens if commits else None
        if counts is None:
            # Rows and sequences are the same thing, which costs less.
            cache, batch = append(
                cache, seq_ids, tokens=recorded, num_pending=num_pending
            )
        else:
            cache, batch = append(
                cache,
                seq_ids,
                counts,
                capacity=tokens.shape[0],
                tokens=recorded,
                num_pending=num_pending,
            )
        logits, cache = call_model(self.model, self.params, tokens, cache, batch)
        if commits:
            cache = commit(cache, batch)
        return cache, batch, logits.astype(jnp.float32)

    def run_planned(
        self, cache: Cache, batch: Batch, tokens: jax.Array
    ) -> tuple[Cache, jax.Array]:
        """Compute the rows of a step that was appended, for the logits of each row.

        Args:
          cache: after the `append` that returned the batch.
          batch: the step, of R rows.
          tokens: i32[R].

        Returns:
          The cache, with nothing committed, and f32[R, V].
        """
        logits, cache = call_model_for_rows(
            self.model, self.params, tokens, cache, batch
        )
        return cache, logits.astype(jnp.float32)

    def count_vocabulary(self, cache: Cache, num_sequences: int) -> int:
        """Return V, as the shape of the logits tells it; the model is only traced.

        Args:
          cache: where the model could run.
          num_sequences: sequences of a step.
        """

        def probe(cache: Cache) -> jax.Array:
            nowhere = jnp.full((num_sequences,), NO_SEQUENCE, jnp.int32)
            # A row more than sequences: a model may mistake the one for the other.
            tokens = jnp.zeros((num_sequences + 1,), jnp.int32)
            return self.run(cache, nowhere, tokens, jnp.zeros_like(nowhere))[2]

        return int(jax.eval_shape(probe, cache).shape[1])
