"""Whether decoding in one launch gives on this card what two do, many times over.

A program that joined before others have stored would show rarely, and only on a card.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention.call import Attend, Call, Requests, make_requests
from jkv.attention.choice import attend_anywhere
from jkv.attention.kernel.one_launch import LAUNCH_SWITCH
from jkv.attention.kernel.platforms import why_not_one_launch
from jkv.attention.pools import make_pools
from jkv.commands.report import Report
from jkv.storage import quantization

NUM_CALLS = 1000
# Of what bfloat16 rounds once more, and of float32 that is added up in another order.
TOLERANCES = {"bfloat16": 2.0**-7, "float32": 2.0**-18}
BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """Contexts of up to a length, and what is stored of them."""

    name: str
    num_requests: int
    max_length: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None  # of a latent cache
    kv_dtype: str = "bfloat16"


CASES = (
    Case("a context", 1, 8_192),
    Case("several contexts", 8, 1_024),
    Case("many contexts", 64, 1_024),
    Case("int8", 8, 2_048, kv_dtype="int8"),
    Case("head dim 256", 4, 2_048, head_dim=256),
    Case("latent", 2, 2_048, 16, 1, 576, 512),
)


def check_one_launch(
    report: Report,
    *,
    attend: Attend | None = None,
    cases: tuple[Case, ...] = CASES,
    num_calls: int = NUM_CALLS,
) -> None:
    """Decode contexts of many lengths both ways, in one launch twice, and compare.

    Args:
      report: gets a finding for all that agree, and one for each that does not.
      attend: in place of the kernel for the card at hand.
      cases: what is attended to.
      num_calls: of each.
    """
    agreed: list[str] = []
    refused: dict[str, list[str]] = {}
    for case in cases:
        shapes = jax.eval_shape(functools.partial(draw_call, case))
        reason = why_not_one_launch(shapes.queries, shapes.pools)
        if attend is None and reason is not None:
            refused.setdefault(reason, []).append(case.name)
            continue
        used = attend or attend_anywhere
        wrong = count_wrong(draw_call(case), used, num_calls, case.max_length)
        if wrong:
            detail = (
                f"{wrong} of {num_calls} calls differ from two launches; leave "
                f"{LAUNCH_SWITCH} unset"
            )
            report.add("FAILED", f"decoding in one launch: {case.name}", detail)
        else:
            agreed.append(case.name)
    for reason, names in refused.items():
        what = f"decoding in one launch: {', '.join(names)}"
        report.add("not checked", what, reason)
    if agreed:
        what = f"decoding in one launch: {', '.join(agreed)}"
        report.add("ok", what, f"as two launches in {num_calls} calls of each")


def count_wrong(call: Call, attend: Attend, num_calls: int, max_length: int) -> int:
    """Return in how many calls, of random lengths, one launch is not as it should be.

    It should be what two are but for rounding, and the same bits when it is repeated.
    """
    one, two = (
        functools.partial(_attend_lengths, call, attend, is_in_one_launch=is_one)
        for is_one in (True, False)
    )

    def step(number: jax.Array, wrong: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), number)
        # Short ones as often as long ones, and some that are not there.
        shape = (call.num_requests,)
        share = jax.random.uniform(key, shape, minval=-0.2, maxval=1.0)
        lengths = (jnp.maximum(share, 0.0) ** 3 * max_length).astype(jnp.int32)
        found, again, wanted = one(lengths), one(lengths), two(lengths)
        differs = [
            jnp.any(each != other) for each, other in zip(found, again, strict=True)
        ]
        differs += [_is_far(*pair) for pair in zip(found, wanted, strict=True)]
        return wrong + jnp.any(jnp.stack(differs)).astype(jnp.int32)

    count = jax.jit(lambda: jax.lax.fori_loop(0, num_calls, step, jnp.int32(0)))
    return int(count())


def _is_far(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return whether any number is not the one that is wanted, bool[]; -inf is -inf."""
    tolerance = TOLERANCES[found.dtype.name]
    found, wanted = (each.astype(jnp.float32) for each in (found, wanted))
    is_close = jnp.abs(found - wanted) <= tolerance * (1 + jnp.abs(wanted))
    return jnp.any((found != wanted) & ~is_close)


def _attend_lengths(
    call: Call, attend: Attend, lengths: jax.Array, *, is_in_one_launch: bool
) -> tuple[jax.Array, jax.Array]:
    asked = call.requests._replace(
        query_lengths=(lengths > 0).astype(jnp.int32), context_lengths=lengths
    )
    requests = make_requests(
        asked, num_rows=call.num_rows, block_size=BLOCK_SIZE, max_query_length=1
    )
    return attend(
        dataclasses.replace(call, requests=requests, is_in_one_launch=is_in_one_launch)
    )


def draw_call(case: Case) -> Call:
    """Return a call over random numbers, in blocks in random order."""
    num_blocks = -(-case.max_length // BLOCK_SIZE)
    keys = jax.random.split(jax.random.key(1), 3)
    pool = (1, case.num_requests * num_blocks, case.num_kv_heads, BLOCK_SIZE)
    key_pool, key_scales = _draw_pool(keys[0], (*pool, case.head_dim), case)
    value_pool, value_scales = None, None
    if case.value_dim is None:
        value_pool, value_scales = _draw_pool(keys[1], (*pool, case.head_dim), case)
    order = np.random.default_rng(0).permutation(case.num_requests * num_blocks)
    number = jnp.arange(case.num_requests, dtype=jnp.int32)
    rows = (case.num_requests, case.num_heads, case.head_dim)
    return Call(
        queries=jax.random.normal(keys[2], rows, jnp.bfloat16),
        pools=make_pools(
            key_pool,
            value_pool,
            key_scales,
            value_scales,
            has_layers=True,
            kv_dtype=case.kv_dtype,
            value_head_dim=case.value_dim,
        ),
        layer=jnp.int32(0),
        requests=Requests(
            jnp.asarray(order.reshape(case.num_requests, num_blocks), jnp.int32),
            number,
            number,
            jnp.ones_like(number),
            number,
        ),
        scale=jnp.float32(case.head_dim**-0.5),
        window=None,
        sinks=None,
        soft_cap=None,
        max_query_length=1,
    )


def _draw_pool(
    key: jax.Array, shape: tuple[int, ...], case: Case
) -> tuple[jax.Array, jax.Array | None]:
    return quantization.quantize(
        jax.random.normal(key, shape), jnp.dtype(case.kv_dtype)
    )
