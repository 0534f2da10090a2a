"""A whole model on a GPU: tokens per second of `generate` and the engine.

    python benchmarks/gpu_model.py [--weights bfloat16 int8] [--only 64x2048] [--tiny]

A decoder of Llama 3 8B's shape with random weights (`llama.py`) continues 1 sequence at
a context of 2,048 tokens, 1 at 8,192, 8 at 8,192, 64 at 2,048 and 256 at 512. Only
decoding is timed: a call with many new tokens minus one with few, with all prompts in
the prefix cache, per additional token. Their mean context is the named one.

The floor is reading the weights and the contexts' keys and values once per step, at the
bandwidth of a copy in the same run. The baseline, if torch has a GPU, is the same
decoder with a contiguous cache, one step captured as a CUDA graph (`llama_torch.py`).
`share` is the floor's time over the measured time; `start` the seconds until the first
call is done, compilation included. `started` is the number of programs that XLA
compiled for the engine; `kept` and `found` are the same for a second engine that reuses
the first one's programs, and neither traces nor compiles its model. `--profile` adds
launches and device time of a step of `generate` by kernel name. Results are saved after
each batch. `--tiny` checks the script on a CPU within a minute, and saves nothing
without `--json` or `--rows`.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

# Leaves memory for torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness  # noqa: E402
import jax  # noqa: E402
import jax.monitoring  # noqa: E402
import llama  # noqa: E402
import numpy as np  # noqa: E402
from gpu import copy_bandwidth  # noqa: E402
from gpu_profile import profile, subtract, sum_groups  # noqa: E402
from harness import Case  # noqa: E402
from llama import Llama, count_step_bytes  # noqa: E402
from llama_torch import make_torch_step  # noqa: E402

import jkv  # noqa: E402
from jkv.serving import Engine, KeptPrograms  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results" / "gpu_model.json"
BLOCK_SIZE = 16
GENERATE, ENGINE, TORCH = WAYS = "generate", "engine", "torch, CUDA graph"
PROFILED_STEPS = 8
compiled: list[str] = []  # compilations by XLA
STATIC = ("model", "max_new_tokens", "max_running")
generate = jax.jit(jkv.generate, static_argnames=STATIC, donate_argnames="cache")


@dataclasses.dataclass(frozen=True)
class Size:
    """The decoder, its batches and numbers of new tokens."""

    model: Llama
    batches: tuple[tuple[int, int], ...]  # sequences and context tokens
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
    """A decoder with a cache of all prompts, continued by `generate` and the engine."""

    def __init__(self, size: Size, dtype: str, batch: int, context: int):
        prompt = context - (size.few + size.many) // 2
        rng = np.random.default_rng(0)
        shape = (batch, prompt)
        self.prompts = rng.integers(size.model.vocabulary, size=shape, dtype=np.int32)
        self.size, self.dtype, self.batch, self.context = size, dtype, batch, context
        self.config = jkv.CacheConfig.for_context_length(
            prompt + size.many + BLOCK_SIZE,
            max_sequences=batch,
            num_layers=size.model.num_layers,
            num_kv_heads=size.model.num_kv_heads,
            head_dim=size.model.head_dim,
            block_size=BLOCK_SIZE,
            prefix_caching=True,
        )
        self.params: Any = None
        self.program: Any = None
        self.compile_seconds = 0.0
        self.cache: jkv.Cache | None = None
        self.engine: Engine | None = None
        self.folder = tempfile.TemporaryDirectory()
        name = str(size.model)
        self.kept = KeptPrograms(name, self.folder.name, sources=(llama,))

    @property
    def label(self) -> str:
        """Batch and context, as in `--only`."""
        return f"{self.batch}x{self.context}"

    @property
    def param_shapes(self) -> Any:
        """Shapes and dtypes of the weights."""
        draw = functools.partial(self.size.model.draw_params, self.dtype)
        return jax.eval_shape(draw)

    def compile(self) -> None:
        """Compile `generate` for these shapes, without allocating arrays."""
        began = time.perf_counter()
        self.program = generate.lower(
            self.size.model,
            self.param_shapes,
            jax.eval_shape(functools.partial(jkv.init, self.config)),
            self.prompts,
            **self._generate_sizes,
            limits=np.zeros((self.batch,), np.int32),
        ).compile()
        self.compile_seconds = time.perf_counter() - began

    def generate(self, new_tokens: int) -> np.ndarray:
        """Continue all prompts inside one jit; return the completions' lengths."""
        if self.cache is None:
            self.cache = jkv.init(self.config)
        limits = np.full((self.batch,), new_tokens, np.int32)
        self.cache, found = self.program(
            self.params, self.cache, self.prompts, limits=limits
        )
        return np.asarray(found.lengths)

    def start_engine(self) -> None:
        """Create an engine and compile its programs."""
        self.engine = Engine(
            self.size.model,
            self.params,
            jkv.init(self.config),
            max_running=self.batch,
            max_new_tokens=self.size.many,
            max_prompt_tokens=self.prompts.shape[1],
            kept_programs=self.kept,
        )
        self.engine.warm_up()

    def serve(self, new_tokens: int) -> np.ndarray:
        """Continue all prompts as requests of an engine."""
        if self.engine is None:
            self.start_engine()
        assert self.engine is not None
        found = self.engine.generate(self.prompts, max_new_tokens=new_tokens)
        return np.array([len(each.tokens) for each in found])

    def profile_generate(self) -> list[dict[str, Any]]:
        """Return launches and microseconds per step of `generate`, by kernel."""
        few, more = self.size.few, self.size.few + PROFILED_STEPS
        few_profile, many_profile = (
            profile(functools.partial(self.generate, count)) for count in (few, more)
        )
        return subtract(many_profile, few_profile, more - few)

    @property
    def _generate_sizes(self) -> dict[str, int]:
        return {"max_new_tokens": self.size.many, "max_running": self.batch}


def note_compiled(event: str, _: float, **__: Any) -> None:
    """Count compilations by XLA, and hits in JAX's compilation cache."""
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(event)


def start(run: Any, size: Size) -> tuple[float, int]:
    """Return the seconds and number of compilations of a first call."""
    compiled.clear()
    began = time.perf_counter()
    run(size.few)
    return time.perf_counter() - began, len(compiled)


def measure_way(name: str, run: Any, size: Size, rounds: int) -> dict[str, Any]:
    """Return the seconds per decode step, and until the first call was done."""
    seconds, num_compiled = start(run, size)

    def call(new_tokens: int) -> None:
        lengths = run(new_tokens)
        if not (lengths == new_tokens).all():
            raise ValueError(f"{name}: expected {new_tokens} new tokens, got {lengths}")

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
    runs: Runs, ways: Sequence[str], copied: float, rounds: int, profiled: bool
) -> list[dict[str, Any]]:
    """Return a row for each way to continue a batch; failures with reasons."""
    size = runs.size
    num_bytes = count_step_bytes(runs.param_shapes)
    num_bytes += runs.batch * runs.context * runs.config.bytes_per_token
    floor = num_bytes / copied

    def generate() -> dict[str, Any]:
        row = measure_way(GENERATE, runs.generate, size, rounds)
        row["start"] += runs.compile_seconds
        if profiled:
            row["profile"] = runs.profile_generate()
        runs.cache = None
        return row

    def serve() -> dict[str, Any]:
        row = measure_way(ENGINE, runs.serve, size, rounds)
        runs.engine = None
        gc.collect()
        jax.clear_caches()
        row["kept"], row["found"] = start(runs.serve, size)
        runs.engine = None
        return row

    def replay() -> dict[str, Any]:
        runs.params = None  # torch has its own weights
        gc.collect()
        step = make_torch_step(size.model, runs.batch, runs.context)
        case = Case(name=TORCH, prepare=lambda: None, run=lambda _: step(), calls=10)
        taken = harness.interleave([case], rounds=max(rounds, 5), warmup=2)[TORCH]
        return {"seconds a step": taken.median}

    measures = {GENERATE: generate, ENGINE: serve, TORCH: replay}
    rows = []
    for name in ways:
        row: dict[str, Any] = {
            "weights": runs.dtype,
            "sequences": runs.batch,
            "context": runs.context,
            "contender": name,
        }
        try:
            row |= measures[name]()
        except Exception as error:  # out of memory or no torch: measure the others
            rows.append(row | {"refused": f"{type(error).__name__}: {error}"[:200]})
            continue
        finally:
            gc.collect()
        taken = row["seconds a step"]
        row |= {"tokens/s": runs.batch / taken, "floor tokens/s": runs.batch / floor}
        row |= {"us above the floor": (taken - floor) * 1e6}
        rows.append(row | {"share": floor / taken})
    return rows


def compile_side_by_side(every: Sequence[Runs]) -> None:
    """Compile `generate` for all batches in threads."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(every))) as pool:
        list(pool.map(Runs.compile, every))


def show_profile(rows: Sequence[dict[str, Any]]) -> str:
    """Return the groups of a profiled step, then its most expensive kernels."""
    groups = harness.table(
        sum_groups(rows), {name: name for name in ("group", "launches", "us")}
    )
    names = {name: name for name in ("us", "launches", "group", "kernel")}
    return f"{groups}\n\n{harness.table(rows[:30], names)}"


def main() -> None:
    """Measure the selected ways and batches; save after each batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--weights", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument(
        "--only", nargs="+", metavar="BATCHxCONTEXT", help="these alone"
    )
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--profile", action="store_true", help="kernels of a step")
    parser.add_argument(
        "--warm", action="store_true", help="compile engines before they are timed"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rows", type=pathlib.Path, help="a file of rows alone")
    options = parser.parse_args()
    size = TINY if options.tiny else FULL
    batches = {"x".join(map(str, batch)): batch for batch in size.batches}
    unknown = {*(options.only or ())} - {*batches}
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}; one of {', '.join(batches)}")
    path = options.json or (None if options.tiny or options.rows else RESULTS)
    where = harness.machine()
    print(harness.header("A whole model", where), flush=True)
    jax.monitoring.register_event_duration_secs_listener(note_compiled)
    every = [
        Runs(size, dtype, *batch)
        for dtype in options.weights
        for name, batch in batches.items()
        if options.only is None or name in options.only
    ]
    if GENERATE in options.ways:
        compile_side_by_side(every)
    drawn: dict[str, Any] = {}

    def draw(dtype: str) -> Any:
        if dtype not in drawn:
            drawn.clear()
            drawn[dtype] = jax.block_until_ready(size.model.draw_params(dtype))
        return drawn[dtype]

    if options.warm:
        for runs in every:
            runs.params = draw(runs.dtype)
            began = time.perf_counter()
            runs.start_engine()
            runs.compile_seconds = time.perf_counter() - began
            print(f"{runs.label}: warm after {runs.compile_seconds:.1f} s", flush=True)
    harness.wait_for_turn()
    copied = copy_bandwidth(size.copy_bytes, options.rounds)
    print(f"a copy: {copied / 1e9:,.0f} GB/s", flush=True)
    names = (
        "weights",
        "sequences",
        "context",
        "contender",
        "tokens/s",
        "floor tokens/s",
    )
    starts = ("us above the floor", "start", "started", "kept", "found")
    columns = {name: name for name in (*names, "share", *starts, "refused")}
    found: list[dict[str, Any]] = []
    for runs in every:
        if {*options.ways} != {TORCH}:
            runs.params = draw(runs.dtype)
        rows = measure_batch(
            runs, options.ways, copied, options.rounds, options.profile
        )
        runs.params = None
        print(harness.table(rows, columns), flush=True)
        for row in rows:
            if "profile" in row:
                print(show_profile(row["profile"]), flush=True)
        found += rows
        if options.rows:
            harness.save_rows(options.rows, found)
        if path is not None:
            run = {"machine": where, "copy GB/s": copied / 1e9, "rows": rows}
            label = f"gpu_model, {runs.dtype}, {runs.label}"
            harness.save(path, {"benchmark": label, **run})
    saved = path or options.rows
    print("nothing is saved" if saved is None else f"saved in {saved}")


if __name__ == "__main__":
    main()
