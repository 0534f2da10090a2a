"""A whole model on a GPU: tokens a second of `generate` and the engine, by the floor.

    python benchmarks/gpu_model.py [--weights bfloat16 int8] [--only 64x2048] [--tiny]

A decoder of Llama 3 8B's shape with random weights (`llama.py`) continues 1 text at a
context of 2,048 tokens, 1 at 8,192, 8 at 8,192, 64 at 2,048 and 256 at 512. What is
timed is decoding alone: a call with many new tokens less one with few, on a cache that
finds all prompts, over the tokens that the one has more. The mean context of those is
the one named.

The floor is reading the weights and the contexts' keys and values once a step, as fast
as a copy in the same run reads and writes. Beside it, where torch has a GPU: the same
decoder with a contiguous cache, one step captured as a CUDA graph (`llama_torch.py`).
`share` is the floor's time by the time taken; `start` the seconds until the first call
is done, compiling included. Of the engine `started` says how many programs XLA compiled
for that, and `kept` and `found` the same of another engine that begins with the
programs that the first one kept, which neither traces nor compiles its model. Results
are saved after each batch. `--tiny` shows on a CPU within a minute that the script
works, and saves nothing unless it is told where.
"""

import argparse
import dataclasses
import functools
import gc
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

# torch needs memory beside JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness  # noqa: E402
import jax  # noqa: E402
import jax.monitoring  # noqa: E402
import llama  # noqa: E402
import numpy as np  # noqa: E402
from gpu import copy_bandwidth  # noqa: E402
from harness import Case  # noqa: E402
from llama import Llama, count_step_bytes  # noqa: E402
from llama_torch import make_torch_step  # noqa: E402

import jkv  # noqa: E402
from jkv.serving import Engine, KeptPrograms  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results" / "gpu_model.json"
BLOCK_SIZE = 16
GENERATE, ENGINE, TORCH = "generate", "engine", "torch, CUDA graph"
compiled: list[str] = []  # what XLA was asked for
STATIC = ("model", "max_new_tokens", "max_running")
generate = jax.jit(jkv.generate, static_argnames=STATIC, donate_argnames="cache")


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured: the decoder, and how far each text goes."""

    model: Llama
    batches: tuple[tuple[int, int], ...]  # texts, and tokens of their contexts
    few: int  # new tokens of the shorter call
    many: int  # of the longer one
    copy_bytes: int


FULL = Size(
    Llama(),
    batches=((1, 2048), (1, 8192), (8, 8192), (64, 2048), (256, 512)),
    few=16,
    many=144,
    copy_bytes=2**31,
)
TINY = Size(
    Llama(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        hidden_dim=128,
        vocabulary=256,
    ),
    batches=((1, 32), (4, 24)),
    few=2,
    many=10,
    copy_bytes=2**22,
)


class Runs:
    """A decoder with a cache whose prompts are found, continued in two ways."""

    def __init__(
        self, size: Size, params: Any, batch: int, context: int, kept: KeptPrograms
    ):
        prompt = context - (size.few + size.many) // 2
        rng = np.random.default_rng(0)
        shape = (batch, prompt)
        self.prompts = rng.integers(size.model.vocabulary, size=shape, dtype=np.int32)
        self.size, self.params, self.batch = size, params, batch
        self.config = jkv.CacheConfig.for_context_length(
            prompt + size.many + BLOCK_SIZE,
            max_sequences=batch,
            num_layers=size.model.num_layers,
            num_kv_heads=size.model.num_kv_heads,
            head_dim=size.model.head_dim,
            block_size=BLOCK_SIZE,
            prefix_caching=True,
        )
        self.cache: jkv.Cache | None = None
        self.engine: Engine | None = None
        self.kept = kept

    def generate(self, new_tokens: int) -> np.ndarray:
        """Continue all prompts inside one jit; return how many tokens each got."""
        if self.cache is None:
            self.cache = jkv.init(self.config)
        self.cache, found = generate(
            self.size.model,
            self.params,
            self.cache,
            self.prompts,
            max_new_tokens=self.size.many,
            max_running=self.batch,
            limits=np.full((self.batch,), new_tokens, np.int32),
        )
        return np.asarray(found.lengths)

    def serve(self, new_tokens: int) -> np.ndarray:
        """Continue all prompts as requests of an engine."""
        if self.engine is None:
            self.engine = Engine(
                self.size.model,
                self.params,
                jkv.init(self.config),
                max_running=self.batch,
                max_new_tokens=self.size.many,
                max_prompt_tokens=self.prompts.shape[1],
                kept_programs=self.kept,
            )
        found = self.engine.generate(self.prompts, max_new_tokens=new_tokens)
        return np.array([len(each.tokens) for each in found])


def note_compiled(event: str, _: float, **__: Any) -> None:
    """Count what XLA compiles, or finds in JAX's own cache of programs."""
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(event)


def start(run: Any, size: Size) -> tuple[float, int]:
    """Return the seconds of a first call, and how many programs it compiled."""
    compiled.clear()
    began = time.perf_counter()
    run(size.few)
    return time.perf_counter() - began, len(compiled)


def measure_way(name: str, run: Any, size: Size, rounds: int) -> dict[str, Any]:
    """Return the seconds of a decode step in one way, and those until it first ran."""
    seconds, num_compiled = start(run, size)

    def call(new_tokens: int) -> None:
        lengths = run(new_tokens)
        if not (lengths == new_tokens).all():
            raise ValueError(f"{name}: {new_tokens} tokens were asked, got {lengths}")

    cases = [
        Case(
            name=f"{name}, {count} tokens",
            prepare=lambda: None,
            run=lambda _, count=count: call(count),
        )
        for count in (size.few, size.many)
    ]
    samples = harness.interleave(cases, rounds=rounds, warmup=1, seconds_per_case=30)
    few, many = (samples[case.name].seconds for case in cases)
    steps = [(many[r] - few[r]) / (size.many - size.few) for r in few if r in many]
    return {
        "seconds a step": statistics.median(steps),
        "start": seconds,
        "started": num_compiled,
    }


def measure_batch(
    size: Size, params: Any, batch: int, context: int, copied: float, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each way to continue a batch of texts; refusals with reasons."""
    folder = tempfile.TemporaryDirectory()
    kept = KeptPrograms(str(size.model), folder.name, sources=(llama,))
    runs = Runs(size, params, batch, context, kept)
    num_bytes = count_step_bytes(params)
    num_bytes += batch * context * runs.config.bytes_per_token
    floor = num_bytes / copied

    def serve() -> dict[str, Any]:
        runs.cache = None  # the engine has one of its own
        row = measure_way(ENGINE, runs.serve, size, rounds)
        runs.engine = None
        gc.collect()
        jax.clear_caches()
        row["kept"], row["found"] = start(runs.serve, size)
        return row

    def replay() -> dict[str, Any]:
        runs.engine = None
        gc.collect()
        step = make_torch_step(size.model, batch, context)
        case = Case(name=TORCH, prepare=lambda: None, run=lambda _: step(), calls=10)
        taken = harness.interleave([case], rounds=max(rounds, 5), warmup=2)[TORCH]
        return {"seconds a step": taken.median}

    ways = {
        GENERATE: functools.partial(measure_way, GENERATE, runs.generate, size, rounds),
        ENGINE: serve,
        TORCH: replay,
    }
    rows = []
    for name, measure in ways.items():
        row: dict[str, Any] = {"texts": batch, "context": context, "who": name}
        try:
            row |= measure()
        except Exception as error:  # no room, no torch: the others are measured still
            rows.append(row | {"refused": f"{type(error).__name__}: {error}"[:200]})
            continue
        taken = row["seconds a step"]
        row |= {"tokens/s": batch / taken, "floor tokens/s": batch / floor}
        rows.append(row | {"share": floor / taken})
    return rows


def main() -> None:
    """Measure what was asked for; save after each batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--weights", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--only", metavar="TEXTSxCONTEXT", help="one batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    size = TINY if options.tiny else FULL
    batches = {"x".join(map(str, batch)): batch for batch in size.batches}
    if options.only is not None and options.only not in batches:
        parser.error(f"--only: one of {', '.join(batches)}")
    path = options.json or (None if options.tiny else RESULTS)
    where = harness.machine()
    print(harness.header("A whole model", where), flush=True)
    copied = copy_bandwidth(size.copy_bytes, options.rounds)
    print(f"a copy: {copied / 1e9:,.0f} GB/s", flush=True)
    jax.monitoring.register_event_duration_secs_listener(note_compiled)
    names = ("weights", "texts", "context", "who", "tokens/s", "floor tokens/s")
    starts = ("start", "started", "kept", "found")
    columns = {name: name for name in (*names, "share", *starts, "refused")}
    for dtype in options.weights:
        params = jax.block_until_ready(size.model.draw_params(dtype))
        for name, batch in batches.items():
            if options.only not in (None, name):
                continue
            found = measure_batch(size, params, *batch, copied, options.rounds)
            rows = [{"weights": dtype, **row} for row in found]
            print(harness.table(rows, columns), flush=True)
            gc.collect()
            if path is not None:
                run = {"machine": where, "copy GB/s": copied / 1e9, "rows": rows}
                label = f"gpu_model, {dtype}, {name}"
                harness.save(path, {"benchmark": label, **run})
        del params
        gc.collect()
    print("nothing is saved" if path is None else f"saved in {path}")


if __name__ == "__main__":
    main()
