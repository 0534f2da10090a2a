"""Overhead of continuous batching: a step of `generate`'s loop and a bare step.

    python benchmarks/scheduling.py [--quick]

The bare loop is hand-written for a fixed batch: `append`, the model, `commit`,
`sample`, and storing the token, in a `lax.scan` inside one jit. The other is a window
of `jkv.decoding.decode` over as many running sequences, with waiting ones or without.
If sequences end, 1 in 256 does per step, and a waiting one replaces it: freeing,
admission and the new one's first row are included.

One model has 8 layers; the other returns the logits of the next number, so that only
bookkeeping remains. Both loops start from the same lengths.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from decoder import Shapes, compute_logits, describe_weights
from harness import Case, Samples

import jkv
from jkv import decoding

RESULTS = pathlib.Path(__file__).parent / "results" / "scheduling.json"
BARE = "bare loop"
BLOCK_SIZE = 16
VOCABULARY = 128
MEAN_LENGTH = 256  # mean tokens of ended sequences
STATIC = ("model", "max_new_tokens", "max_running")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Running and waiting sequences."""

    name: str
    num_running: int
    num_waiting: int = 0
    ends: bool = False  # True if sequences end within the run
    num_layers: int = 0  # of the model; 0 for the counting model
    num_steps: int = 32  # per sample

    @property
    def num_sequences(self) -> int:
        """Number of all sequences."""
        return self.num_running + self.num_waiting

    @property
    def warmup(self) -> int:
        """Steps before the first sample, until all run and some may have ended."""
        return MEAN_LENGTH + 64 if self.ends else 100

    @property
    def max_context_length(self) -> int:
        """Tokens of the longest sequence."""
        return 2 * MEAN_LENGTH

    def limits(self) -> np.ndarray:
        """Return the maximum tokens of each sequence."""
        most = self.max_context_length - 1
        if not self.ends:
            return np.full((self.num_sequences,), most, np.int32)
        random = np.random.default_rng(0)
        return random.integers(1, most + 1, self.num_sequences, np.int32)


LARGE = "1,024 running"
WORKLOADS = (
    Workload("64 running, 8 layers", 64, num_layers=8, num_steps=16),
    Workload("64 running, 8 layers, 640 waiting", 64, 640, num_layers=8, num_steps=16),
    Workload("64 running", 64),
    Workload(LARGE, 1024),
    Workload(f"{LARGE}, 10,000 waiting", 1024, 10_000),
    Workload(f"{LARGE}, 10,000 waiting, 4 end in a step", 1024, 10_000, ends=True),
)


class Model:
    """A model of layers on the cache, or the counting model."""

    def __init__(self, num_layers: int) -> None:
        """Draw weights."""
        self.shapes = Shapes(max(num_layers, 1), vocabulary=VOCABULARY)
        self.num_layers = num_layers
        self.params = None
        if num_layers:
            key = jax.random.key(0)
            self.params = jax.tree.map(
                lambda w: jax.random.normal(key, w.shape) * w.shape[0] ** -0.5,
                describe_weights(self.shapes),
            )

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,
        cache: jkv.Cache,
        batch: jkv.Batch,
        *,
        all_rows: bool = False,
    ) -> tuple[jax.Array, jkv.Cache]:
        """Return the logits, and the cache with this step's keys and values."""
        if not self.num_layers:
            logits = jax.nn.one_hot((tokens + 1) % VOCABULARY, VOCABULARY)
            return (logits if all_rows else logits[batch.last_rows]), cache

        def attend(layer: int, queries: Any, keys: Any, values: Any) -> jax.Array:
            nonlocal cache
            cache = jkv.write(cache, layer, batch, keys, values)
            return jkv.attend(cache, layer, batch, queries)

        logits = compute_logits(params, tokens, batch.positions, attend, self.shapes)
        return (logits if all_rows else logits[batch.last_rows]), cache


class Loops:
    """Both loops on one workload, from the same state."""

    def __init__(self, workload: Workload, model: Model) -> None:
        """Admit the sequences and run the first steps."""
        self.workload, self.model = workload, model
        shapes, blocks = model.shapes, workload.max_context_length // BLOCK_SIZE
        config = jkv.CacheConfig(
            num_layers=shapes.num_layers,
            num_kv_heads=shapes.num_kv_heads if model.num_layers else 1,
            head_dim=shapes.head_dim if model.num_layers else 1,
            num_blocks=workload.num_running * blocks,
            block_size=BLOCK_SIZE,
            max_sequences=workload.num_running,
            max_context_length=workload.max_context_length,
            dtype=jnp.float32,
        )
        cache, limits = jkv.init(config), workload.limits()
        prompts = np.arange(workload.num_sequences, dtype=np.int32)[:, None]
        state = jax.jit(decoding.begin, static_argnames=STATIC)(
            model,
            model.params,
            cache,
            prompts % VOCABULARY,
            max_new_tokens=int(limits.max()),
            limits=limits,
            max_running=workload.num_running,
        )
        self.decode = jax.jit(
            functools.partial(decoding.decode, model),
            donate_argnames=("cache", "state"),
        )
        self.begun = self.decode(
            model.params, cache, state, num_steps=np.int32(workload.warmup)
        )
        self.scan = jax.jit(self._scan, donate_argnames=("cache", "out"))
        self.copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

    def cases(self) -> list[Case]:
        """Return both cases."""
        return [self._bare_case(), self._queue_case()]

    def _bare_case(self) -> Case:
        cache, state = self.begun
        places, result = state.places, state.result
        newest = result.lengths[places.sequences] - 1
        tokens = result.tokens[places.sequences, newest]

        def prepare() -> Any:
            steps, rows = self.workload.num_steps, self.workload.num_running
            out = jnp.zeros((2, rows, steps), jnp.float32)
            return jax.block_until_ready((self.copy(cache), out))

        def run(prepared: Any) -> Any:
            cache, out = prepared
            done = self.scan(
                self.model.params, cache, places.seq_ids, tokens, newest, out
            )
            return jax.block_until_ready(done)

        return self._case(BARE, prepare, run)

    def _scan(
        self,
        params: Any,
        cache: jkv.Cache,
        seq_ids: jax.Array,
        tokens: jax.Array,
        counts: jax.Array,
        out: jax.Array,
    ) -> Any:
        def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
            cache, tokens, out = carry
            cache, batch = jkv.append(cache, seq_ids, tokens=tokens)
            logits, cache = self.model(params, tokens, cache, batch)
            cache = jkv.commit(cache, batch)
            tokens, logprobs = decoding.sample(
                logits, decoding.Sampling(), counts=counts + i
            )
            made = jnp.stack([tokens.astype(jnp.float32), logprobs])
            return (cache, tokens, out.at[:, :, i].set(made)), None

        steps = jnp.arange(self.workload.num_steps, dtype=jnp.int32)
        return jax.lax.scan(step, (cache, tokens, out), steps)[0]

    def _queue_case(self) -> Case:
        steps = self.workload.num_steps
        before = int(self.begun[1].result.statistics.sequence_steps)

        def run(begun: Any) -> Any:
            done = self.decode(self.model.params, *begun, num_steps=np.int32(steps))
            return jax.block_until_ready(done)

        def check(done: Any) -> None:
            work = int(done[1].result.statistics.sequence_steps) - before
            assert work >= 0.99 * steps * self.workload.num_running, work

        return self._case(
            "jkv", lambda: jax.block_until_ready(self.copy(self.begun)), run, check
        )

    def _case(
        self,
        contender: str,
        prepare: Callable[[], Any],
        run: Callable[[Any], Any],
        check: Callable[[Any], None] | None = None,
    ) -> Case:
        return Case(
            name=f"{contender}: {self.workload.name}",
            prepare=prepare,
            run=run,
            calls=self.workload.num_steps,
            check=check,
            labels={"workload": self.workload.name, "contender": contender},
        )


def compare(workload: Workload, samples: dict[str, Samples]) -> dict[str, Any]:
    """Return both times of a step, their difference and its limit."""
    ours, bare = (
        samples[f"{contender}: {workload.name}"] for contender in ("jkv", BARE)
    )
    common = ours.seconds.keys() & bare.seconds.keys()
    added = Samples({r: ours.seconds[r] - bare.seconds[r] for r in common})
    row = {
        "workload": workload.name,
        BARE: bare.median * 1e6,
        **ours.row(),
        "added": added.median * 1e6,
        "added, p10": added.percentile(10) * 1e6,
        "added, p90": added.percentile(90) * 1e6,
        "ratio": ours.ratio_to(bare),
    }
    if workload.num_layers:
        return row | {"limit": "ratio 1.05", "met": row["ratio"] <= 1.05}
    if workload.num_waiting:
        return row | {"limit": "200 us", "met": row["added"] <= 200}
    return row


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
    print(harness.header("jkv: overhead of continuous batching per step", where))
    chosen = [w for w in WORKLOADS if (arguments.only or "") in w.name]
    if arguments.quick:
        chosen = [dataclasses.replace(w, num_steps=2) for w in chosen[:1]]
    models = {n: Model(n) for n in {w.num_layers for w in chosen}}
    loops = [Loops(w, models[w.num_layers]) for w in chosen]
    samples = harness.interleave(
        [case for loop in loops for case in loop.cases()],
        rounds=2 if arguments.quick else arguments.rounds,
    )
    rows = [compare(workload, samples) for workload in chosen]
    print(
        "\nus a step\n" + harness.table(rows, {key: key for row in rows for key in row})
    )
    if not (arguments.quick or arguments.only):
        run = {"benchmark": "scheduling", "machine": where, "unit": "us", "rows": rows}
        harness.save(RESULTS, run)
        print(f"\nwritten to {RESULTS.name}")


if __name__ == "__main__":
    main()
