"""Overhead of sliding windows and of layer groups, for `append` and a decode step.

    python benchmarks/windows.py [--quick]

Every case is a `lax.scan` of decode steps in one jit, one token per sequence, from the
same lengths on. The baseline "all tokens" keeps everything; "window" is the same cache
with a sliding window, which releases a block of each sequence every 16 steps; "groups"
has a pool for the layers with a window and one for the others. A step is `append`, and
`write` and `attend` in each layer, without a model; attention has the same windows in
all cases. `append` alone runs on the metadata.

With staggered lengths, every step releases a block of some sequence and allocates one
for another; the overhead of a window and of each further group is compared with the
targets.
"""

import argparse
import dataclasses
import functools
import pathlib
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import Case

import jkv

RESULTS = pathlib.Path(__file__).parent / "results" / "windows.json"
PEER = "all tokens"
BLOCK_SIZE, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM = 16, 2, 4, 64
START = 1000  # tokens of each sequence before the first step
CHUNK = 250  # maximum tokens per step until then

# The caches of a workload, by the windows of their layers.
Caches = tuple[tuple[str, tuple[int | None, ...]], ...]
WINDOW, TWO, THREE = "window", "full + window", "three groups"
STAGGERED: Caches = (
    (PEER, (None,)),
    (WINDOW, (256,)),
    (TWO, (None, 256)),
    (THREE, (None, 256, 128)),
)
# Targets: the time of a window over that of full attention, and the addition of each
# further group, in the same unit.
MOST_OF_WINDOW, MOST_OF_GROUP = 1.5, 0.7


@dataclasses.dataclass(frozen=True)
class Workload:
    """Decoding sequences, and the windows of the layers."""

    name: str
    num_sequences: int
    layer_windows: tuple[int | None, ...]
    with_storage: bool
    num_steps: int = 64
    start: int = START
    staggered: Caches = ()  # if set, lengths differ by up to a block

    @property
    def caches(self) -> dict[str, tuple[int | None, ...]]:
        """The layer windows of this workload's caches."""
        if self.staggered:
            return dict(self.staggered)
        windows = self.layer_windows
        kind = "groups" if None in windows else WINDOW
        return {PEER: (None,) * len(windows), kind: windows}

    @property
    def starts(self) -> np.ndarray:
        """Tokens of each sequence before the first step, i32[B]."""
        number = np.arange(self.num_sequences, dtype=np.int32)
        return self.start + number % (BLOCK_SIZE if self.staggered else 1)


WORKLOADS = (
    Workload("append, 64 sequences", 64, (256,), False),
    Workload("append, 1,024 sequences", 1024, (256,), False),
    Workload("append, 64 sequences, groups", 64, (256, None), False),
    Workload("append, 1,024 sequences, groups", 1024, (256, None), False),
    Workload(
        "append, 1,024 sequences, staggered",
        1024,
        (None,),
        False,
        start=320,
        staggered=STAGGERED,
    ),
    Workload("step, 16 sequences, 8 layers", 16, (256,) * 8, True),
    Workload("step, 16 sequences, 8 layers, groups", 16, (256, None) * 4, True),
)


def make_cache(kind: str, workload: Workload) -> jkv.Cache:
    """Return a new cache of a kind, with blocks for all sequences."""
    sizes: dict[str, Any] = dict(
        num_kv_heads=NUM_KV_HEADS if workload.with_storage else 1,
        head_dim=HEAD_DIM if workload.with_storage else 1,
        block_size=BLOCK_SIZE,
        dtype=jnp.float32,
    )
    longest = int(workload.starts.max()) + workload.num_steps
    windows, count = workload.caches[kind], workload.num_sequences
    if len(set(windows)) > 1:
        grouped = jkv.GroupedConfig.for_context_length(
            longest,
            max_sequences=count,
            layer_windows=windows,
            step_tokens=CHUNK,
            **sizes,
        )
        # Compatible with versions that had a separate `init_groups`.
        init = getattr(jkv, "init_groups", jkv.init)
        return init(grouped, storage=workload.with_storage)
    config = jkv.CacheConfig(
        num_layers=len(windows),
        num_blocks=1,
        max_sequences=count,
        max_context_length=longest,
        sliding_window=windows[0],
        **sizes,
    )
    blocks = count * config.most_blocks(CHUNK)
    config = dataclasses.replace(config, num_blocks=blocks)
    return jkv.init(config, storage=workload.with_storage)


def fill(cache: jkv.Cache, workload: Workload) -> jkv.Cache:
    """Open the sequences and grow them to the initial length.

    The last token is appended separately, so that blocks of the chunks are released
    first.
    """
    count = workload.num_sequences
    grow = jax.jit(functools.partial(jkv.append, capacity=count * CHUNK))
    cache, opened = jkv.allocate(cache, np.zeros(count, np.int32))
    starts = workload.starts - 1
    for first in [*range(0, int(starts.max()), CHUNK), None]:
        num_tokens = np.ones(count, np.int32)
        if first is not None:
            num_tokens = np.clip(starts - first, 0, CHUNK)
        cache, batch = grow(cache, opened.seq_ids, num_tokens)
        jkv.raise_for_status(batch.status)
        if workload.with_storage:
            rows = jnp.ones((count * CHUNK, NUM_KV_HEADS, HEAD_DIM))
            for layer in range(len(workload.layer_windows)):
                cache = jkv.write(cache, layer, batch, rows, rows)
    return cache


def decode(cache: jkv.Cache, workload: Workload) -> tuple[jkv.Cache, jax.Array]:
    """Run all steps; return the cache and the number of served requests."""
    count = workload.num_sequences
    seq_ids = jnp.arange(count, dtype=jnp.int32)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        cache, rows, served = carry
        cache, batch = jkv.append(cache, seq_ids)
        if workload.with_storage:
            for layer, window in enumerate(workload.layer_windows):
                keys = rows[:, :NUM_KV_HEADS]
                cache = jkv.write(cache, layer, batch, keys, keys)
                rows = jkv.attend(cache, layer, batch, rows, window=window)
        return (cache, rows, served + jnp.sum(batch.query_lengths)), None

    rows = jnp.ones((count, NUM_HEADS, HEAD_DIM))
    carry = cache, rows, jnp.int32(0)
    cache, rows, served = jax.lax.scan(step, carry, None, length=workload.num_steps)[0]
    return cache, served + (0 * rows[0, 0, 0]).astype(jnp.int32)


def make_case(kind: str, workload: Workload) -> tuple[Case, int]:
    """Return the case, and the bytes of its keys and values."""
    filled = fill(make_cache(kind, workload), workload)
    run = jax.jit(lambda cache: decode(cache, workload), donate_argnums=0)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    expected = workload.num_sequences * workload.num_steps

    def check(done: Any) -> None:
        assert int(done[1]) == expected, done[1]

    case = Case(
        name=f"{kind}: {workload.name}",
        prepare=lambda: jax.block_until_ready(copy(filled)),
        run=lambda cache: jax.block_until_ready(run(cache)),
        calls=workload.num_steps,
        check=check,
    )
    # Only storage arrays have this many axes.
    stored = [leaf for leaf in jax.tree.leaves(filled) if leaf.ndim >= 4]
    return case, sum(leaf.nbytes for leaf in stored)


def compare(found: dict[str, harness.Samples]) -> list[dict[str, Any]]:
    """Return the overhead of a window and of further groups, and the targets.

    Args:
      found: samples by the caches of `STAGGERED`.
    """
    one, window, two, three = (found[kind].median for kind, _ in STAGGERED)
    measured = [
        ("window / all tokens", found[WINDOW].ratio_to(found[PEER]), MOST_OF_WINDOW),
        ("a second group, beside a window's", (two - window) / one, MOST_OF_GROUP),
        ("a third group", (three - two) / one, MOST_OF_GROUP),
    ]
    return [
        {
            "staggered": name,
            "measured": ratio,
            "at most": most,
            "verdict": "met" if ratio <= most else "MISSED",
        }
        for name, ratio, most in measured
    ]


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="workloads with this in their name")
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, to see that it runs"
    )
    arguments = parser.parse_args()
    where = harness.machine()
    print(harness.header("jkv: overhead of sliding windows and layer groups", where))
    chosen = [w for w in WORKLOADS if (arguments.only or "") in w.name]
    cases = {(w.name, k): make_case(k, w) for w in chosen for k in w.caches}
    samples = harness.interleave(
        [case for case, _ in cases.values()],
        rounds=2 if arguments.quick else arguments.rounds,
    )
    rows = []
    for workload in chosen:
        peer = samples[f"{PEER}: {workload.name}"]
        for kind in workload.caches:
            found = samples[f"{kind}: {workload.name}"]
            stored = cases[workload.name, kind][1]
            rows.append(
                {
                    "workload": workload.name,
                    "cache": kind,
                    **found.row(),
                    "ratio": found.ratio_to(peer),
                    "MiB stored": stored / 2**20 if workload.with_storage else None,
                }
            )
    print("\nus a step\n" + harness.table(rows, {key: key for key in rows[0]}))
    targets: list[dict[str, Any]] = []
    for workload in chosen:
        if workload.staggered:
            named = {k: samples[f"{k}: {workload.name}"] for k in workload.caches}
            targets += compare(named)
    if targets:
        print("\n" + harness.table(targets, {key: key for key in targets[0]}))
    if not (arguments.quick or arguments.only):
        run = {"benchmark": "windows", "machine": where, "unit": "us", "rows": rows}
        harness.save(RESULTS, run | {"targets": targets})
        print(f"\nwritten to {RESULTS.name}")


if __name__ == "__main__":
    main()
