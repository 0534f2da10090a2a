"""Validation of the arguments of `paged_attention`."""

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import expect
from jkv.formats.format import Format, Numbers
from jkv.formats.table import ENCODED_DTYPES, FORMATS
from jkv.signatures import Integer


def require_value_dim(
    value_dim: int | None,  # of the value pool; None without one
    head_dim: int,  # of the keys
    given: int | None,  # argument value_head_dim, required without a value pool
) -> int:
    """Return the value head dim after checking value_head_dim against the pools."""
    if value_dim is None:
        if given is None or not 0 < given <= head_dim:
            raise ValueError(
                f"value_head_dim must be 1 to {head_dim}, the head dim of the keys, "
                f"with value_pool=None, got {given}"
            )
        return given
    if given not in (None, value_dim):
        raise ValueError(
            f"value_head_dim must equal the head dim of value_pool, {value_dim}, got "
            f"{given}; omit it, as only value_pool=None needs it"
        )
    return value_dim


def require_format(
    name: str,
    pool: jax.Array,
    scales: jax.Array | None,
    kv_dtype: jax.typing.DTypeLike | None,
) -> Format:
    """Return the format of the "key" or "value" pool.

    Checks the pool's dtype against kv_dtype, and the scales against the format: one for
    each token, and only for quantized formats.
    """
    try:
        given = None if kv_dtype is None else jnp.dtype(kv_dtype)
    except TypeError:
        raise ValueError(
            f"kv_dtype must be a dtype or None, got {kv_dtype!r}"
        ) from None
    dtype = pool.dtype
    if meanings := ENCODED_DTYPES.get(dtype):
        if given not in meanings:
            names = " or ".join(str(dtype) for dtype in meanings)
            raise ValueError(
                f"{name}_pool holds raw {dtype} bits: pass kv_dtype={names}, "
                f"got {given}"
            )
        dtype = given
    elif dtype != jnp.int8 and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{name}_pool must be floating point or int8, uint16 with "
            f"kv_dtype=bfloat16, or uint8 with kv_dtype int4 or an fp8 one, got {dtype}"
        )
    elif given is not None and dtype != given:
        raise ValueError(
            f"kv_dtype must match {name}_pool, {dtype}, got {given}; omit it, as only "
            "pools of raw bits need it"
        )
    if scales is None:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{name}_scales must be given for {name}_pool of {dtype}, got None"
            )
        return Numbers(dtype)
    kept = FORMATS.get(dtype, Numbers(dtype))
    if not kept.is_quantized:
        raise ValueError(
            f"{name}_scales must be None unless {name}_pool is int8, fp8 or int4, got "
            f"{pool.dtype}; omit them"
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
    """Check queries and sinks against valid pools."""
    why = "D that of key_pool"
    sizes = expect("queries", queries, "R H D", {"D": key_dim}, jnp.floating, why=why)
    value_shape = () if value_pool is None else value_pool.shape
    if 0 in (*queries.shape[1:], *key_pool.shape, *value_shape):
        raise ValueError(
            "queries and pools must have no axis of size 0, got queries "
            f"{queries.shape}, pools {key_pool.shape}, {value_shape}"
        )
    num_heads, num_kv_heads = sizes["H"], key_pool.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"queries must have a multiple of {num_kv_heads} heads, the kv heads of "
            f"key_pool, got {num_heads}"
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
    """Check layer, scale, soft_cap, max_query_length and window."""
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
    """Check the type of the window, and its value unless traced."""
    if window is None:
        return
    kind = getattr(window, "dtype", None)
    is_integer = isinstance(window, int) and not isinstance(window, bool)
    if kind is not None:
        is_integer = jnp.issubdtype(kind, jnp.integer)
    if not is_integer or np.ndim(window):
        raise ValueError(
            f"window must be an int or i32[], a number of tokens, got {window!r}"
        )
    if not isinstance(window, jax.Array) and not 1 <= window < 2**31:
        raise ValueError(
            f"window must be in 1..2^31-1, as it includes the row's own token, got "
            f"{window}; pass None for full attention"
        )


def require_part(
    block_part: tuple[Integer, int] | None, sinks: jax.Array | None
) -> tuple[jax.Array | None, int]:
    """Return the part held here as i32[], None for whole blocks, and the parts."""
    if block_part is None:
        return None, 1
    part, num_parts = block_part
    if not isinstance(num_parts, int) or num_parts < 1:
        raise ValueError(
            f"block_part must be (i, n) with a static int n >= 1, got n={num_parts!r}"
        )
    if isinstance(part, int) and not 0 <= part < num_parts:
        raise ValueError(
            f"block_part must be (i, n) with 0 <= i < n, got ({part}, {num_parts})"
        )
    if sinks is not None:
        raise ValueError(
            "sinks must be None with block_part, as a sink counts once per sequence; "
            "add them where the parts are joined"
        )
    return jnp.asarray(part, jnp.int32), num_parts


def require_requests(
    block_tables: jax.Array,
    seq_ids: jax.Array | None,
    query_starts: jax.Array,
    query_lengths: jax.Array,
    context_lengths: jax.Array,
) -> None:
    """Check the arrays of requests against each other."""
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
        raise ValueError(
            f"block_tables must have no axis of size 0, got {block_tables.shape}"
        )
    if seq_ids is None and sizes["B"] > sizes["S"]:
        raise ValueError(
            f"seq_ids=None is arange({sizes['B']}), but block_tables has "
            f"{sizes['S']} rows; pass seq_ids or more rows"
        )
