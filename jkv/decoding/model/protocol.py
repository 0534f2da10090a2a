"""Protocol of models for the decoding loops: one callable, no base class."""

import inspect
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.state import Batch, Cache
from jkv.status import UsageError


class Model(Protocol):
    """One forward pass over the rows of a batch.

    A model embeds `tokens`, and in each layer calls `jkv.write` with the rows' keys and
    values and `jkv.attend` with their queries; `batch.positions` has the position of
    each row. It returns the cache of the last `write` and does not call `commit`: its
    caller does. Rows with `batch.valid` False are padding, to be computed like the
    others and ignored.

    Any function or object with this signature works: a plain function over a dict of
    arrays, or one that calls a Flax NNX or Equinox module passed as `params`. It may
    take more arguments with defaults, such as `all_rows=False` in the examples, which
    returns the logits of every row, f32[R, V].
    """

    def __call__(
        self, params: Any, tokens: jax.Array, cache: Cache, batch: Batch, /
    ) -> tuple[jax.Array, Cache]:
        """Run the model once.

        Args:
          params: the weights, any pytree.
          tokens: i32[R], a token id for each row of the batch.
          cache: after the `append` that returned `batch`.
          batch: the rows' sequences, positions and slots.

        Returns:
          logits: f32[B, V], of each sequence's last row (`batch.last_rows`), arbitrary
            for a sequence without rows.
          cache: with the rows' keys and values written in every layer.
        """


def check_model(model: object, params: object) -> None:
    """Raise UsageError if a model is not callable."""
    if not callable(model):
        swapped = ", as its params are: were they swapped?" if callable(params) else ""
        raise UsageError(
            f"model must be callable as model(params, tokens, cache, batch){swapped} "
            f"got {type(model).__name__}; the order is model, params, cache"
        )


def call_model(
    model: Model,  # as passed to the loop
    params: Any,
    tokens: jax.Array,  # i32[R]
    cache: Cache,  # after the `append` that returned `batch`
    batch: Batch,
) -> tuple[jax.Array, Cache]:
    """Run a model for the logits of last rows; check its results at trace time."""
    check_model(model, params)
    answer = model(params, tokens, cache, batch)
    if not (
        isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Cache)
    ):
        said = type(answer).__name__
        if isinstance(answer, tuple):
            said = f"({', '.join(type(part).__name__ for part in answer)})"
        raise UsageError(
            f"the model must return (logits, cache), the cache as its last write "
            f"returned it, got {said}"
        )
    logits, cache = answer
    num_sequences = batch.last_rows.shape[0]
    why = f"a row for each sequence, logits[batch.last_rows] of {batch.num_rows} rows"
    _expect_logits("logits", logits, "B V", {"B": num_sequences}, why)
    return logits, cache


def call_model_for_rows(
    model: Model, params: Any, tokens: jax.Array, cache: Cache, batch: Batch
) -> tuple[jax.Array, Cache]:
    """Run a model for the logits of every row; refuse one without `all_rows`."""
    try:
        parameters = inspect.signature(model).parameters
        takes = "all_rows" in parameters or any(
            each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
        )
    except (TypeError, ValueError):
        takes = True
    if not takes:
        raise UsageError(
            "speculative decoding needs the logits of every row; give the model an "
            "argument all_rows=False, and return f32[R, V] where it is True"
        )
    rows: Any = model
    logits, cache = rows(params, tokens, cache, batch, all_rows=True)
    why = "a row for each row of the step"
    _expect_logits(
        "logits with all_rows=True", logits, "R V", {"R": batch.num_rows}, why
    )
    return logits, cache


def _expect_logits(
    name: str, logits: Any, axes: str, sizes: dict[str, int], why: str
) -> None:
    """Refuse logits of a wrong shape or dtype."""
    expect(
        f"the model's {name}", jnp.asarray(logits), axes, sizes, jnp.floating, why=why
    )
