"""What a call of `paged_attention` must look like; mistakes are explained."""

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import expect
from jkv.formats.format import Format, Numbers
from jkv.formats.table import FORMATS, MEANINGS
from jkv.signatures import Integer


def require_value_dim(
    value_dim: int | None,  # of the value pool; None where values lie in the keys
    head_dim: int,  # of the keys
    asked: int | None,  # with a value pool None, or the same
) -> int:
    """Return the value head dim; check what was asked against the pools."""
    if value_dim is None:
        if asked is None or not 0 < asked <= head_dim:
            raise ValueError(
                "with value_pool=None the values are the first value_head_dim elements "
                f"of the keys: pass 1 to {head_dim}, got {asked}"
            )
        return asked
    if asked not in (None, value_dim):
        raise ValueError(
            f"value_pool has head dim {value_dim}, value_head_dim is {asked}; it is "
            f"for value_pool=None, leave it out"
        )
    return value_dim


def require_format(
    name: str,
    pool: jax.Array,
    scales: jax.Array | None,
    kv_dtype: jax.typing.DTypeLike | None,
) -> Format:
    """Return how "key" or "value" rows are stored, by what an array holds.

    Check that it holds numbers, or bits that have a meaning, and that scales stand
    beside those that have them, one for each token.
    """
    try:
        asked = None if kv_dtype is None else jnp.dtype(kv_dtype)
    except TypeError:
        raise ValueError(
            f"kv_dtype must be a dtype or None, got {kv_dtype!r}"
        ) from None
    dtype = pool.dtype
    if meanings := MEANINGS.get(dtype):
        if asked not in meanings:
            names = " or ".join(str(dtype) for dtype in meanings)
            raise ValueError(
                f"{name}_pool holds raw {dtype} bits: pass kv_dtype={names}, "
                f"got {asked}"
            )
        dtype = asked
    elif dtype != jnp.int8 and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{name}_pool must be floating point or int8, uint16 with "
            f"kv_dtype=bfloat16, or uint8 with kv_dtype int4 or an fp8 one, got {dtype}"
        )
    elif asked is not None and dtype != asked:
        raise ValueError(
            f"{name}_pool holds {dtype} but kv_dtype is {asked}; "
            "kv_dtype is for pools of raw bits, leave it out"
        )
    if scales is None:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{name}_pool holds {dtype}: pass {name}_scales")
        return Numbers(dtype)
    kept = FORMATS.get(dtype, Numbers(dtype))
    if not kept.is_quantized:
        raise ValueError(
            f"{name}_scales are for pools of int8, fp8 or int4, {name}_pool holds "
            f"{pool.dtype}; leave them out"
        )
    sizes = dict(zip("LNKT", pool.shape[:4], strict=True))
    of_row = kept.arrays(kept.width_of(pool.shape[4]))["scales"].shape
    axes = "L N K T" + (" S" if of_row else "")
    sizes |= dict(zip("S", of_row, strict=False))
    expect(
        f"{name}_scales", scales, axes, sizes, why="numbers for each row of the pool"
    )
    if scales.dtype != jnp.uint16 and not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(
            f"{name}_scales must be floating point, or uint16 as the bits of "
            f"bfloat16, got {scales.dtype}"
        )
    return kept


def require_queries(
    queries: jax.Array,
    key_pool: jax.Array,
    value_pool: jax.Array | None,
    sinks: jax.Array | None,
    *,
    key_dim: int,
) -> None:
    """Check queries and sinks against pools that are as they should be."""
    why = "D that of key_pool"
    sizes = expect("queries", queries, "R H D", {"D": key_dim}, jnp.floating, why=why)
    value_shape = () if value_pool is None else value_pool.shape
    if 0 in (*queries.shape[1:], *key_pool.shape, *value_shape):
        raise ValueError(
            "no axis of the pools, no number of heads and no head dim may be 0, got "
            f"queries {queries.shape}, pools {key_pool.shape}, {value_shape}"
        )
    num_heads, num_kv_heads = sizes["H"], key_pool.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads do not divide over {num_kv_heads} kv heads; "
            "give a multiple of the kv heads"
        )
    if sinks is not None:
        expect("sinks", sinks, "H", sizes, why="a logit for each query head")


def require_options(
    layer: Integer,
    window: Integer | None,
    scale: jax.typing.ArrayLike | None,
    soft_cap: float | None,
    max_query_length: int | None,
) -> None:
    """Check the options whose values are known."""
    if scale is not None and (jnp.ndim(scale) or jnp.iscomplexobj(scale)):
        raise ValueError(f"scale must be one number or f32[], got {scale!r}")
    if np.ndim(layer) or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise ValueError(f"layer must be an int or i32[], got {layer!r}")
    if isinstance(layer, int) and not 0 <= layer < 2**31:
        raise ValueError(f"layer must be in 0..L-1, got {layer}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be above 0 or None, got {soft_cap}")
    if max_query_length is not None and not (
        isinstance(max_query_length, int) and 1 <= max_query_length < 2**31
    ):
        raise ValueError(
            f"max_query_length must be a static int of at least 1 or None, got "
            f"{max_query_length!r}"
        )
    require_window(window)


def require_window(window: Integer | None) -> None:
    """Check the window, its value as far as it is known."""
    if window is None:
        return
    kind = getattr(window, "dtype", None)
    is_integer = isinstance(window, int) and not isinstance(window, bool)
    if kind is not None:
        is_integer = jnp.issubdtype(kind, jnp.integer)
    if not is_integer or np.ndim(window):
        raise ValueError(
            f"window is a number of tokens, an int or i32[], got {window!r}"
        )
    if not isinstance(window, jax.Array) and not 1 <= window < 2**31:
        raise ValueError(
            f"window counts the token itself, so it is 1 or more (below 2^31), got "
            f"{window}; pass None for no window"
        )


def require_part(
    block_part: tuple[Integer, int] | None, sinks: jax.Array | None
) -> tuple[jax.Array | None, int]:
    """Check which part of each block there is; return it, and how many there are."""
    if block_part is None:
        return None, 1
    part, num_parts = block_part
    if not isinstance(num_parts, int) or num_parts < 1:
        raise ValueError(
            f"block_part is (i, n) with a static int n of at least 1, got {num_parts!r}"
        )
    if isinstance(part, int) and not 0 <= part < num_parts:
        raise ValueError(
            f"block_part is (i, n) with i from 0 to n - 1, got {part} of {num_parts}"
        )
    if sinks is not None:
        raise ValueError(
            "a sink counts once, not in each part of a sequence: leave sinks out with "
            "block_part, and add them where the parts are joined"
        )
    return jnp.asarray(part, jnp.int32), num_parts


def require_requests(
    block_tables: jax.Array,
    seq_ids: jax.Array | None,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    context_lengths: jax.Array,
) -> None:
    """Check the arrays of requests."""
    sizes = expect("block_tables", block_tables, "S M", kind=jnp.integer)
    sizes = expect("query_starts", query_starts, "B", sizes, jnp.integer)
    named = {
        "seq_ids": seq_ids,
        "query_lengths": query_lengths,
        "context_lengths": context_lengths,
    }
    for name, array in named.items():
        if array is not None:
            why = "one for each request, as query_starts"
            expect(name, array, "B", sizes, jnp.integer, why=why)
    if 0 in block_tables.shape:
        raise ValueError(f"block_tables may not be empty, got {block_tables.shape}")
    if seq_ids is None and sizes["B"] > sizes["S"]:
        raise ValueError(
            f"seq_ids=None stands for arange({sizes['B']}), but block_tables has "
            f"{sizes['S']} rows; pass seq_ids or more rows"
        )
