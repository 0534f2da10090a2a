"""What a model must be for the decoding loops: one callable, no base class."""

from typing import Any, Protocol

import jax

from jkv.state import Batch, Cache


class Model(Protocol):
    """One forward pass over the rows of a batch.

    A model embeds `tokens`, and in each layer calls `jkv.write` with the rows' keys and
    values and `jkv.attend` with their queries; `batch.positions` gives the position of
    each row. It returns the cache that the last `write` returned and does not call
    `commit`: its caller does. Rows with `batch.valid` False are padding, to be computed
    like the others and ignored.

    Any function or object with this signature will do: a plain function over a dict of
    arrays, or one that calls a Flax NNX or Equinox module passed as `params`.
    """

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,
        cache: Cache,
        batch: Batch,
        *,
        all_rows: bool = False,
    ) -> tuple[jax.Array, Cache]:
        """Run the model once.

        Args:
          params: the weights, any pytree.
          tokens: i32[R], a token id for each row of the batch.
          cache: after the `append` that returned `batch`.
          batch: the rows' sequences, positions and slots.
          all_rows: static; True asks for the logits of every row.

        Returns:
          logits: f32[B, V], of each sequence's last row (`batch.last_rows`), or
            f32[R, V] with `all_rows`. Those of a sequence without rows, and of padding
            rows, are arbitrary.
          cache: with the rows' keys and values written in every layer.
        """
        ...
