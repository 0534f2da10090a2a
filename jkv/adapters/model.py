"""model_of: the `jkv.Model` of a function over a `Step`."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jkv.adapters.step import Step, pack_rows
from jkv.arguments import explains_arguments
from jkv.state import Batch, Cache
from jkv.status import UsageError

Layout = Literal["sequence", "batch", "packed"]


@explains_arguments
def model_of(forward: Callable[..., Any], *, rows: Layout = "sequence") -> "StepModel":
    """Return the `jkv.Model` of a function that runs a model over a `Step`.

    All loops take it: `generate`, `extend`, `beam_search`, `score` and `Engine`, with
    speculation and `exact`. Like any model it is a static argument of a jitted loop,
    equal to another one of the same function and layout.

    Args:
      forward: `forward(params, tokens, positions, step) -> logits`. In each layer it
        calls `step.attend` instead of the model's attention. Logits are [..., V] with a
        row for each row of the step, and the last ones of sequences are selected; or
        of `step.last(hidden)`, without the other rows. Further
        keyword-only arguments are arguments of the model, and further results follow
        the cache.
      rows: layout of tokens and positions, i32: "sequence" is [1, R], a batch of one
        sequence; "batch" is [R, 1], sequences of one token; "packed" is [R].

    Returns:
      A model with `all_rows=False`.

    Raises:
      UsageError: for another layout. When it is called, for logits of another number of
        rows, or if `forward` did not call `step.attend`.

    Example:
      A model in which a row adds the mean of its sequence:

      >>> import jax, jax.numpy as jnp, jkv
      >>> def forward(params, tokens, positions, step):
      ...     hidden = params[tokens]  # [1, R, 8]
      ...     rows = hidden[..., None, :]
      ...     hidden += step.attend(jnp.zeros_like(rows), rows, rows)[..., 0, :]
      ...     return step.last(hidden) @ params.T
      >>> params = jax.random.normal(jax.random.key(0), (9, 8))
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> model = jkv.model_of(forward)
      >>> cache, result = jkv.generate(model, params, cache, [[1, 2]], max_new_tokens=3)
      >>> result.tokens.shape
      (1, 3)
    """
    if rows not in get_args(Layout):
        names = ", ".join(map(repr, get_args(Layout)))
        raise UsageError(f"rows must be one of {names}, got {rows!r}")
    if not callable(forward):
        raise UsageError(
            f"forward must be callable as forward(params, tokens, positions, step), "
            f"got {type(forward).__name__}"
        )
    return StepModel(forward, rows)


@dataclasses.dataclass(frozen=True)
class StepModel:
    """The model of a function over a `Step`; see `model_of`."""

    forward: Callable[..., Any]
    rows: Layout = "sequence"

    @property
    def __signature__(self) -> inspect.Signature:
        """The arguments of a model, and the keyword-only ones of the function."""
        of_forward = inspect.signature(self.forward).parameters.values()
        kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
        own = inspect.signature(StepModel.__call__).parameters
        given = [each for each in own.values() if each.kind not in kinds]
        more = {each.name: each for each in of_forward if each.kind in kinds}
        named = {"all_rows": own["all_rows"]} | more
        in_order = sorted(named.values(), key=lambda each: each.kind)
        return inspect.Signature([*given[1:], *in_order])

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,  # i32[R]
        cache: Cache,
        batch: Batch,
        /,
        *,
        all_rows: bool = False,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Run the function once, as a `jkv.Model`."""
        step = _ModelStep(cache, batch, all_rows)
        layout = {"sequence": (1, -1), "batch": (-1, 1), "packed": (-1,)}[self.rows]
        given = tokens.reshape(layout), batch.positions.reshape(layout)
        answer = self.forward(params, *given, step, **options)
        logits, *more = answer if isinstance(answer, tuple) else (answer,)
        step.check()
        return (step.select(jnp.asarray(logits)), step.cache, *more)


class _ModelStep(Step):
    """A step that selects rows of logits once, all of them on request."""

    def __init__(self, cache: Cache, batch: Batch, all_rows: bool) -> None:
        super().__init__(cache, batch)
        self._all_rows = all_rows
        self._has_selected = False

    def last(self, rows: jax.Array) -> jax.Array:
        """Return the rows that the loop needs logits of."""
        self._has_selected = True
        if self._all_rows:
            return pack_rows("rows", rows, self.batch.num_rows)
        return super().last(rows)

    def select(self, logits: jax.Array) -> jax.Array:
        """Return the needed rows of logits, f32[B, V] or f32[R, V]."""
        if not self._has_selected:
            logits = self.last(logits)
        elif logits.ndim > 2:  # [1, B, V] or [B, 1, V]
            logits = logits.reshape(-1, logits.shape[-1])
        return logits.astype(jnp.float32)

    def check(self) -> None:
        """Refuse a model that did not use the cache, or used it in another trace."""
        if self._num_calls == 0 and self.cache.metadata.block_numbers:
            raise UsageError(
                "forward must call step.attend in each layer, got no call; replace the "
                "model's attention by it"
            )
