"""A model with its weights, and the one way in which a step runs rows through it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.protocol import Model, call_model, call_model_for_rows
from jkv.decoding.model.steps import Exact
from jkv.sharding.loops import when
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.verbs.appending import append
from jkv.verbs.commitment import commit


class Runner(NamedTuple):
    """A model with its weights.

    Symbols: B sequences of a step, R rows, V tokens in the vocabulary.
    """

    model: Model
    params: Any
    exact: Exact | None = None  # the one shape of all calls; None: that of each step

    def run(
        self,
        cache: Cache,  # where the sequences are open
        seq_ids: jax.Array,  # i32[B], -1 for none
        # i32[R], 0 or more, anything where there is no row. Without counts one of each
        # sequence; else those of the sequences, one behind the other
        tokens: jax.Array,
        counts: jax.Array | None = None,  # i32[B], tokens of each
        *,
        # whether full blocks can be found afterwards, by a prefix index
        commits: bool = True,
        # i32[], of each sequence's newest tokens how many may be taken back from layers
        # with a state
        num_pending: jax.Array | int = 0,
        # i32[B], whose logits are asked for; None is each sequence's last
        asked_rows: jax.Array | None = None,
    ) -> tuple[Cache, Batch, jax.Array]:
        """Append tokens to sequences, compute their rows, and commit them.

        Returns the cache, the batch, and f32[B, V]: the logits after each sequence's
        last row, or those that were asked for; anything without one.
        """
        num_sequences = seq_ids.shape[0]
        cache, batch, tokens = self.append(
            cache, seq_ids, tokens, counts, records=commits, num_pending=num_pending
        )
        if asked_rows is not None:
            batch = dataclasses.replace(batch, asked_rows=asked_rows)
        cache, logits = self.compute(cache, batch, tokens)
        if commits:
            cache = commit(cache, batch)
        if num_sequences < batch.seq_ids.shape[0]:
            batch = batch.first_requests(num_sequences)
            logits = logits[:num_sequences]
        return cache, batch, logits

    def append(
        self,
        cache: Cache,
        seq_ids: jax.Array,  # i32[B]
        tokens: jax.Array,  # i32[R]
        counts: jax.Array | None,  # i32[B]
        *,
        records: bool = True,
        num_pending: jax.Array | int = 0,
    ) -> tuple[Cache, Batch, jax.Array]:
        """Append tokens to sequences, with arguments as for `run`.

        Returns:
          The cache, the batch and its tokens; with `exact` both are padded.
        """
        if self.exact is not None:
            self.exact.check_cache(cache)
            seq_ids, tokens, counts = self.exact.pad(seq_ids, tokens, counts)
        # Without counts rows and sequences are the same thing, which costs less.
        rows = {} if counts is None else {"capacity": tokens.shape[0]}
        cache, batch = append(
            cache,
            seq_ids,
            1 if counts is None else counts,
            tokens=tokens if records else None,
            num_pending=num_pending,
            **rows,
        )
        return cache, batch, tokens

    def compute(
        self, cache: Cache, batch: Batch, tokens: jax.Array
    ) -> tuple[Cache, jax.Array]:
        """Compute the rows of a step that was appended; commit nothing.

        Args:
          cache: after the `append` that returned the batch.
          batch: the step, of R rows.
          tokens: i32[R].

        Returns:
          The cache and f32[B, V], the logits after each sequence's last row.
        """
        logits, cache = self._call(tokens, cache, batch)
        return cache, logits.astype(jnp.float32)

    def _call(
        self, tokens: jax.Array, cache: Cache, batch: Batch
    ) -> tuple[jax.Array, Cache]:
        """Call the model; with one shape of calls as a program of its own.

        XLA fuses a model with what is around it, and what is fused may be rounded
        otherwise. Inside a loop of one trip, whose trip begins with all that the model
        is given, there is nothing around it.
        """
        if self.exact is None:
            return call_model(self.model, self.params, tokens, cache, batch)
        batch = self.exact.fix(cache, batch)
        leaves, structure = jax.tree.flatten((tokens, batch))

        def call(
            carry: tuple[jax.Array, Cache], *leaves: jax.Array
        ) -> tuple[jax.Array, Cache]:
            tokens, batch = jax.tree.unflatten(structure, leaves)
            return call_model(self.model, self.params, tokens, carry[1], batch)

        logits = jax.eval_shape(call, (tokens, cache), *leaves)[0]
        empty = jnp.zeros(logits.shape, logits.dtype)
        return when(jnp.any(batch.query_lengths > 0), call, (empty, cache), *leaves)

    def run_planned(
        self,
        cache: Cache,  # after the `append` that returned the batch
        batch: Batch,  # the step, of R rows
        tokens: jax.Array,  # i32[R]
    ) -> tuple[Cache, jax.Array]:
        """Compute each row of a step that was appended, f32[R, V]; commit nothing."""
        logits, cache = call_model_for_rows(
            self.model, self.params, tokens, cache, batch
        )
        return cache, logits.astype(jnp.float32)

    def count_vocabulary(self, cache: Cache, num_sequences: int) -> int:
        """Return V, as the shape of the logits tells it; the model is only traced."""

        def probe(cache: Cache) -> jax.Array:
            nowhere = jnp.full((num_sequences,), NO_SEQUENCE, jnp.int32)
            # A row more than sequences: a model may mistake the one for the other.
            tokens = jnp.zeros((num_sequences + 1,), jnp.int32)
            return self.run(cache, nowhere, tokens, jnp.zeros_like(nowhere))[2]

        return int(jax.eval_shape(probe, cache).shape[1])
