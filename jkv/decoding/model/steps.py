"""How much a loop does, and in steps of which sizes: its static numbers.

Steps may have one shape, so that a text's bits do not depend on what runs beside it. A
product's rows differ in their last bits with the number of rows, and attention's with
the way in which a context is cut. So every call of the model then has the same number
of rows and of requests, however much of them is used, and attention cuts contexts by
position (`attend_by_position` of `jkv.attention.xla.tiles`, and the kernels).

Symbols: B prompts of at most P tokens, W sequences that run at one time or requests of
a call, R rows.
"""

import dataclasses
from typing import NamedTuple, Self, TypedDict

import jax
import jax.numpy as jnp

from jkv.indexing import scatter
from jkv.metadata.requests import check_counts
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.status import UsageError
from jkv.verbs.attention_plan import plan_attention

# Rows of a step with prompts when the caller does not say: enough to keep a processor
# busy, few enough that the step's activations stay small.
CHUNK_SIZE = 512


# Requests and rows of a call, if the caller does not say.
_DEFAULT = 64, 64

ExactShape = bool | tuple[int, int]


class Exact(NamedTuple):
    """The shape of every call of the model."""

    num_requests: int  # W
    num_rows: int  # R, at least W

    @classmethod
    def of(cls, exact: ExactShape) -> Self | None:
        """Return what was asked for, a bool or (W, R); None for no fixed shape."""
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
        """Refuse what would give a step another shape."""
        if row_counts is not None or chunk_size != CHUNK_SIZE:
            raise UsageError(
                f"exact={tuple(self)} fixes the rows of every step: leave out "
                f"row_counts and chunk_size"
            )

    def check_fits(self, name: str, number: int) -> None:
        """Refuse more of something than a call has requests."""
        if number > self.num_requests:
            raise UsageError(
                f"{name} is {number}, more than the {self.num_requests} requests of a "
                f"call: give exact=({number}, {max(number, self.num_rows)})"
            )

    def check_cache(self, cache: Cache) -> None:
        """Refuse a cache that keeps inputs of tokens which may be taken back."""
        if most := cache.metadata.max_pending:
            raise UsageError(
                f"exact= takes no guesses, so no tokens of a state are taken back: "
                f"leave out max_pending of StateConfig, which is {most}"
            )

    def pad(
        self,
        seq_ids: jax.Array,  # i32[B], -1 for none
        tokens: jax.Array,  # i32[r]; without counts one of each sequence
        counts: jax.Array | None,  # i32[B]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Fill a step up to W requests and R rows: i32[W], i32[R] and i32[W]."""
        more = (0, self.num_requests - seq_ids.shape[0])
        if counts is None:
            counts = (seq_ids >= 0).astype(jnp.int32)
            # Rows follow each other, without those of no sequence.
            row = jnp.cumsum(counts, dtype=jnp.int32) - 1
            row = jnp.where(counts > 0, row, self.num_rows)
            rows = jnp.zeros((self.num_rows,), jnp.int32)
            tokens = scatter(rows, row, tokens)
        else:
            tokens = jnp.pad(tokens, (0, self.num_rows - tokens.shape[0]))
        seq_ids = jnp.pad(seq_ids, more, constant_values=NO_SEQUENCE)
        return seq_ids, tokens, jnp.pad(counts, more)

    def fix(self, cache: Cache, batch: Batch) -> Batch:
        """Let attention to the rows of a step go by position alone."""
        batch = dataclasses.replace(batch, by_position=True, plan=None)
        return plan_attention(cache, batch)


@dataclasses.dataclass(frozen=True)
class Steps:
    """How much a loop does, and in which sizes. Static under jit, as it is hashable.

    Attributes:
      max_new_tokens: most new tokens of any sequence, G.
      num_samples: continuations of each prompt, which is computed once (`fork`). Sample
        j of prompt i is sequence `i * num_samples + j` of the result.
      max_running: most sequences that run at one time, W. None is all of them. A cache
        with fewer rows runs fewer. With several pools it holds for each.
      chunk_size: rows of a step that computes prompts, unless `row_counts` says. Take
        few where the prefix cache leaves few.
      row_counts: rows that a step may have, ascending, the last at least W. A step
        takes the smallest that holds its work, each is a program to compile. None is W
        and the larger of W and `chunk_size`, which is B * P at most.
      exact: True or (W, R): tokens and log-probabilities are the same bits whatever
        else is in the call or came before, as `jkv.check_exact` shows for a model of
        your own. Every call of the model has W requests and R rows, 64 and 64 for True,
        and costs that much.

    Raises:
      UsageError: for numbers that are no positive ints.

    Example:
      >>> from jkv.decoding import Steps
      >>> Steps(100, max_running=8).chunk_size
      512
    """

    max_new_tokens: int
    num_samples: int = 1
    max_running: int | None = None
    chunk_size: int = CHUNK_SIZE
    row_counts: tuple[int, ...] | None = None
    exact: ExactShape = False

    def __post_init__(self) -> None:
        """Refuse what is no static number; keep lists as tuples."""
        check_counts(
            max_new_tokens=self.max_new_tokens,
            num_samples=self.num_samples,
            chunk_size=self.chunk_size,
        )
        for name in ("row_counts", "exact"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def exact_shape(self) -> Exact | None:
        """The shape of every call of the model, None for no fixed one."""
        return Exact.of(self.exact)

    def check_only(self, loop: str, *names: str) -> None:
        """Refuse fields that a loop does not have, unless they are the defaults."""
        for field in dataclasses.fields(self):
            if field.name not in names and getattr(self, field.name) != field.default:
                raise UsageError(
                    f"{loop} has no {field.name}; of Steps it takes {', '.join(names)}"
                )

    def resolve(
        self, num_sequences: int, most_rows: int
    ) -> tuple[int, tuple[int, ...]]:
        """Return the places, W, and the rows that a step may have.

        Args:
          num_sequences: N.
          most_rows: rows that all prompts have together.
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
                f"row_counts must be a tuple of ints, as ({running},) for steps of so "
                f"many rows, got {self.row_counts!r}"
            )
        counts = self.row_counts
        for count in counts:
            check_counts(row_counts=count)
        if list(counts) != sorted(set(counts)) or not counts or counts[-1] < running:
            raise ValueError(
                f"row_counts must ascend, and the last be at least max_running, as a "
                f"step has a row for each sequence that runs; got {counts} for "
                f"{running}"
            )
        return num_places, counts


class OfSteps(TypedDict, total=False):
    """The fields of `Steps`, as arguments of a loop."""

    max_new_tokens: int
    num_samples: int
    max_running: int | None
    chunk_size: int
    row_counts: tuple[int, ...] | None
    exact: ExactShape
