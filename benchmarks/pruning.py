"""Pruning: perplexity by budget, and the cost of a call compared with recomputation.

    python benchmarks/pruning.py [--tokens N] [--layers N] [--kvpress PYTHON]
        [--json FILE]

The first table is the perplexity of a document's next tokens, after its first 1,024
tokens were pruned to a budget by rules of `jkv.press`, in two published models
(`tools/models.py`) with float32 weights; with `--kvpress` also kvpress's at half the
tokens (`contenders/on_kvpress.py`). The second times one donated call that prunes 16
sequences from 4,096 to 3,072 tokens, by kind of selection; pools have `--layers`
layers.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

import accuracy
import harness
import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv import press

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))

import models  # noqa: E402
import pretrained  # noqa: E402
from pretrained.rope import Rope, frequencies  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results" / "pruning.json"
PROMPT, NUM_NEXT, BUDGETS = 1024, 256, (1.0, 0.75, 0.5, 0.25)
CHILD = pathlib.Path(__file__).parent / "contenders" / "on_kvpress.py"
NUM_SEQUENCES, BEFORE, AFTER, NUM_HEADS, HEAD_DIM = 16, 4096, 3072, 3, 64


def make_rules(rope: Rope) -> dict[str, press.Press]:
    """Return rules by name; the rotary embedding rotates halves of a row."""
    angles = jnp.asarray(frequencies(rope))[None]

    def rotate(rows: jax.Array, positions: jax.Array) -> jax.Array:
        turned = positions[:, None].astype(jnp.float32) * angles
        cos, sin = jnp.cos(turned), jnp.sin(turned)
        a, b = jnp.split(rows, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return {
        "streaming_llm": press.streaming_llm(4),
        "knorm": press.knorm(),
        "key_diff": press.key_diff(),
        "snap_kv": press.snap_kv(64, 5),
        "expected_attention": press.expected_attention(512, 4, rotate=rotate),
    }


def ask_kvpress(
    python: str, path: pathlib.Path, tokens: np.ndarray
) -> dict[str, float]:
    """Return kvpress's perplexity at half the tokens, by rule."""
    given = {"path": str(path), "tokens": tokens.tolist(), "prompt": PROMPT}
    done = subprocess.run(
        [python, str(CHILD)],
        input=json.dumps(given),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def perplexities(name: str, num_next: int, kvpress: str | None) -> list[dict[str, Any]]:
    """Return the perplexity of a document's next tokens, by rule and budget."""
    path = models.fetch(name)
    model, params = pretrained.load(path, jnp.float32, loop_layers=True)
    text = accuracy.held_out_text()[: 8 * (PROMPT + num_next)]
    tokens = pretrained.load_tokenizer(path).encode(text).ids[: PROMPT + num_next]
    tokens = np.asarray(tokens, np.int32)
    config = model.cache_config(
        PROMPT + num_next,
        max_sequences=1,
        step_tokens=max(256, num_next),
        dtype="float32",
        pruning=True,
        observed_queries=PROMPT,
    )
    windows = model.config.windows
    full = next(i for i, window in enumerate(windows) if window is None)
    rules = make_rules(model.config.ropes[full])
    theirs = {} if kvpress is None else ask_kvpress(kvpress, path, tokens)

    @jax.jit
    def compute(params, cache, tokens):
        size = tokens.shape[0]
        cache, batch = jkv.append(cache, [0], [size], capacity=size)
        return model(params, tokens, cache, batch, all_rows=True)

    cache, _ = jkv.allocate(jkv.init(config), [0])
    groups = cache.metadata.groups
    # Layers with a sliding window are not pruned.
    (group,) = (n for n, each in enumerate(groups) if each.window.length is None)

    @jax.jit
    def choose(cache, layer):
        layer = jkv.GroupLayer(group, layer)
        keys, values, length = jkv.read(cache, layer, 0)
        queries = jkv.read_queries(cache, layer, 0).queries
        found = [
            rule.scores(keys[None], values[None], queries, length[None])
            for rule in rules.values()
        ]
        return jnp.stack(found)

    for start in range(0, PROMPT, 256):
        logits, cache = compute(params, cache, tokens[start : start + 256])
    first = logits[-1:]
    scores = [choose(cache, layer) for layer in range(len(cache.layers_of(group)))]
    scores = jnp.stack(scores, axis=1)[:, :, 0]  # [rules, L, K, N]
    rows = []
    for number, rule in enumerate(rules):
        row: dict[str, Any] = {"model": name, "rule": rule}
        for share in BUDGETS:
            budget = int(share * PROMPT)
            kept = jkv.top_tokens(scores[number][None], budget, PROMPT, budget)
            pruned, status = jkv.prune(cache, 0, kept, budget)
            if int(status[0]) == jkv.Status.INVALID_ARGUMENT:
                row[f"{share:.0%}"] = None  # fewer tokens than a sliding window's
                continue
            jkv.raise_for_status(status)
            logits, _ = compute(params, pruned, tokens[PROMPT:])
            logits = jax.nn.log_softmax(jnp.concatenate([first, logits[:-1]]))
            logprobs = logits[jnp.arange(num_next), tokens[PROMPT:]]
            row[f"{share:.0%}"] = float(jnp.exp(-logprobs.mean()))
        if rule in theirs:
            row["kvpress 50%"] = theirs[rule]
        rows.append(row)
        print(row, flush=True)
    return rows


def costs(num_layers: int) -> list[dict[str, Any]]:
    """Return the time of a donated call for each kind of selection."""
    config = jkv.CacheConfig(
        num_layers=num_layers,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        num_blocks=NUM_SEQUENCES * BEFORE // 16,
        max_sequences=NUM_SEQUENCES,
        max_context_length=BEFORE,
        dtype="float32",
        pruning=True,
    )
    rng = np.random.default_rng(0)
    cut = BEFORE - AFTER
    own = (NUM_SEQUENCES, num_layers, NUM_HEADS)
    kept = {
        "whole blocks out": np.r_[:cut, 2 * cut : BEFORE],
        "first 100 and the newest": np.r_[:100, 100 + cut : BEFORE],
        "scattered": np.sort(rng.permutation(BEFORE)[:AFTER]),
    }
    arrays = {
        name: np.broadcast_to(slots, (NUM_SEQUENCES, AFTER))
        for name, slots in kept.items()
    }
    each = rng.random((*own, BEFORE)).argpartition(AFTER, axis=-1)[..., :AFTER]
    arrays["own of each layer and head"] = np.sort(each)
    ids = np.arange(NUM_SEQUENCES, dtype=np.int32)
    prune = jax.jit(jkv.prune, donate_argnums=0)
    filled = jax.jit(lambda cache: jkv.append(cache, ids, BEFORE, capacity=2**16)[0])
    cases = []
    for name, slots in arrays.items():
        slots = jnp.asarray(slots, jnp.int32)

        def prepare() -> jkv.Cache:
            opened, _ = jkv.allocate(jkv.init(config), np.zeros(NUM_SEQUENCES, int))
            return jax.block_until_ready(filled(opened))

        def run(cache: jkv.Cache, slots: jax.Array = slots) -> jkv.Cache:
            after, _ = prune(cache, ids, slots, AFTER)
            return jax.block_until_ready(after)

        def check(cache: jkv.Cache) -> None:
            free = int(jkv.num_free_blocks(cache))
            assert free == NUM_SEQUENCES * cut // 16, free

        cases.append(harness.Case(name=name, prepare=prepare, run=run, check=check))
    samples = harness.interleave(cases, rounds=5, warmup=1)
    return [
        {"kept": name, "layers": num_layers, **found.row(1e3)}
        for name, found in samples.items()
    ]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=NUM_NEXT, help="after the prompt")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kvpress", help="Python of an environment with kvpress")
    parser.add_argument("--models", nargs="*", default=["smollm2", "gemma3"])
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    where = harness.machine()
    print(harness.header("Pruning", where), flush=True)
    timed = costs(options.layers)
    print("\n" + harness.table(timed, {key: key for key in timed[0]}), flush=True)
    rows = [
        row
        for name in options.models
        for row in perplexities(name, options.tokens, options.kvpress)
    ]
    run = {"benchmark": "pruning", "machine": where, "costs": timed}
    harness.save(options.json, run | {"perplexity": rows})


if __name__ == "__main__":
    main()
