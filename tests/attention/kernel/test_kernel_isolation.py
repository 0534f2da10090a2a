"""Non-finite values affect exactly the rows that attend to them.

A key, value, query or scale of one sequence is NaN or infinite. Rows of other
sequences, and rows of the same one that do not attend to it, are bit-identical; rows
that attend to it are non-finite where the reference is.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import formats
from support.attention.served_shapes import Shape, fit
from support.jax_versions import with_further
from support.tolerances import is_close

from jkv.attention import paged_attention
from jkv.attention.kernel.bodies import join, walk
from jkv.attention.kernel.tiles import table as tile_table
from jkv.attention.kernel.tiles.table import Techniques

pytestmark = pytest.mark.one_end

BLOCK, COLUMNS, KV_HEADS, GROUP, DIM = 8, 6, 2, 2, 16
# Rows and context of each request: a prefill chunk, two decode steps, a verification.
REQUESTS = [(9, 21), (1, 40), (1, 1), (4, 20)]
NUM_ROWS = 16  # the last one is padding
NUMBERS = {"nan": np.nan, "-nan": -np.nan, "inf": np.inf, "-inf": -np.inf}
# A request and one of its tokens: before its rows, within them, the newest, and a whole
# context.
PLACES = [(0, 3), (0, 15), (0, 20), (1, 2), (1, 39), (2, 0), (3, 18)]

quantize = jax.jit(formats.quantize, static_argnums=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Static arguments of a call."""

    storage: str = "float32"
    queries: str = "float32"
    is_latent: bool = False
    by_position: bool = False
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    dim: int = DIM

    @property
    def value_dim(self):
        return self.dim // 2 if self.is_latent else self.dim

    @functools.cached_property
    def arguments(self):
        """Return queries, pools, tables, lengths and scales by name, all finite."""
        rng = np.random.default_rng(5)
        kv_heads = 1 if self.is_latent else KV_HEADS
        counts = [-(-context // BLOCK) for _, context in REQUESTS]
        tables = np.full((len(REQUESTS), COLUMNS), 2**31 - 1, np.int32)
        free = iter(rng.permutation(sum(counts)).tolist())
        for row, count in enumerate(counts):
            tables[row, :count] = [next(free) for _ in range(count)]
        shape = 1, sum(counts), kv_heads, BLOCK, self.dim
        names = ["key"] if self.is_latent else ["key", "value"]
        stored = {
            name: quantize(
                rng.standard_normal(shape, np.float32), jnp.dtype(self.storage)
            )
            for name in names
        }
        queries = rng.standard_normal((NUM_ROWS, KV_HEADS * GROUP, self.dim))
        lengths, contexts = np.array(REQUESTS, np.int32).T
        return {
            "query": queries.astype(jnp.dtype(self.queries)),
            **{name: np.asarray(rows) for name, (rows, _) in stored.items()},
            **{
                f"{name} scale": np.asarray(scales)
                for name, (_, scales) in stored.items()
                if scales is not None
            },
            "cotangent": rng.standard_normal(
                (NUM_ROWS, KV_HEADS * GROUP, self.value_dim), np.float32
            ),
            "tables": tables,
            "lengths": np.array([np.cumsum(lengths) - lengths, lengths, contexts]),
        }

    def attend(self, implementation):
        """Return a compiled call for such arguments."""
        heads = KV_HEADS * GROUP
        sinks = np.linspace(-1, 1, heads, dtype=np.float32) if self.has_sinks else None

        @jax.jit
        def attend(a):
            ids = np.arange(len(REQUESTS), dtype=np.int32)
            output, lse = paged_attention(
                *(a["query"], a["key"], a.get("value"), 0, a["tables"], ids),
                *a["lengths"],
                key_scales=a.get("key scale"),
                value_scales=a.get("value scale"),
                kv_dtype=self.storage,
                value_head_dim=self.value_dim if self.is_latent else None,
                window=self.window,
                soft_cap=self.soft_cap,
                sinks=sinks,
                return_lse=True,
                implementation=implementation,
                by_position=self.by_position and implementation == "pallas",
            )
            return output, lse

        return attend

    def differentiate(self, implementation):
        """Return the compiled gradients of queries and pools, by name."""
        attend = self.attend(implementation)

        def loss(variables, a):
            output, _ = attend(a | variables)
            return jnp.sum(output.astype(jnp.float32) * a["cotangent"])

        @jax.jit
        def differentiate(a):
            names = [name for name in ("query", "key", "value") if name in a]
            return jax.grad(loss)({name: a[name] for name in names}, a)

        return differentiate

    def break_(self, what, request, token, number):
        """Return the arguments with one non-finite number of one token."""
        array = self.arguments[what].copy()
        first = REQUESTS[request][1] - REQUESTS[request][0]
        if what in ("query", "cotangent"):
            if token < first:
                return None
            row = self.arguments["lengths"][0][request] + token - first
            array[row, 0, 3] = number
        else:
            block = self.arguments["tables"][request, token // BLOCK]
            where = (0, block, 0, token % BLOCK)
            if "scale" in what:
                array.view(jnp.bfloat16)[where] = number
            elif array.dtype == np.uint16:
                array.view(jnp.bfloat16)[*where, 3] = number
            else:
                array[*where, 3] = number
        return self.arguments | {what: array}

    def sees(self, what, request, token):
        """Return the rows and heads that attend to it, bool[R, H]."""
        sees = np.zeros((NUM_ROWS, KV_HEADS * GROUP), bool)
        rows, context = REQUESTS[request]
        start = self.arguments["lengths"][0][request]
        position = context - rows + np.arange(rows)
        window = self.window or context
        mine = (position >= token) & (position - window < token)
        is_row = what in ("query", "cotangent")
        mine = position == token if is_row else mine
        heads = 1 if is_row else KV_HEADS * GROUP if self.is_latent else GROUP
        sees[start : start + rows, :heads] = mine[:, None]
        return sees

    def is_read(self, sees):
        """Return the slots and heads that these rows read, bool[1, N, K, T]."""
        read = np.zeros(self.arguments["key"].shape[:4], bool)
        starts, lengths, contexts = self.arguments["lengths"]
        for request, table in enumerate(self.arguments["tables"]):
            for row in range(lengths[request]):
                position = contexts[request] - lengths[request] + row
                first = max(0, position + 1 - self.window) if self.window else 0
                token = np.arange(first, position + 1)
                heads = sees[starts[request] + row].reshape(read.shape[2], -1).any(1)
                where = (0, table[token // BLOCK], slice(None), token % BLOCK)
                read[where] |= heads
        return read


WINDOW = {"window": 6, "soft_cap": 2.0, "has_sinks": True}
CASES = {
    "float32": Case(),
    "float16, window, soft cap, sinks": Case(
        storage="float16", queries="float16", **WINDOW
    ),
    "bfloat16": Case(storage="bfloat16", queries="bfloat16"),
    "int8": Case(storage="int8", queries="bfloat16"),
    "e4m3fn, window": Case(storage="float8_e4m3fn", window=6),
    "latent": Case(is_latent=True, dim=32),
    "latent, int8": Case(is_latent=True, dim=32, storage="int8"),
    "by position": Case(by_position=True),
    "by position, window": Case(by_position=True, storage="int8", **WINDOW),
    "by position, latent": Case(by_position=True, is_latent=True, dim=32),
}
GRADIENTS = {
    name: CASES[name]
    for name in ("float32", "float16, window, soft cap, sinks", "latent")
}


def fitted(this, is_derived=False):
    """Return the case in the nearest shape that the current GPU serves."""
    dtypes = this.queries, this.storage, this.storage
    found = fit(Shape(this.dim, this.value_dim, *dtypes, is_derived))
    return dataclasses.replace(
        this, dim=found.head_dim, queries=found.queries, storage=found.keys
    )


CASES = {name: fitted(this) for name, this in CASES.items()}
GRADIENTS = {name: fitted(this, True) for name, this in GRADIENTS.items()}


def check(this):
    """Test all places, arrays and numbers."""
    attend, reference = this.attend("pallas"), this.attend("reference")
    whole = jax.device_get(attend(this.arguments))
    assert all(
        np.isfinite(each[: NUM_ROWS - 1].astype(np.float32)).all() for each in whole
    )
    names = ["query", *(n for n in this.arguments if "scale" in n)]
    if not any("scale" in name for name in names):
        names += ["value"] if "value" in this.arguments else []
        names += ["key"]
    played = 0
    for what in names:
        for request, token in PLACES:
            for name, number in NUMBERS.items():
                arguments = this.break_(what, request, token, number)
                if arguments is None:
                    continue
                found = jax.device_get(attend(arguments))
                expected = jax.device_get(reference(arguments))
                sees, where = this.sees(what, request, token), (what, token, name)
                for one, other, before in zip(found, expected, whole, strict=True):
                    np.testing.assert_array_equal(
                        one[~sees], before[~sees], err_msg=str(where)
                    )
                    # Non-finite where the reference is; elsewhere right, or non-finite,
                    # too.
                    broken = ~np.isfinite(other[sees].astype(np.float32))
                    right = np.isfinite(one[sees].astype(np.float32))
                    assert not right[broken].any(), where
                    assert is_close(one[sees][right], other[sees][right]), where
                    played += broken.any()
    assert played > 30


# Covered by other cases in other combinations.
FURTHER = "bfloat16", "int8", "latent", "by position", "by position, latent"


@pytest.mark.parametrize("name", with_further(CASES, *FURTHER))
def test_non_finite_values_affect_only_rows_that_attend_to_them(name):
    check(CASES[name])


OF_CDNA = (
    Techniques.FULL_FIRST
    | Techniques.CARRIED
    | Techniques.EXP2_IN_PAIRS
    | Techniques.ROUNDED_BY_BITS
)


@pytest.mark.further
@pytest.mark.interpreted(reason="it changes the interpreter's tiles and maxima")
def test_isolation_with_cdna_techniques(monkeypatch):
    """Weights of two tokens at a time, and maxima that ignore NaN."""
    tile = dataclasses.replace(
        tile_table.INTERPRETED.prefill,
        ways=OF_CDNA,
    )
    tuning = dataclasses.replace(tile_table.INTERPRETED, prefill=tile)
    monkeypatch.setattr(tile_table, "INTERPRETED", tuning)
    # Triton's differ from XLA's on any GPU.
    as_triton = types.SimpleNamespace(**vars(jnp))
    as_triton.maximum, as_triton.max = jnp.fmax, jnp.nanmax
    for module in (walk, join):
        monkeypatch.setattr(module, "jnp", as_triton)
    # A shape of this test only, as traces are cached.
    check(Case(storage="bfloat16", queries="bfloat16", dim=48))


@pytest.mark.further
@pytest.mark.parametrize("name", with_further(GRADIENTS, "float32", "latent"))
def test_gradients_are_non_finite_only_where_expected(name):
    """Gradients of tokens are, too, if a non-finite row attends to them."""
    this = GRADIENTS[name]
    differentiate, reference = map(this.differentiate, ("pallas", "reference"))
    whole = jax.device_get(differentiate(this.arguments))
    played = 0
    for what in ("cotangent", "query", "key", *(["value"] if "value" in whole else [])):
        for request, token in PLACES:
            for number in NUMBERS.values():
                arguments = this.break_(what, request, token, number)
                if arguments is None:
                    continue
                found = jax.device_get(differentiate(arguments))
                expected = jax.device_get(reference(arguments))
                sees = this.sees(what, request, token)
                for name, one in found.items():
                    touched = sees if name == "query" else this.is_read(sees)
                    where = what, token, number, name
                    np.testing.assert_array_equal(
                        one[~touched], whole[name][~touched], err_msg=str(where)
                    )
                    other = expected[name].astype(np.float32)[touched]
                    mine = one[touched]
                    right = np.isfinite(mine.astype(np.float32))
                    assert not right[~np.isfinite(other)].any(), where
                    assert is_close(mine[right], other[right]), where
                    played += (~right).any()
    assert played > 30
