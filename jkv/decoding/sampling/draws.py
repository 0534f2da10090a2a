"""Sampling options, and greedy choice and sampling from filtered logits.

Filters are a penalty, temperature, top-k, top-p and min-p. Nothing is sorted. Top-k and
top-p keep the same kind of set: token i stays while the tokens strictly above it weigh
less than a limit; a token weighs 1 for top-k and its probability for top-p. So each is
one number, the smallest kept logit, found by bisection over the 32 bits of a float,
with one masked sum per bit.

A draw inverts the cumulative distribution in two levels, a tile and a token in it, with
two uniform numbers instead of one Gumbel number per token of the vocabulary. A row's
random numbers depend only on its own seed and its number of generated tokens, so a
completion does not depend on its neighbours or on the batch size.

Symbols: B sequences of a call, V vocabulary size.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.arguments import expect, explains_arguments, name_kind
from jkv.operations import while_loop
from jkv.status import UsageError

if TYPE_CHECKING:  # importing them takes longer than the options
    from jkv.logits_processors import LogitsProcessor

_MOST = int(jnp.iinfo(jnp.int32).max)

_LEAST = float(jnp.finfo(jnp.float32).tiny)

# Logits searched at once on a CPU, 1 MiB.
_MOST_AT_ONCE = 2**18

# Limit for a top-p of 0, which keeps only the most likely token.
_LEAST_MASS = float(jnp.finfo(jnp.float32).tiny)

# A choice selects one of V / _TILE tiles, then a token in it: two short cumulative sums
# instead of one of length V.
_TILE = 128

# Range of each field of `Sampling`: from, to, and a description.
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, float("inf"), "0 (greedy) or more"),
    "top_k": (0, _MOST, "an integer of 0 (off) or more"),
    "top_p": (0.0, 1.0, "from 0 to 1 (off)"),
    "min_p": (0.0, 1.0, "from 0 (off) to 1"),
    "repetition_penalty": (_LEAST, float("inf"), "above 0; 1 is off"),
    "seeds": (-_MOST - 1, _MOST, "an integer of 32 bits"),
}


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampling:
    """Sampling options; the default is greedy.

    With a temperature, repeated calls draw the same tokens: pass other `seeds`, or a
    `key`, for others.

    Every field is a scalar for all sequences, or an array or list with one value for
    each, and may be traced: changing a value never retraces. Numbers, lists and numpy
    arrays are checked on construction; JAX arrays, which may be traced, are not.
    The filters have the meaning and the order of Hugging Face's logits processors:
    repetition penalty, temperature, top-k, top-p, min-p. One difference: tokens with
    exactly equal logits are kept or removed together, by top-p too. The most likely
    token is always kept.

    Attributes:
      temperature: f32 [] or [B]. Logits are divided by it; 0 is greedy.
      top_k: i32 [] or [B]. Keep the `top_k` most likely tokens; 0 keeps all.
      top_p: f32 [] or [B]. Keep the most likely tokens up to this probability mass,
        including the token that crosses it; 1 keeps all.
      min_p: f32 [] or [B]. Keep tokens at least `min_p` times as likely as the most
        likely one; 0 keeps all.
      repetition_penalty: f32 [] or [B]. Logits of tokens seen in the prompt or the
        completion are divided by it if positive, multiplied if negative; 1 is off.
      seeds: i32 [] or [B]. A scalar is spread over the sequences (`spread_seeds`), the
        first of which gets the scalar itself.
      key: key [], of `jax.random.key`, instead of `seeds`: the first sequence's seed is
        drawn from it. It may be traced.

    Raises:
      ValueError: for a value outside of its field's range, or a key with seeds.

    Example:
      >>> import jkv
      >>> jkv.Sampling(temperature=0.8, top_p=0.95, seeds=7).top_p
      0.95
    """

    temperature: jax.Array | float = 0.0
    top_k: jax.Array | int = 0
    top_p: jax.Array | float = 1.0
    min_p: jax.Array | float = 0.0
    repetition_penalty: jax.Array | float = 1.0
    seeds: jax.Array | int = 0
    key: dataclasses.InitVar[jax.Array | None] = None
    # Dtype of each field inside the loops.
    dtypes: ClassVar[dict[str, type[np.generic]]] = {
        "temperature": np.float32,
        "top_k": np.int32,
        "top_p": np.float32,
        "min_p": np.float32,
        "repetition_penalty": np.float32,
        "seeds": np.int32,
    }

    def __post_init__(self, key: jax.Array | None) -> None:
        if key is not None:
            if not isinstance(self.seeds, int) or self.seeds != 0:
                raise ValueError("got seeds and key; pass one of them")
            object.__setattr__(self, "seeds", _draw_seed(key))
        for name in _RANGES:
            object.__setattr__(self, name, _checked(name, getattr(self, name)))

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """Return the fields by name, for JAX."""
        names = [field.name for field in dataclasses.fields(self)]
        key = jax.tree_util.GetAttrKey
        return [(key(name), getattr(self, name)) for name in names], None

    @classmethod
    def tree_unflatten(cls, _: None, values: Any) -> "Sampling":
        """Rebuild the options unchecked: JAX also unflattens placeholders."""
        sampling = object.__new__(cls)
        for field, value in zip(dataclasses.fields(cls), values, strict=True):
            object.__setattr__(sampling, field.name, value)
        return sampling


def _checked(name: str, value: Any) -> Any:
    """Return the value of a field, lists as arrays, after a range check."""
    low, high, words = _RANGES[name]
    if isinstance(value, list | tuple):
        is_array = any(isinstance(leaf, jax.Array) for leaf in value)
        try:
            value = (jnp if is_array else np).asarray(value)
        except (TypeError, ValueError):
            raise UsageError(f"Sampling.{name} must be {words}, got {value}") from None
    if hasattr(value, "dtype") and not isinstance(value, np.ndarray | np.generic):
        return value  # a JAX array or a tracer
    given = np.asarray(value)
    kinds = (jnp.integer,) if isinstance(low, int) else (jnp.integer, jnp.floating)
    is_number = any(jnp.issubdtype(given.dtype, kind) for kind in kinds)
    if not is_number or not np.all(
        (given >= low) & (given <= high) & np.isfinite(given)
    ):
        raise UsageError(f"Sampling.{name} must be {words}, got {value!r}")
    return value


def _draw_seed(key: jax.Array) -> jax.Array:
    """Draw a seed from a key, i32[]."""
    is_array = isinstance(key, jax.Array)
    if not is_array or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise UsageError(
            f"Sampling.key must come from jax.random.key(...), got {key!r}; pass a "
            f"number as seeds"
        )
    return jax.random.randint(key, (), -_MOST - 1, _MOST, jnp.int32)


@explains_arguments
def spread_seeds(seed: Any, count: int) -> Any:
    """Return a seed for each sequence from a single number.

    The first is the number itself. The others hash it with the sequence's index, so
    that seeds 0, 1, 2, ... share no sequence. Sequence i alone is reproduced by
    `seeds=spread_seeds(seed, count)[i]`.

    Args:
      seed: i32[] or int; may be traced.
      count: number of sequences; static.

    Returns:
      i32[count], in numpy unless the seed is a JAX array.

    Raises:
      ValueError: for a seed that is not one integer of 32 bits.

    Example:
      >>> from jkv.decoding import spread_seeds
      >>> spread_seeds(7, 3).tolist()
      [7, -2065701882, -506330980]
    """
    if not isinstance(count, int) or count < 0:
        raise UsageError(f"count must be a static int of at least 0, got {count!r}")
    xp: Any = jnp if isinstance(seed, jax.Array) else np
    _check_seed(xp.asarray(seed))
    # The bits of a negative number, or of an unsigned one.
    first = xp.asarray(seed).reshape(1)
    first = first.astype(np.int64 if xp is np else first.dtype).astype(np.uint32)
    index = xp.arange(count, dtype=np.uint32)
    seeds = xp.where(index == 0, first, _mix(_mix(first) + index))
    return seeds.astype(np.uint32).view(np.int32)


def _check_seed(seed: Any) -> None:
    """Refuse several numbers, and seeds that would lose bits."""
    fits = jnp.issubdtype(seed.dtype, jnp.integer) and seed.size == 1
    if fits and isinstance(seed, np.ndarray):
        fits = -(2**31) <= int(seed.item()) < 2**32
    if not fits:
        raise UsageError(
            f"seed must be one integer of 32 bits, from -2^31 to below 2^32, got "
            f"{seed if isinstance(seed, np.ndarray) else name_kind(seed)}"
        )


def _mix(bits: Any) -> Any:
    """Hash u32[...], each bit depending on all (lowbias32 of C. Wellons, 2018)."""
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    return bits ^ (bits >> np.uint32(16))


def check_sampling(sampling: object) -> None:
    if not isinstance(sampling, Sampling):
        raise UsageError(
            f"sampling must be a jkv.Sampling, such as Sampling(temperature=0.7), got "
            f"{sampling!r}"
        )


GREEDY = Sampling()


@explains_arguments
def filter_logits(
    logits: jax.Array,  # f32[B, V]
    sampling: Sampling,
    *,
    seen: jax.Array | None = None,  # bool[B, V]
) -> jax.Array:
    """Return the filtered logits that `sample` draws from.

    Args:
      logits: f32[B, V].
      sampling: sampling options.
      seen: bool[B, V], tokens with a repetition penalty; None is none.

    Returns:
      f32[B, V], penalised, divided by the temperature, minus each row's maximum; -inf
      for removed tokens. A greedy row (temperature 0) keeps only its most likely
      tokens.

    Raises:
      ValueError: for a field of `sampling` that is neither a scalar nor [B].

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.decoding import Sampling, filter_logits
      >>> filter_logits(
      ...     jnp.array([[1.0, 3.0, 2.0]]), Sampling(temperature=0.5, top_k=2)).tolist()
      [[-inf, 0.0, -2.0]]
    """
    _check_logits(logits, seen)
    rows = by_row(sampling, logits.shape[0])
    return filter_rows(logits.astype(jnp.float32), rows, seen)


def _check_logits(logits: jax.Array, seen: jax.Array | None) -> None:
    """Refuse logits of another rank, no tokens, and other shapes of `seen`."""
    sizes = expect("logits", logits, "B V")
    if not sizes["V"]:
        raise UsageError(
            "logits must have at least one token, got f32[B, V] with V = 0"
        )
    if seen is not None:
        expect("seen", seen, "B V", sizes, jnp.bool_, why="as the logits")


class PerRow(NamedTuple):
    """`Sampling` with one value per row, with the same fields.

    None replaces a Python number that turns the option off; nothing is compiled for it.
    """

    temperature: jax.Array | None  # f32[B]; None is greedy
    top_k: jax.Array | None  # i32[B]
    top_p: jax.Array | None  # f32[B]
    min_p: jax.Array | None  # f32[B]
    repetition_penalty: jax.Array | None  # f32[B]
    seeds: jax.Array  # i32[B]


# Values that turn an option off.
_OFF: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: value <= 0,
    "top_k": lambda value: value <= 0,
    "top_p": lambda value: value >= 1,
    "min_p": lambda value: value <= 0,
    "repetition_penalty": lambda value: value == 1,
}


def by_row(sampling: Sampling, num_rows: int) -> PerRow:
    """Return the fields of `Sampling` with one value per row."""
    check_sampling(sampling)

    def spread(name: str, dtype: Any) -> jax.Array | None:
        value = getattr(sampling, name)
        if isinstance(value, int | float) and name in _OFF and _OFF[name](value):
            return None
        value = jnp.asarray(value)
        why = "one number, or one for each sequence"
        expect(f"Sampling.{name}", value, "N |", {"N": num_rows}, why=why)
        return jnp.broadcast_to(value.astype(dtype), (num_rows,))

    rows = {name: spread(name, as_) for name, as_ in Sampling.dtypes.items()}
    if jnp.ndim(sampling.seeds) > 0:
        return PerRow(**rows)  # type: ignore[arg-type]  # seeds are never off
    seeds = spread_seeds(jnp.asarray(sampling.seeds, jnp.int32), num_rows)
    return PerRow(**rows | {"seeds": seeds})


def penalise(logits: jax.Array, rows: PerRow, seen: jax.Array | None) -> jax.Array:
    """Penalise the tokens in `seen` (Keskar et al., CTRL, 2019)."""
    if seen is None or rows.repetition_penalty is None:
        return logits
    penalty = rows.repetition_penalty[:, None]
    penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
    return jnp.where(seen, penalised, logits)


@jax.jit
def filter_rows(logits: jax.Array, rows: PerRow, seen: jax.Array | None) -> jax.Array:
    """Penalise, divide by the temperature and apply the filters."""
    scaled = _scale(logits, rows, seen)
    are_on = []
    if rows.top_k is not None:
        are_on.append(jnp.any(rows.top_k > 0))
    if rows.top_p is not None:
        are_on.append(jnp.any(rows.top_p < 1))
    if rows.min_p is not None:
        are_on.append(jnp.any(rows.min_p > 0))
    if not are_on:
        return scaled
    if scaled.shape[0] == 1 or scaled.size <= _MOST_AT_ONCE:
        remove = _remove
    else:
        remove = _remove_by_platform
    is_on = functools.reduce(operator.or_, are_on)
    return lax.cond(is_on, lambda: remove(scaled, rows), lambda: scaled)


def _scale(logits: jax.Array, rows: PerRow, seen: jax.Array | None) -> jax.Array:
    """Penalise and divide by the temperature; each row's maximum becomes 0."""
    # Subtract the maximum first: nothing overflows at a low temperature.
    logits = penalise(logits, rows, seen)
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    cold = jnp.where(shifted == 0, jnp.float32(0), jnp.float32(-jnp.inf))
    if rows.temperature is None:
        return cold
    is_greedy = rows.temperature <= 0
    divisor = jnp.where(is_greedy, jnp.float32(1), rows.temperature)[:, None]
    return jnp.where(is_greedy[:, None], cold, shifted / divisor)


def _remove_by_platform(scaled: jax.Array, rows: PerRow) -> jax.Array:
    """Filter row by row on a CPU, to stay within its caches."""

    def one_by_one(scaled: jax.Array, rows: PerRow) -> jax.Array:
        def remove(row: tuple[jax.Array, PerRow]) -> jax.Array:
            return _remove(*jax.tree.map(lambda leaf: leaf[None], row))[0]

        removed: jax.Array = lax.map(remove, (scaled, rows))
        return removed

    chosen: jax.Array = lax.platform_dependent(
        scaled, rows, cpu=one_by_one, default=_remove
    )
    return chosen


def _remove(scaled: jax.Array, rows: PerRow) -> jax.Array:
    # A search that starts at its row's maximum ends at once.
    ranks = _ordered_bits(scaled)
    cut, keep_best = jnp.min(ranks, axis=-1), jnp.max(ranks, axis=-1)

    # Top-k: tokens with fewer than k above them.
    if rows.top_k is not None:
        is_on = rows.top_k > 0
        start = jnp.where(is_on, cut, keep_best)
        kept = _smallest_kept(ranks, jnp.ones_like(ranks), rows.top_k, start=start)
        cut = jnp.where(is_on, kept, cut)

    # Top-p: tokens with less than p of top-k's remaining mass above them.
    if rows.top_p is not None:
        weights = jnp.where(ranks >= cut[:, None], jnp.exp(scaled), jnp.float32(0))
        mass = jnp.maximum(rows.top_p * jnp.sum(weights, axis=-1), _LEAST_MASS)
        is_on = rows.top_p < 1
        start = jnp.where(is_on, cut, keep_best)
        kept = _smallest_kept(ranks, weights, mass, start=start)
        cut = jnp.where(is_on, kept, cut)

    # Min-p: the most likely token weighs exp(0) = 1.
    is_kept = ranks >= cut[:, None]
    if rows.min_p is not None:
        min_p = jnp.minimum(rows.min_p, jnp.float32(1))[:, None]
        is_kept &= jnp.exp(scaled) >= min_p
    return jnp.where(is_kept, scaled, jnp.float32(-jnp.inf))


def _smallest_kept(
    ranks: jax.Array,  # i32[B, V]
    weights: jax.Array,  # i32[B, V] or f32[B, V]
    limits: jax.Array,  # i32[B] or f32[B], above 0
    *,
    start: jax.Array,  # i32[B], lower end of each row's search
) -> jax.Array:
    """Return the smallest rank above which the weights sum to less than the limit."""

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        # The mean, rounded down, without the overflow of low + high.
        middle = (low & high) + ((low ^ high) >> 1)
        above = jnp.where(ranks > middle[:, None], weights, jnp.zeros_like(weights))
        enough = jnp.sum(above, axis=-1, dtype=weights.dtype) < limits
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    high = jnp.max(ranks, axis=-1)
    _, kept = while_loop(
        lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (start, high)
    )
    return kept


def _ordered_bits(values: jax.Array) -> jax.Array:
    """Map f32 to i32 with the same order."""
    values = jnp.where(values == 0, jnp.float32(0), values)  # -0 equals 0
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


Part = TypeVar("Part")


Results = TypeVar("Results")


@explains_arguments
def sample(
    logits: jax.Array,  # f32[B, V]
    sampling: Sampling,
    counts: jax.Array | int = 0,  # i32[B]
    *,
    seen: jax.Array | None = None,  # bool[B, V]
) -> tuple[jax.Array, jax.Array]:
    """Choose one token per row.

    Args:
      logits: f32[B, V], finite or -inf; a token at -inf is never chosen.
      sampling: sampling options.
      counts: i32[B], tokens generated by each sequence so far. Together with its seed
        they determine its random numbers.
      seen: bool[B, V], tokens with a repetition penalty; None is none.

    Returns:
      tokens: i32[B].
      logprobs: f32[B], log-probability of each under the given logits, before penalty,
        temperature and filters.

    Raises:
      ValueError: for a field of `sampling` that is neither a scalar nor [B].

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.decoding import Sampling, sample
      >>> tokens, logprobs = sample(jnp.log(jnp.array([[0.1, 0.7, 0.2]])), Sampling())
      >>> tokens.tolist(), round(float(jnp.exp(logprobs[0])), 3)
      ([1], 0.7)
    """
    _check_logits(logits, seen)
    num_rows, counts = logits.shape[0], jnp.asarray(counts)
    why = "one number, or one for each row"
    expect("counts", counts, "B |", {"B": num_rows}, jnp.integer, why=why)
    rows = by_row(sampling, num_rows)
    if num_rows == 0:
        return jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.float32)
    counts = jnp.broadcast_to(counts.astype(jnp.int32), (num_rows,))
    return _sample(logits.astype(jnp.float32), rows, counts, seen)


@jax.jit
def _sample(
    logits: jax.Array, rows: PerRow, counts: jax.Array, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    def choose_best() -> jax.Array:
        return find_best(penalise(logits, rows, seen))

    if rows.temperature is None:
        tokens = choose_best()
        return tokens, pick_logprobs(logits, tokens)
    is_greedy = rows.temperature <= 0

    def draw_some() -> jax.Array:
        drawn = draw(filter_rows(logits, rows, seen), rows.seeds, counts)
        best = lax.cond(jnp.any(is_greedy), choose_best, lambda: drawn)
        return jnp.where(is_greedy, best, drawn)

    # An all-greedy batch skips the filters and the draw.
    tokens = lax.cond(jnp.all(is_greedy), choose_best, draw_some)
    return tokens, pick_logprobs(logits, tokens)


def pick_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log-probability of one token of each row, f32[B]."""
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)
    return logprobs[:, 0]


def find_best(logits: jax.Array) -> jax.Array:
    """Return the first of the most likely tokens of each row, i32[B].

    `argmax` carries an index with each value and is scalar on a CPU. So one pass finds
    the largest logit of each tile, and two small ones the tile and the token.
    """
    tiles = _cut_tiles(logits, -jnp.inf)
    tile = lax.argmax(jnp.max(tiles, axis=-1), 1, jnp.int32)
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    # With NaN logits any token may result, but the index stays valid.
    token = tile * _TILE + lax.argmax(inside, 1, jnp.int32)
    return jnp.minimum(token, logits.shape[1] - 1)


def _cut_tiles(values: jax.Array, filling: float) -> jax.Array:
    """Reshape values f32[B, V] to [B, tiles, _TILE], padding the last tile."""
    num_rows, vocabulary = values.shape
    missing = ((0, 0), (0, -vocabulary % _TILE))
    padded = jnp.pad(values, missing, constant_values=filling)
    return padded.reshape(num_rows, -1, _TILE)


def draw(
    logits: jax.Array, seeds: jax.Array, counts: jax.Array, purpose: int = 0
) -> jax.Array:
    """Draw from softmax(logits), i32[B]; each row's maximum must be 0."""
    uniforms = draw_uniforms(seeds, counts, purpose)
    tiles = _cut_tiles(jnp.exp(logits), 0.0)
    tile = _invert(jnp.sum(tiles, axis=-1), uniforms[:, 0])
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    return tile * _TILE + _invert(inside, uniforms[:, 1])


def draw_uniforms(seeds: jax.Array, counts: jax.Array, purpose: int = 0) -> jax.Array:
    """Return numbers in [0, 1), f32[B, 2], determined by seed, count and purpose."""

    def of_row(seed: jax.Array, count: jax.Array) -> jax.Array:
        # A fixed generator: others give a batch other numbers than its rows.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), count)
        if purpose:
            key = jax.random.fold_in(key, purpose)
        return jax.random.uniform(key, (2,), jnp.float32)

    return jax.vmap(of_row)(seeds, counts)


def _invert(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Return the first index with a cumulative weight above `uniforms` * total."""
    # A parallel sum need not be monotone in its last bit, so entries of weight 0 are
    # excluded explicitly.
    sums = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), jnp.float32(0))
    target = uniforms * jnp.max(sums, axis=-1)
    return jnp.argmax(sums > target[:, None], axis=-1).astype(jnp.int32)


class Choice(NamedTuple):
    """Sampling options and logits processor of N sequences."""

    sampling: Sampling
    logits_processor: "LogitsProcessor | None" = None
    # Rows per call of `_sample`, so that results do not depend on the batch size; None:
    # all.
    num_rows: int | None = None

    def sample(
        self,
        logits: jax.Array,  # f32[K, V]
        sampling: Sampling,  # of these rows, scalars or K values
        counts: jax.Array,  # i32[K], tokens generated so far
        seen: jax.Array | None,  # bool[K, V] or None, as for `sample`
    ) -> tuple[jax.Array, jax.Array]:
        """Choose a token for each row, i32[K], with its log-probability, f32[K]."""
        if self.num_rows is None or self.num_rows == logits.shape[0]:
            return sample(logits, sampling, counts, seen=seen)
        rows = by_row(sampling, logits.shape[0])

        def choose(
            chunk: tuple[jax.Array, PerRow, jax.Array, jax.Array | None],
        ) -> tuple[jax.Array, jax.Array]:
            logits, *rest = chunk
            return _sample(logits.astype(jnp.float32), *rest)

        return _map_chunks(choose, (logits, rows, counts, seen), self.num_rows)


def _map_chunks(
    function: Callable[[Part], Results], rows: Part, num_rows: int
) -> Results:
    """Map a function over chunks of `num_rows` rows, padding the last one."""
    count = jax.tree.leaves(rows)[0].shape[0]
    missing = -count % num_rows

    def cut(array: jax.Array) -> jax.Array:
        # Pad with the last row; its extra results are dropped.
        last = jnp.broadcast_to(array[-1:], (missing, *array.shape[1:]))
        whole = jnp.concatenate([array, last])
        return whole.reshape(-1, num_rows, *array.shape[1:])

    found = lax.map(function, jax.tree.map(cut, rows))
    return jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:])[:count], found)
