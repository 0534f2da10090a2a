"""Attention by the kernel whose bits depend on a row's position alone.

For the same promise as `jkv.attention.xla.by_position`, by other sums: the bits are not
that path's. All rows go one way, those of prompts and single ones: in tiles of one
shape, each of rows of one request. A program takes one of these tiles to one piece of
its context. Pieces begin at multiples of a number of tokens that follows from the
longest context there may be, and are walked from their beginning in steps that begin at
fixed positions too; what a row sees nothing of leaves its sums as they are, to the bit.
Each row has places of its own for the partial results of its pieces, which the joining
kernel takes from the first to the last. How many programs that makes is static: those
for which a context is too short end at once.
"""

import functools

import jax

from jkv.attention.call import Call, check_call
from jkv.attention.kernel import backend
from jkv.attention.kernel.launches import attend_pieces
from jkv.attention.kernel.lists import lists_of
from jkv.attention.kernel.table import Tuning
from jkv.attention.kernel.variant import cut_rows, position_variant
from jkv.attention.kernel.work import list_position_work, size_position_work


def attend_kernel_by_position(
    call: Call, *, tuning: Tuning, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the output's dtype and the log-sum-exp, f32[R, H]."""
    check_call(call)
    launch = functools.partial(_launch_both, tuning=tuning, interpret=interpret)
    return backend.defer(launch, (call,), call.results, interpret=interpret)


def _launch_both(
    call: Call, *, tuning: Tuning, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    sizes = size_position_work(
        call.num_rows,
        call.num_requests,
        call.max_blocks * call.pools.block_size,
        cut_rows(call.heads_per_kv, tuning.position_tile(None))[1],
        piece_tokens=tuning.piece_tokens,
        max_pieces=tuning.max_pieces,
    )
    listed = lists_of(call).find_by_position(sizes)
    if listed is None:
        listed = list_position_work(
            call.requests,
            sizes,
            num_parts=call.num_parts,
            part_size=call.pools.block_size,
        )
    variant = position_variant(
        call, tuning, sizes.piece_tokens, sizes.num_pieces, interpret=interpret
    )
    # Each row has places of its own for its pieces.
    num_places = call.num_rows * variant.num_pieces
    return attend_pieces("jkv_position", call, listed, variant, num_places)
