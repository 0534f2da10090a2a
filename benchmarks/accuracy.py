"""What storing keys and values in fewer bits costs: attention error and perplexity.

    python benchmarks/accuracy.py [--windows N] [--json FILE]

Two tables by the cache's dtype. The first is the error of decode attention over 1,000
tokens against float32, for two kinds of keys: standard normal, and with one channel in
sixteen ten times as large, as models with rotary positions have. The second is the
perplexity of the bundled model on documents it was not trained on, at positions from
1,000 on: all it reads of a token's past comes out of the cache. Weights and arithmetic
are float32 throughout, so the cache alone makes the difference.
"""

import argparse
import functools
import math
import pathlib
import sys
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.formats.bits import STORED_AS

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import corpus  # noqa: E402
import pretrained  # noqa: E402
import pydoc_model  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results" / "accuracy.json"
DTYPES = [dtype.name for dtype in STORED_AS]  # float32 comes first
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, CONTEXT = 32, 8, 128, 1000
FIRST_POSITION = 1000
LARGE_EVERY, LARGE = 16, 10.0  # channels, and their size by that of the others


def attended(
    dtype: str, keys: jax.Array, values: jax.Array, queries: jax.Array
) -> np.ndarray:
    """Return what the last of the tokens, f32[T, K, D], attends to in such a cache."""
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
    """Return the root mean square error of the output over that of the output."""
    rows: list[dict[str, Any]] = [{"cache": dtype} for dtype in DTYPES[1:]]
    for kind in ("normal", "large channels"):
        errors = []  # of each seed, of each dtype
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


def held_out_windows(most: int | None) -> list[np.ndarray]:
    """Return windows of held-out documents, tokens i32[T + 1], T above 1,000."""
    tokenizer = pretrained.load_tokenizer(pydoc_model.FOLDER)
    documents = pydoc_model.encode(tokenizer, corpus.split()[1])
    length = pydoc_model.CONFIG["max_position_embeddings"]
    windows = []
    for document in documents:
        for start in range(0, len(document) - 1, length):
            window = document[start : start + length + 1]
            if len(window) > FIRST_POSITION + 1:
                windows.append(window)
    return windows[:most]


def token_losses(model: Any, config: jkv.CacheConfig) -> Any:
    """Return a jitted function from parameters and a padded window to its losses."""

    def losses(params: Any, window: jax.Array, length: jax.Array) -> jax.Array:
        cache, opened = jkv.allocate(jkv.init(config), 0)
        num_rows = window.shape[0] - 1
        cache, batch = jkv.append(
            cache, opened.seq_ids, length[None], capacity=num_rows
        )
        logits, _ = model(params, window[:-1], cache, batch, all_rows=True)
        logs = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(logs, window[1:, None], axis=1)[:, 0]

    return jax.jit(losses)


def perplexities(windows: list[np.ndarray]) -> list[dict[str, Any]]:
    """Return the perplexity at positions from 1,000 on, by the cache's dtype."""
    model, params = pretrained.load(pydoc_model.FOLDER, jnp.float32)
    length = pydoc_model.CONFIG["max_position_embeddings"]
    sums = {}
    for dtype in DTYPES:
        config = jkv.CacheConfig.for_context_length(
            length, max_sequences=1, dtype=dtype, **model.cache_fields
        )
        measure = functools.partial(token_losses(model, config), params)
        total, count = 0.0, 0
        for window in windows:
            num = len(window) - 1
            padded = jnp.asarray(np.pad(window, (0, length - num)))
            taken = np.asarray(measure(padded, jnp.int32(num)), np.float64)
            total += taken[FIRST_POSITION:num].sum()
            count += num - FIRST_POSITION
        sums[dtype] = (total / count, count, config.bytes_per_token)
        print(f"  measured {dtype}", flush=True)
    baseline = sums["bfloat16"][0]
    return [
        {
            "cache": dtype,
            "bytes per token": num_bytes,
            "tokens": count,
            "perplexity": math.exp(mean),
            "to bfloat16": math.exp(mean - baseline) - 1,
        }
        for dtype, (mean, count, num_bytes) in sums.items()
    ]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, help="measure no more; nothing is saved")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    where = harness.machine()
    print(harness.header("Accuracy by the cache's dtype", where), flush=True)
    attention = attention_errors()
    print("\n" + harness.table(attention, {key: key for key in attention[0]}))
    windows = held_out_windows(options.windows)
    print(f"\n{len(windows)} windows of held-out text", flush=True)
    model = perplexities(windows)
    print("\n" + harness.table(model, {key: key for key in model[0]}))
    if options.windows is None:
        run = {"benchmark": "accuracy", "machine": where}
        harness.save(options.json, run | {"attention": attention, "model": model})
        print(f"\nsaved in {options.json}")


if __name__ == "__main__":
    main()
