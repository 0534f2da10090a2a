"""Accuracy of quantized KV caches: attention error and perplexity.

    python benchmarks/accuracy.py [--tokens N] [--json FILE]

Two tables by cache dtype. The first is the error of decode attention over 1,000 tokens
relative to float32, for standard normal keys and for keys with one channel in sixteen
ten times as large, as in models with rotary positions. The second is the perplexity of
two published models (`tools/models.py`) on Python's documentation in sequences of 2,048
tokens, with keys, values or both quantized. Weights and arithmetic are float32, so that
only the cache differs.
"""

import argparse
import pathlib
import sys
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.formats.format import STORED_AS

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import pretrained  # noqa: E402
from bundled import corpus  # noqa: E402

sys.path.insert(0, str(ROOT / "tools"))

import models  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results" / "accuracy.json"
DTYPES = [*(dtype.name for dtype in STORED_AS), "int4"]  # float32 comes first
LESS = ("bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "int4")
FORMATS = [
    *LESS,
    *((dtype, "float32") for dtype in LESS),  # keys only
    *(("float32", dtype) for dtype in LESS),  # values only
    *(("int8", "int4"), ("float8_e4m3fn", "int4"), ("bfloat16", "int4")),
]
TOKENS = {"smollm2": 8192, "gemma3": 4096}
TEXT_LENGTH = 2048
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, CONTEXT = 32, 8, 128, 1000
LARGE_EVERY, LARGE = 16, 10.0  # every 16th channel is this much larger


def attended(
    dtype: str, keys: jax.Array, values: jax.Array, queries: jax.Array
) -> np.ndarray:
    """Return the last token's attention output over f32[T, K, D], cached in `dtype`."""
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        num_blocks=64,
        max_sequences=1,
        max_context_length=1024,
        dtype=dtype,
    )
    cache, opened = jkv.allocate(jkv.init(config), 0)
    past = len(keys) - 1
    cache, batch = jkv.append(cache, opened.seq_ids, past, capacity=past)
    cache = jkv.write(cache, 0, batch, keys[:-1], values[:-1])
    cache, batch = jkv.append(cache, opened.seq_ids)
    cache = jkv.write(cache, 0, batch, keys[-1:], values[-1:])
    return np.asarray(jkv.attend(cache, 0, batch, queries))


def attention_errors(num_seeds: int = 8) -> list[dict[str, Any]]:
    """Return the relative root mean square error of the output."""
    rows: list[dict[str, Any]] = [{"cache": dtype} for dtype in DTYPES[1:]]
    for kind in ("normal", "large channels"):
        errors = []  # one entry per seed, each by dtype
        for seed in range(num_seeds):
            rng = np.random.default_rng(seed)
            shape = (CONTEXT, NUM_KV_HEADS, HEAD_DIM)
            keys, values = rng.standard_normal((2, *shape))
            if kind == "large channels":
                keys[..., ::LARGE_EVERY] *= LARGE
            queries = rng.standard_normal((1, NUM_HEADS, HEAD_DIM)) / keys.std()
            arrays = [jnp.float32(array) for array in (keys, values, queries)]
            exact, *found = (attended(dtype, *arrays) for dtype in DTYPES)
            off = np.mean((np.stack(found) - exact) ** 2, axis=(1, 2, 3))
            errors.append(np.sqrt(off / np.mean(exact**2)))
        for row, error in zip(rows, np.median(errors, axis=0), strict=True):
            row[f"error, {kind}"] = float(error)
    return rows


def held_out_text() -> str:
    """Return documents of the Python installation, in a fixed order."""
    return "\n\n".join(document.text for document in corpus.split()[1])


def published(name: str, num_tokens: int) -> list[dict[str, Any]]:
    """Return a published model's perplexity and bytes per token, by cache format."""
    path = models.fetch(name)
    model, params = pretrained.load(path, jnp.float32)
    text = held_out_text()[: 8 * num_tokens]
    tokens = pretrained.load_tokenizer(path).encode(text).ids[:num_tokens]
    config = model.cache_config(TEXT_LENGTH, max_sequences=64, dtype=jnp.bfloat16)
    found = jkv.measure_formats(model, params, tokens, config, formats=FORMATS)
    by_name = {each.name: each for each in found}
    tokens_of_bfloat16 = by_name["bfloat16"].num_tokens
    return [
        {
            "model": name,
            "tokens": len(tokens),
            "cache": each.name,
            "perplexity": each.perplexity,
            "by float32": each.ratio,
            "same token": each.equal_tokens,
            "bytes per token": each.bytes_per_token,
            "tokens by bfloat16": each.num_tokens / tokens_of_bfloat16,
        }
        for each in found
    ]


def main() -> None:
    """Run the benchmark: measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, help="read no more; nothing is saved")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    where = harness.machine()
    print(harness.header("Accuracy by the cache's format", where), flush=True)
    attention = attention_errors()
    print("\n" + harness.table(attention, {key: key for key in attention[0]}))
    rows = []
    for name, most in TOKENS.items():
        rows += published(name, options.tokens or most)
        print("\n" + harness.table(rows, {key: key for key in rows[0]}), flush=True)
    if options.tokens is None:
        run = {"benchmark": "accuracy", "machine": where}
        harness.save(options.json, run | {"attention": attention, "models": rows})
        print(f"\nsaved in {options.json}")


if __name__ == "__main__":
    main()
