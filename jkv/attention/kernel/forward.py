"""Attention by the kernel: decode rows piece by piece, then rows of several at once.

Three launches: partial results of all pieces of the requests of one row
(`kernel_work.py`), their joining, which also clears all other rows, and the tiles of
the requests of several rows, which fill theirs in. A launch without work ends at once;
where no request can have several rows there is no third one.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jkv.attention.call import Constants, Requests
from jkv.attention.kernel.body import Operands, Plan, attend_pieces, attend_rows
from jkv.attention.kernel.join import join_pieces
from jkv.attention.kernel.tuning import Tuning, find_operand_dtype, find_weight_dtype
from jkv.attention.kernel.work import (
    list_decode_work,
    list_prefill_work,
    num_decode_entries,
    num_prefill_entries,
)
from jkv.attention.pools import Pools


def attend_kernel(
    queries: jax.Array,  # [R, H, D], not scaled
    pools: Pools,
    layer: jax.Array,  # i32[]
    requests: Requests,
    *,
    scale: jax.Array,  # f32[]
    window: jax.Array | None,  # i32[]
    constants: Constants,
    sinks: jax.Array | None,  # f32[H]
    tuning: Tuning,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the queries' dtype and the log-sum-exp, f32[R, H]."""
    num_rows, num_heads, _ = queries.shape
    num_requests, max_blocks = requests.seq_ids.shape[0], requests.block_tables.shape[1]
    group = num_heads // pools.num_kv_heads
    operands = functools.partial(
        Operands,
        layer=jnp.clip(layer, 0, pools.keys.shape[0] - 1)[None],
        scale=scale[None],
        window=None if window is None else window[None],
        block_tables=requests.block_tables,
        queries=queries,
        keys=pools.keys,
        values=pools.values,
        key_scales=pools.key_scales,
        value_scales=pools.value_scales,
    )
    make_plan = functools.partial(
        Plan,
        value_dim=pools.value_dim,
        operand_dtype=find_operand_dtype(queries, pools),
        weight_dtype=find_weight_dtype(queries, pools),
        kv_dtype=pools.kv_dtype,
        soft_cap=constants.soft_cap,
        interpret=interpret,
    )

    # Heads that do not exist fill the least number of rows that can be multiplied.
    padded_group = 1 << (group - 1).bit_length()
    row_heads = max(16, min(padded_group, tuning.decode.rows))
    plan = make_plan(
        is_decode=True, tile=tuning.decode, row_heads=row_heads, row_tokens=1
    )
    head_tiles = pools.num_kv_heads * math.ceil(group / plan.row_heads)
    num_entries = num_decode_entries(
        num_rows,
        num_requests,
        max_blocks * pools.block_size,
        math.ceil(tuning.programs / head_tiles),
    )
    work, pieces = list_decode_work(
        requests, window, num_rows=num_rows, num_entries=num_entries
    )
    partial, partial_lse = attend_pieces(operands(work=work, sinks=None), plan)
    output, lse = join_pieces(
        pieces, sinks, partial, partial_lse, queries.dtype, interpret=interpret
    )
    if num_rows < 2 or constants.is_decoding:
        return output, lse

    row_heads = min(padded_group, tuning.prefill.rows)
    plan = make_plan(
        is_decode=False,
        tile=tuning.prefill,
        row_heads=row_heads,
        row_tokens=tuning.prefill.rows // row_heads,
    )
    num_entries = num_prefill_entries(num_rows, num_requests, plan.row_tokens)
    work = list_prefill_work(
        requests, window, tile_rows=plan.row_tokens, num_entries=num_entries
    )
    return attend_rows(operands(work=work, sinks=sinks), output, lse, plan)
