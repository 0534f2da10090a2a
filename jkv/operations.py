"""Operations in the form that XLA compiles well: indexing, loops, lanes, CPU stages.

* **Indexing** (`gather`, `scatter`). `x.at[i]` first wraps negative indices: a compare,
  an add and a select for each access, half of the operations of a verb. Here indices
  are not wrapped. Out-of-range indices on either side are clamped by `gather`, or
  return `fill`, and are dropped by scatters.
* **Loops inside `jax.shard_map`** (`while_loop`, `fori_loop`, `when`). There the type
  of each value has the manual mesh axes over which it varies. Most operations promote
  these types; `while_loop` and branches require them to agree. An initial carry, often
  zeros, varies over fewer axes than a trip's result, so it is cast until the types
  agree. Outside `shard_map` these are the loops of `lax`.
* **Lanes of a call** (`is_first`, `find_one`, `find_equals`): duplicate ids among them.
  A few lanes are compared pairwise. Many use a scatter of minima, which is linear in
  the lanes, but slower for a few of them and slower to compile.
* **Flat loops** (`for_each_entry`, `find_owners`) visit the entries of all requests in
  chunks. An entry belongs to the request whose range of a running sum contains it, so
  the cost follows the number of blocks touched.

The others are workarounds for XLA's CPU runtime. None changes a result; on other
devices they cost nothing.

* **Stages** (`stage`). XLA on CPU runs every operation that is ready. With more than
  eight ready it hands half of them to another thread and waits for that thread to wake
  up, which takes longer than bookkeeping on a thousand integers. It runs a computation
  of at most eight operations in order (`ThunkExecutor` has both limits). Parts of the
  verbs with many ready operations are therefore separate computations of about that
  size, which are not inlined.
* **Sums of masked tiles** (`running_sum`). XLA on CPU compiles a `cumsum` to nine small
  loops, sums of masked tiles to four.
* **Truncating division** (`divide`). XLA considers the corrections of a floor division
  worth a second thread, which costs far more than they do.
* **Write after read** (`written_after`). XLA copies an array if it cannot prove that a
  read comes before a write. An index computed from the value read proves it.
* **The same kernels for all layers** (`unknown`). XLA on CPU compiles equal fusions
  once. With a constant layer index each layer of an unrolled model would have its own
  fusions, and compile time dominates startup.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import jaxpr_as_fun

Carry = TypeVar("Carry")
Arrays = TypeVar("Arrays")


P = ParamSpec("P")
T = TypeVar("T")

# One index array, or one for each leading axis.
Index: TypeAlias = jax.Array | tuple[jax.Array, ...]

# Pairwise comparison is quadratic in the lanes.
MOST_COMPARED = 64

# Size and number of tiles of a running sum: work grows with both.
_TILE, _MAX_TILES = 16, 128


def gather(
    array: jax.Array, index: Index, *, fill: jax.Array | int | float | None = None
) -> jax.Array:
    """Return the elements, or rows, of an array at an index.

    Args:
      array: [N, ...], or [N, M, ...] for two index arrays.
      index: i32[...], or a tuple of such arrays, one for each leading axis.
      fill: the result where an index is out of range; None clamps the index.

    Returns:
      [*index.shape, ...] of the array's dtype.
    """
    found = array.at[index].get(mode="clip", wrap_negative_indices=False)
    if fill is None:
        return found
    indices = index if isinstance(index, tuple) else (index,)
    inside = None
    for size, each in zip(array.shape, indices, strict=False):
        # As unsigned numbers, negative indices are too large.
        unsigned = jax.lax.bitcast_convert_type(jnp.int32(each), jnp.uint32)
        fits = unsigned < jnp.uint32(size)
        inside = fits if inside is None else inside & fits
    assert inside is not None
    inside = inside.reshape(inside.shape + (1,) * (found.ndim - inside.ndim))
    # A number of the host: as an operation a NaN would stop `jax_debug_nans`.
    other = fill if isinstance(fill, jax.Array) else np.asarray(fill, array.dtype)
    return jnp.where(inside, found, other)


def scatter(
    array: jax.Array,
    index: Index,
    values: jax.Array | int | bool,
    *,
    unique: bool = False,
) -> jax.Array:
    """Set elements, or rows, of an array at an index; out of range is dropped.

    Args:
      array: [N, ...], or [N, M, ...] for two index arrays.
      index: i32[...], or a tuple of such arrays, one for each leading axis.
      values: broadcast to [*index.shape, ...].
      unique: no two indices are equal, dropped ones included.
    """
    return array.at[index].set(
        values, mode="drop", unique_indices=unique, wrap_negative_indices=False
    )


def scatter_add(array: jax.Array, index: Index, values: jax.Array | int) -> jax.Array:
    """Add to elements of an array at an index; equal indices add up."""
    return array.at[index].add(values, mode="drop", wrap_negative_indices=False)


def scatter_min(array: jax.Array, index: Index, values: jax.Array) -> jax.Array:
    """Lower elements of an array at an index to values."""
    return array.at[index].min(values, mode="drop", wrap_negative_indices=False)


def scatter_max(array: jax.Array, index: Index, values: jax.Array) -> jax.Array:
    """Raise elements of an array at an index to values."""
    return array.at[index].max(values, mode="drop", wrap_negative_indices=False)


def while_loop(
    goes_on: Callable[[Carry], jax.Array], trip: Callable[[Carry], Carry], carry: Carry
) -> Carry:
    """Run `trip` while `goes_on(carry)` is True, like `lax.while_loop`."""
    if not is_manual():
        return lax.while_loop(goes_on, trip, carry)
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, carry))

    def trip_leaves(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(trip(jax.tree.unflatten(structure, leaves)))

    leaves, traced = _settle(trip_leaves, leaves)
    leaves = lax.while_loop(
        lambda leaves: goes_on(jax.tree.unflatten(structure, leaves)),
        lambda leaves: jaxpr_as_fun(traced)(*leaves),
        leaves,
    )
    return jax.tree.unflatten(structure, leaves)


def fori_loop(
    start: jax.Array,
    end: jax.Array,
    trip: Callable[[jax.Array, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Run `trip` for i32[] `start` to `end - 1`, like `lax.fori_loop`."""
    if not is_manual():
        return lax.fori_loop(start, end, trip, carry)

    def next_trip(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        i, carry = state
        return i + 1, trip(i, carry)

    # If the end varies over an axis, so does the index.
    (start,) = vary_alike([start], [end])
    return while_loop(lambda state: state[0] < end, next_trip, (start, carry))[1]


def when(
    condition: jax.Array,
    function: Callable[..., Carry],
    carry: Carry,
    *given: jax.Array,
) -> Carry:
    """Return `function(carry, *given)` if the condition holds, else the carry.

    For work that most steps skip: a loop of at most one trip. A conditional would copy
    its operands, while a loop updates the carry, the pool included, in place. XLA
    hoists loop-invariant computations out of a loop, and so would run the work in every
    step; passing its inputs as `given` makes them loop-carried, and a trip zeroes them.
    """

    def trip(_: jax.Array, old: Any) -> Any:
        carry, given = old
        return function(carry, *given), [jnp.zeros_like(array) for array in given]

    trips = condition.astype(jnp.int32)
    carry, _ = fori_loop(jnp.int32(0), trips, trip, (carry, list(given)))
    return carry


def _settle(
    trip: Callable[..., list[jax.Array]], leaves: list[jax.Array]
) -> tuple[list[jax.Array], Any]:
    """Return leaves that vary like a trip's result, and the trip traced with them."""
    while True:
        traced = jax.make_jaxpr(trip)(*leaves)
        after = traced.out_avals
        if all(
            varying_axes(new) <= varying_axes(old)
            for new, old in zip(after, leaves, strict=True)
        ):
            break
        leaves = vary_alike(leaves, after)

    def trip_alike(*leaves: jax.Array) -> list[jax.Array]:
        return vary_alike(jaxpr_as_fun(traced)(*leaves), leaves)

    return leaves, jax.make_jaxpr(trip_alike)(*leaves)


def is_manual() -> bool:
    """Return True if traced inside `jax.shard_map`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(arrays: Any) -> frozenset[str]:
    """Return the union of the axes over which a pytree's arrays or types vary."""
    return frozenset[str]().union(*map(_axes_of, jax.tree.leaves(arrays)))


def vary_over(arrays: Arrays, axes: frozenset[str]) -> Arrays:
    """Cast a pytree of arrays to also vary over `axes`; values are unchanged."""

    def cast(array: Any) -> Any:
        missing = tuple(sorted(axes - _axes_of(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, arrays) if axes else arrays


def vary_alike(arrays: Arrays, others: Any) -> Arrays:
    """Cast a pytree of arrays, each to also vary over its counterpart's axes."""
    leaves, structure = jax.tree.flatten(arrays)
    pairs = zip(leaves, others, strict=True)
    cast = [vary_over(leaf, _axes_of(other)) for leaf, other in pairs]
    return jax.tree.unflatten(structure, cast)


def vary_with(arrays: Arrays, others: Any) -> Arrays:
    """Cast a pytree of new arrays to vary over all axes of `others`.

    Arrays created inside `shard_map` vary over no axis, and a model's `lax.scan`
    rejects them as a carry that its writes make varying. Outside `shard_map` this does
    nothing.
    """
    if not is_manual():
        return arrays
    leaves = jax.tree.leaves(others)
    return vary_over(
        arrays, varying_axes([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
    )


def type_alike(kind: jax.core.ShapedArray) -> dict[str, Any]:
    """Return `ShapedArray` keywords for a type that varies over the same axes."""
    if not varying_axes(kind):
        return {}
    whole = jax.sharding.NamedSharding(kind.sharding.mesh, jax.sharding.PartitionSpec())
    return {"sharding": whole, "manual_axis_type": kind.manual_axis_type}


def unvarying(kind: Any) -> Any:
    """Return an array's type without varying axes, as one device traces it."""
    nowhere = jax.typeof(np.zeros(())).manual_axis_type
    return kind.update(manual_axis_type=nowhere)


def _axes_of(array: Any) -> frozenset[str]:
    kind = array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)
    return frozenset(kind.manual_axis_type.varying)


def stage(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function as a separate computation on CPU.

    It takes and returns pytrees of arrays; keyword arguments are static. Arrays
    returned unchanged stay outside the computation, so a stage may take and return the
    whole metadata. On other devices it is the plain function.
    """

    @functools.wraps(function)
    def staged(*args: P.args, **static: P.kwargs) -> T:
        leaves, structure = jax.tree.flatten(args)
        # Filled by tracing: the result's structure, and for each leaf the index of the
        # argument returned unchanged, or None.
        result, origins = structure, list[int | None]()

        def compute(*leaves: jax.Array) -> list[jax.Array]:
            nonlocal result, origins
            index = {id(leaf): i for i, leaf in enumerate(leaves)}
            answer = function(*jax.tree.unflatten(structure, leaves), **static)
            outputs, result = jax.tree.flatten(answer)
            origins = [index.get(id(output)) for output in outputs]
            return [output for output in outputs if id(output) not in index]

        def inlined(*leaves: jax.Array) -> list[jax.Array]:
            with set_xla_metadata(inlineable=None):
                return compute(*leaves)

        inlined.__name__ = function.__name__

        def as_stage(*leaves: jax.Array) -> list[jax.Array]:
            with set_xla_metadata(inlineable="false"):
                return jax.jit(inlined)(*leaves)

        computed = iter(
            jax.lax.platform_dependent(*leaves, cpu=as_stage, default=compute)
        )
        return jax.tree.unflatten(
            result, [next(computed) if i is None else leaves[i] for i in origins]
        )

    return staged


def running_sum(counts: jax.Array) -> jax.Array:
    """Return the inclusive running sum of counts, i32[P], as `cumsum` does."""
    size = counts.shape[0]
    if size <= _TILE:
        earlier = np.triu(np.ones((size, size), bool))
        return jnp.sum(jnp.where(earlier, counts[:, None], 0), axis=0, dtype=jnp.int32)
    if size > _TILE * _MAX_TILES:
        return jnp.cumsum(counts, dtype=jnp.int32)
    tiles = jnp.pad(counts, (0, -size % _TILE)).reshape(-1, _TILE)
    upto = np.triu(np.ones((_TILE, _TILE), bool))[None]  # [1, from, to]
    within = jnp.sum(jnp.where(upto, tiles[:, :, None], 0), axis=1, dtype=jnp.int32)
    earlier = np.triu(np.ones((len(tiles), len(tiles)), bool), 1)
    totals = jnp.where(earlier, within[:, -1][:, None], 0)
    before = jnp.sum(totals, axis=0, dtype=jnp.int32)
    return (within + before[:, None]).reshape(-1)[:size]


def divide(numbers: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Return quotient and remainder of i32[...], rounded towards zero."""
    divisor = jnp.int32(size)
    return jax.lax.div(numbers, divisor), jax.lax.rem(numbers, divisor)


def written_after(was_read: jax.Array, index: jax.Array, nothing: int) -> jax.Array:
    """Return the index of a write, i32[P], that depends on a read of the same array.

    `was_read`, bool[P], is computed from the values read; False drops the write.
    """
    return jnp.where(was_read, index, nothing)


def unknown(number: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return a number, i32[], whose value XLA on CPU cannot constant-fold."""
    if lengths.shape[0] == 0:
        return number
    nothing = lengths[0]
    number = vary_over(jnp.asarray(number), varying_axes(nothing))
    return jax.lax.platform_dependent(
        number, nothing, cpu=_add_nothing, default=lambda number, _: number
    )


@stage
def _add_nothing(number: jax.Array, length: jax.Array) -> jax.Array:
    """Return the number; a stage keeps the addition out of every fusion."""
    return number + jnp.minimum(length, 0)


def is_first(ids: jax.Array, size: int) -> jax.Array:
    """Return True where no earlier lane has the same id, bool[P]; none is negative."""
    num_lanes = ids.shape[0]
    if num_lanes <= MOST_COMPARED:
        earlier = np.tri(num_lanes, k=-1, dtype=bool)
        named_before = jnp.any((ids[:, None] == ids[None]) & earlier, axis=1)
        return ~named_before | (ids >= size)
    lane = jnp.arange(num_lanes, dtype=jnp.int32)
    earliest = scatter_min(jnp.full((size,), num_lanes, jnp.int32), ids, lane)
    last = jnp.iinfo(jnp.int32).max
    return gather(earliest, ids, fill=last) >= lane


def find_one(
    marks: jax.Array, ids: jax.Array, *, last: bool
) -> tuple[jax.Array, jax.Array]:
    """Select one lane for each distinct id, i32[P]: the first, or the last.

    `marks`, i32[N], is an array of zeros that the caller already has; it saves a
    scratch array of that size. Return it unchanged, and bool[P].
    """
    nothing, num_lanes = marks.shape[0], ids.shape[0]
    if num_lanes <= MOST_COMPARED:
        others = np.tri(num_lanes, k=-1, dtype=bool)
        others = others.T if last else others
        is_named = jnp.any((ids[:, None] == ids[None]) & others, axis=1)
        return marks, ~is_named & (ids < nothing)
    lane = jnp.arange(num_lanes, dtype=jnp.int32)
    key = -1 - lane if last else lane - num_lanes
    marked = scatter_min(marks, ids, key)
    lowest = gather(marked, ids, fill=0) == key
    lowest &= ids < nothing
    return scatter(marked, written_after(lowest, ids, nothing), 0), lowest


class Equals(NamedTuple):
    """The active lanes with the same key as each of P lanes."""

    first: jax.Array  # i32[P], the first such lane, P if none
    rank: jax.Array  # i32[P], number of such lanes before this one


def find_equals(keys: jax.Array, active: jax.Array) -> Equals:
    """Compare the keys of all lanes, [P], with active ones, bool[P]."""
    num_lanes = keys.shape[0]
    lane = jnp.arange(num_lanes, dtype=jnp.int32)
    is_equal = (keys[:, None] == keys[None]) & active[None]
    candidates = jnp.where(is_equal, lane[None], num_lanes)
    first = jnp.min(candidates, axis=1, initial=num_lanes)
    earlier = np.tri(num_lanes, k=-1, dtype=bool)
    return Equals(first, jnp.sum(is_equal & earlier, axis=1, dtype=jnp.int32))


# Entries per trip of a flat loop: enough to hide the overhead of a trip, few enough
# that a call which frees one sequence does little more.
ENTRIES_PER_TRIP = 512


def find_owners(starts: jax.Array, first: jax.Array | int, width: int) -> jax.Array:
    """Return the last of B ranges that starts at or before each of P indices, i32[P].

    The starts, i32[B], ascend from 0; the indices are consecutive from `first`.
    """
    if starts.shape[0] <= MOST_COMPARED:
        index = first + jnp.arange(width, dtype=jnp.int32)
        begun = starts[None] <= index[:, None]
        return jnp.sum(begun, axis=1, dtype=jnp.int32) - 1
    # The ranges begun up to an index end with its owner.
    index = jnp.maximum(starts - first, 0)
    begun = scatter_add(jnp.zeros((width,), jnp.int32), index, 1)
    return running_sum(begun) - 1


class Entries(NamedTuple):
    """P consecutive entries of the concatenated requests."""

    number: jax.Array  # i32[P], index among all entries
    request: jax.Array  # i32[P], its request
    rank: jax.Array  # i32[P], index within its request
    valid: jax.Array  # bool[P]


def find_chunk(counts: jax.Array, width: int) -> tuple[Entries, jax.Array]:
    """Return the first P entries of counts, i32[B], and their number per request."""
    ends = running_sum(counts)
    starts = ends - counts
    num_done = jnp.clip(width - starts, 0, counts)
    return list_entries(starts, ends[-1], 0, width), num_done


def list_entries(
    starts: jax.Array, end: jax.Array, first: jax.Array | int, width: int
) -> Entries:
    """List P entries from `first` on, of requests whose entries start at i32[B].

    Entries at and after `end`, i32[], are invalid.
    """
    number = first + jnp.arange(width, dtype=jnp.int32)
    request = find_owners(starts, first, width)
    return Entries(number, request, number - gather(starts, request), number < end)


def for_each_entry(
    counts: jax.Array,
    max_entries: int,
    body: Callable[[Carry, Entries], Carry],
    carry: Carry,
    width: int = ENTRIES_PER_TRIP,
) -> Carry:
    """Run `body` over the entries of all requests, i32[B] each, in chunks.

    The number of entries is known only at run time: a dense pass would cost B * M in
    every call, the loop costs only its entries. Entries come in request order;
    `max_entries` is a static bound.
    """
    if counts.shape[0] == 0 or max_entries == 0:
        return carry
    ends = running_sum(counts)
    starts = ends - counts
    width = min(max_entries, width)

    def trip(i: jax.Array, carry: Carry) -> Carry:
        return body(carry, list_entries(starts, ends[-1], i * width, width))

    num_trips = (ends[-1] + width - 1) // width
    return fori_loop(jnp.int32(0), num_trips, trip, carry)


def for_each_of(
    mask: jax.Array, trip: Callable[[jax.Array, Carry], Carry], carry: Carry
) -> Carry:
    """Call `trip(request i32[1], carry)` for each request of a mask, in order."""
    return for_each_entry(
        mask.astype(jnp.int32),
        mask.shape[0],
        lambda carry, at: trip(at.request, carry),
        carry,
        width=1,
    )
