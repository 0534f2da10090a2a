"""The model of a loop, and the number and shape of its calls.

A `Model` is one callable, no base class; `Steps` has the lengths and step sizes of a
loop, which are static.

Steps may have one fixed shape, so that results are bit-identical in any batch. The last
bits of a matrix product depend on its number of rows, and those of attention on how the
context is split. With `exact` every call of the model has the same number of rows and
requests, used or not, and attention splits contexts by position (`attend_by_position`
of `jkv.attention.xla.tiles`, and the kernels).

Symbols: B prompts of at most P tokens, W sequences that run at one time or requests of
a call, R rows.
"""

import dataclasses
import inspect
from typing import Any, NamedTuple, Protocol, Self, TypedDict

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.metadata.requests import check_counts, check_static
from jkv.operations import scatter
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.status import UsageError
from jkv.verbs.attending import plan_attention


class Model(Protocol):
    """One forward pass over the rows of a batch.

    A model embeds `tokens`, and in each layer calls `jkv.write` with the rows' keys and
    values and `jkv.attend` with their queries; `batch.positions` has the position of
    each row. It returns the cache of the last `write` and does not call `commit`: its
    caller does. Rows with `batch.valid` False are padding, to be computed like the
    others and ignored.

    Any function or object with this signature works: a plain function over a dict of
    arrays, or one that calls a Flax NNX or Equinox module passed as `params`. It may
    take more arguments with defaults. Speculative decoding passes `all_rows=True` for
    the logits of every row, f32[R, V]; drafters that need hidden states pass
    `aux_layers`, a tuple of layer numbers, and then the model returns a third value,
    f32[R, A]: the inputs of these layers side by side, of every row. The number of
    layers stands for the output of the final norm.
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
        swapped = ", as its params are (were they swapped?)" if callable(params) else ""
        raise UsageError(
            f"model must be callable as model(params, tokens, cache, batch){swapped}, "
            f"got {type(model).__name__}; the order is model, params, cache"
        )


class Called(NamedTuple):
    """Results of a model."""

    logits: jax.Array  # f32[B, V], or f32[R, V] with `all_rows`
    cache: Cache
    hidden: jax.Array | None  # f32[R, A], of the auxiliary layers; None for none


def call_model(
    model: Model,  # as passed to the loop
    params: Any,
    tokens: jax.Array,  # i32[R]
    cache: Cache,  # after the `append` that returned `batch`
    batch: Batch,
    *,
    all_rows: bool = False,  # logits of every row instead of last rows
    aux_layers: tuple[int, ...] = (),  # layers to return hidden states of
) -> Called:
    """Run a model; check its arguments and results at trace time."""
    check_model(model, params)
    options: dict[str, Any] = {}
    if all_rows:
        _check_takes(model, "all_rows", _NEEDS_ROWS)
        options["all_rows"] = True
    if aux_layers:
        _check_takes(model, "aux_layers", _NEEDS_HIDDEN)
        options["aux_layers"] = aux_layers
    call: Any = model
    try:
        answer = call(params, tokens, cache, batch, **options)
    except (IndexError, KeyError) as error:
        num_layers = len(cache.layer_groups)
        if max(aux_layers, default=0) <= num_layers:
            raise
        raise UsageError(
            f"aux_layers of the drafter must be in 0..{num_layers}, the layers of the "
            f"target and the output of its final norm, got {aux_layers}; use a drafter "
            f"for this model"
        ) from error
    count = 3 if aux_layers else 2
    is_right = isinstance(answer, tuple) and len(answer) == count
    if not is_right or not isinstance(answer[1], Cache):
        found = type(answer).__name__
        if isinstance(answer, tuple):
            found = f"({', '.join(type(part).__name__ for part in answer)})"
        third = ", hidden) with aux_layers=" if aux_layers else ")"
        raise UsageError(
            f"the model must return (logits, cache{third}, the cache as its last write "
            f"returned it, got {found}"
        )
    logits, cache, *rest = answer
    num_rows = {"R": batch.num_rows}
    if all_rows:
        why, name = "a row for each row of the step", "logits with all_rows=True"
        _expect_floats(name, logits, "R V", num_rows, why)
    else:
        sizes = {"B": batch.last_rows.shape[0]}
        why = (
            f"a row for each sequence, logits[batch.last_rows] of {batch.num_rows} rows"
        )
        _expect_floats("logits", logits, "B V", sizes, why)
    if not aux_layers:
        return Called(logits, cache, None)
    (hidden,) = rest
    why = "the hidden states of each row, side by side"
    _expect_floats("hidden states with aux_layers=", hidden, "R A", num_rows, why)
    if hidden.shape[1] % len(aux_layers):
        raise UsageError(
            f"the model's hidden states must be side by side, equally wide for each of "
            f"aux_layers={aux_layers}, got a width of {hidden.shape[1]}"
        )
    return Called(logits, cache, hidden.astype(jnp.float32))


_NEEDS_ROWS = (
    "speculative decoding needs the logits of every row; give the model an argument "
    "all_rows=False, and return f32[R, V] where it is True"
)
_NEEDS_HIDDEN = (
    "this drafter needs hidden states of the model; give the model an argument "
    "aux_layers=(), and return (logits, cache, hidden) where it is not empty, hidden "
    "f32[R, A]: the inputs of these layers side by side"
)


def _check_takes(model: Model, name: str, advice: str) -> None:
    """Refuse a model without a keyword argument."""
    try:
        parameters = inspect.signature(model).parameters
    except (TypeError, ValueError):
        return
    kinds = [each.kind for each in parameters.values()]
    if name not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        called = getattr(model, "__name__", type(model).__name__)
        raise UsageError(f"{advice}; got {called} without it")


def _expect_floats(
    name: str, logits: Any, axes: str, sizes: dict[str, int], why: str
) -> None:
    """Refuse a result of a wrong shape or dtype."""
    expect(
        f"the model's {name}", jnp.asarray(logits), axes, sizes, jnp.floating, why=why
    )


# Default rows of a step with prompts: enough to keep a processor busy, few enough that
# the step's activations stay small.
CHUNK_SIZE = 512


# Default requests and rows of an exact call.
_DEFAULT = 64, 64

ExactShape = bool | tuple[int, int]


class Exact(NamedTuple):
    """The fixed shape of every call of the model."""

    num_requests: int  # W
    num_rows: int  # R, at least W

    @classmethod
    def of(cls, exact: ExactShape) -> Self | None:
        """Return the shape given by a bool or (W, R); None for no fixed shape."""
        if exact is False:
            return None
        pair = _DEFAULT if exact is True else exact
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(
                f"exact must be True, False or (W, R), the requests and the rows of "
                f"every call of the model, got {exact!r}"
            )
        num_requests, num_rows = pair
        check_counts(exact=num_requests)
        check_counts(exact=num_rows)
        if num_rows < num_requests:
            raise UsageError(
                f"exact=(W, R) needs a row for each request, R of at least W, got "
                f"{pair}"
            )
        return cls(int(num_requests), int(num_rows))

    def check_alone(self, row_counts: tuple[int, ...] | None, chunk_size: int) -> None:
        """Refuse options that would change the shape of a step."""
        if row_counts is not None or chunk_size != CHUNK_SIZE:
            raise UsageError(
                f"exact={tuple(self)} fixes the rows of every step; omit "
                f"row_counts and chunk_size"
            )

    def check_fits(self, name: str, number: int) -> None:
        """Refuse a number larger than the requests of a call."""
        if number > self.num_requests:
            raise UsageError(
                f"{name} must be at most {self.num_requests}, the requests of a call, "
                f"got {number}; pass exact=({number}, {max(number, self.num_rows)})"
            )

    def check_cache(self, cache: Cache) -> None:
        """Refuse a cache with pending tokens of recurrent states."""
        if most := cache.metadata.max_pending:
            raise UsageError(
                f"max_pending of StateConfig must be 0 with exact=, which excludes "
                f"speculation, got {most}; omit max_pending"
            )

    def pad(
        self,
        seq_ids: jax.Array,  # i32[B], -1 for none
        tokens: jax.Array,  # i32[r]; without counts one per sequence
        counts: jax.Array | None,  # i32[B]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Pad a step to W requests and R rows: i32[W], i32[R] and i32[W]."""
        more = (0, self.num_requests - seq_ids.shape[0])
        if counts is None:
            counts = (seq_ids >= 0).astype(jnp.int32)
            # Pack the rows of present sequences.
            row = jnp.cumsum(counts, dtype=jnp.int32) - 1
            row = jnp.where(counts > 0, row, self.num_rows)
            rows = jnp.zeros((self.num_rows,), jnp.int32)
            tokens = scatter(rows, row, tokens)
        else:
            tokens = jnp.pad(tokens, (0, self.num_rows - tokens.shape[0]))
        seq_ids = jnp.pad(seq_ids, more, constant_values=NO_SEQUENCE)
        return seq_ids, tokens, jnp.pad(counts, more)

    def fix(self, cache: Cache, batch: Batch) -> Batch:
        """Plan attention to the rows of a step by position (batch-invariant)."""
        batch = dataclasses.replace(batch, by_position=True, plan=None)
        return plan_attention(cache, batch)


@dataclasses.dataclass(frozen=True)
class Roll:
    """A rolling context: a sequence never ends with CONTEXT_FULL.

    When a sequence has `max_context_length` cached tokens, its `step` oldest tokens
    after the first `first` are dropped (`jkv.prune`), and positions continue.

    Attributes:
      first: tokens at the beginning that are kept, such as a system prompt.
      step: tokens to drop at a time, a multiple of the block size.

    Raises:
      UsageError: for numbers that are not ints, or too small.

    Example:
      >>> import jkv
      >>> jkv.Roll(first=100, step=512)
      Roll(first=100, step=512)
    """

    first: int
    step: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_static("first", self.first, 0)
        check_counts(step=self.step)

    def count_dropped(self, num_tokens: int, max_context_length: int) -> int:
        """Return the tokens dropped from a sequence with `num_tokens` computed tokens.

        Args:
          num_tokens: tokens appended so far, dropped ones included.
          max_context_length: slots of a sequence.

        Example:
          >>> import jkv
          >>> jkv.Roll(first=4, step=8).count_dropped(33, 32)
          8
        """
        excess = max(num_tokens - max_context_length, 0)
        return -(-excess // self.step) * self.step


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Lengths and step sizes of a loop. Hashable, so static under jit.

    Attributes:
      max_new_tokens: most new tokens of any sequence, G.
      num_samples: completions of each prompt, which is computed once (`fork`). Sample j
        of prompt i is sequence `i * num_samples + j` of the result.
      max_running: most sequences that run at one time, W. None is all of them. A cache
        with fewer rows runs fewer. With several pools it holds for each.
      chunk_size: rows of a step that computes prompts, without `row_counts`. Use a
        small one if prefix cache hits leave few tokens.
      row_counts: allowed rows of a step, ascending, the last at least W. A step takes
        the smallest sufficient one; each compiles a copy of the model. W rows are for
        steps with one row per sequence, unless W is the last. None is W and the larger
        of W and `chunk_size`, which is B * P at most.
      exact: True or (W, R): tokens and log-probabilities are bit-identical in any batch
        (test a model of your own with `jkv.check_exact`). Every call of the model has W
        requests and R rows, 64 and 64 for True, and costs as much.
      press: a rule of `jkv.press` that prunes each prompt to `budget` tokens once it is
        computed (KV cache compression); needs `CacheConfig(pruning=True)`. The rule
        gets keys, values and the observed queries, if any. None keeps all tokens.
      budget: tokens of each layer and head that a pressed prompt keeps, with `press`.
      roll: `jkv.Roll`, dropping the oldest tokens of a sequence that fills the longest
        context; needs `CacheConfig(pruning=True)`. None ends it with CONTEXT_FULL.

    Raises:
      UsageError: for numbers other than positive ints.

    Example:
      >>> from jkv.decoding import GenerationConfig
      >>> GenerationConfig(100, max_running=8).chunk_size
      512
    """

    max_new_tokens: int
    num_samples: int = 1
    max_running: int | None = None
    chunk_size: int = CHUNK_SIZE
    row_counts: tuple[int, ...] | None = None
    exact: ExactShape = False
    press: Any = None
    budget: int | None = None
    roll: Roll | None = None

    def __post_init__(self) -> None:
        """Check the numbers; convert lists to tuples."""
        check_counts(
            max_new_tokens=self.max_new_tokens,
            num_samples=self.num_samples,
            chunk_size=self.chunk_size,
        )
        for name in ("row_counts", "exact"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.shortens or self.budget is not None:
            self._check_shortening()

    def _check_shortening(self) -> None:
        """Refuse a rule without a budget, other types, and two ways to drop tokens."""
        if (self.press is None) != (self.budget is None):
            raise UsageError("press and budget must be given together; add the other")
        if self.press is not None:
            if not callable(getattr(self.press, "scores", None)):
                raise UsageError(
                    f"press must have a method scores, such as jkv.press.knorm(), got "
                    f"{self.press!r:.60}"
                )
            check_counts(budget=self.budget or 0)
        if self.roll is not None and not isinstance(self.roll, Roll):
            raise UsageError(f"roll must be a jkv.Roll, got {self.roll!r:.60}")
        if self.press is not None and self.roll is not None:
            raise UsageError("press and roll exclude each other; omit one of them")

    @property
    def shortens(self) -> bool:
        """True if sequences drop cached tokens."""
        return self.press is not None or self.roll is not None

    @property
    def exact_shape(self) -> Exact | None:
        """The fixed shape of every call of the model, or None."""
        return Exact.of(self.exact)

    def check_only(self, loop: str, *names: str) -> None:
        """Refuse fields that a loop does not take, unless they have their defaults."""
        for field in dataclasses.fields(self):
            if field.name not in names and getattr(self, field.name) != field.default:
                raise UsageError(
                    f"{loop} does not support {field.name}, only {', '.join(names)}"
                )

    def resolve(
        self, num_sequences: int, most_rows: int
    ) -> tuple[int, tuple[int, ...]]:
        """Return the places, W, and the allowed rows of a step.

        Args:
          num_sequences: N.
          most_rows: rows of all prompts together.
        """
        running = num_sequences if self.max_running is None else self.max_running
        check_counts(max_running=running)
        if (exact := self.exact_shape) is not None:
            exact.check_alone(self.row_counts, self.chunk_size)
            exact.check_fits("max_running", self.max_running or 1)
            return exact.num_requests, (exact.num_rows,)
        num_places = min(running, num_sequences)
        if self.row_counts is None:
            chunk = min(self.chunk_size, most_rows)
            return num_places, tuple(sorted({num_places, max(num_places, chunk)}))
        if not isinstance(self.row_counts, tuple):
            raise UsageError(
                f"row_counts must be a tuple of ints, such as ({running},), "
                f"got {self.row_counts!r}"
            )
        counts = self.row_counts
        for count in counts:
            check_counts(row_counts=count)
        if list(counts) != sorted(set(counts)) or not counts or counts[-1] < running:
            raise ValueError(
                f"row_counts must ascend, and the last must be at least max_running, "
                f"as each running sequence has a row, got {counts} and "
                f"{running}"
            )
        return num_places, counts


class GenerationFields(TypedDict, total=False):
    """The fields of `GenerationConfig`, as arguments of a loop."""

    max_new_tokens: int
    num_samples: int
    max_running: int | None
    chunk_size: int
    row_counts: tuple[int, ...] | None
    exact: ExactShape
    press: Any
    budget: int | None
    roll: Roll | None
