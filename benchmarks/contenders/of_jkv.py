"""jkv contenders: one call for the queue, host-side refill, and the engine."""

import sys
import time
import unittest.mock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from contenders.workloads import ROOT, Workload
from jkv import decoding
from jkv.attention.backend import Backend
from jkv.attention.xla.interface import Xla
from jkv.serving import Engine

sys.path.insert(0, str(ROOT / "examples"))  # the examples are not a package

import pretrained  # noqa: E402  (found through the line above)

BLOCK_SIZE = 16
WINDOW = 128  # steps between two checks of the host, for `Refilled`
STATIC = ("model", "max_new_tokens", "num_samples", "max_running", "row_counts")
COUNTED = ("num_steps", "sequence_steps", "prompt_tokens")
SAMPLING = jkv.Sampling(temperature=1.0)


class Jkv:
    """The model with a pool for the running sequences."""

    def __init__(self, workload: Workload) -> None:
        """Load the model and allocate the pool."""
        self.workload = workload
        self.model, self.params = pretrained.load(workload.folder, jnp.float32)
        config = jkv.CacheConfig(
            num_blocks=workload.cache_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_sequences=workload.num_running + 1,
            max_context_length=workload.context,
            dtype=jnp.float32,
            **self.model.cache_fields,
        )
        self.cache = jkv.init(config)

    @property
    def row_counts(self) -> tuple[int, ...] | None:
        """Row counts of a queue; None (the default) for a single request."""
        running = self.workload.num_running
        return decoding.spread_row_counts(running) if running > 1 else None

    def prepare(self) -> None:
        """Compile."""
        self.run(is_warming_up=True)

    def limits(self, is_warming_up: bool) -> np.ndarray:
        """Return the new tokens of each prompt; one during warm-up."""
        limits = np.asarray(self.workload.limits, np.int32)
        return np.minimum(limits, 1) if is_warming_up else limits


class Queue(Jkv):
    """The whole queue in one call (continuous batching inside jit)."""

    def prepare(self) -> None:
        """Compile."""
        self.generate = jax.jit(
            decoding.generate, static_argnames=STATIC, donate_argnames="cache"
        )
        super().prepare()

    def run(self, is_warming_up: bool = False) -> dict[str, Any]:
        """Continue all prompts."""
        self.cache, result = self.generate(
            self.model,
            self.params,
            self.cache,
            self.workload.padded(),
            limits=self.limits(is_warming_up),
            max_new_tokens=max(self.workload.limits),
            num_samples=self.workload.num_samples,
            max_running=self.workload.num_running,
            row_counts=self.row_counts,
            sampling=SAMPLING,
        )
        lengths = np.asarray(result.lengths)
        counts = {k: int(v) for k, v in result.statistics._asdict().items()}
        return {"tokens": int(lengths.sum()), **counts}


class Apart(Queue):
    """The queue without shared-prefix attention."""

    def prepare(self) -> None:
        """Compile without a plan of shared prefixes."""
        with unittest.mock.patch.object(Xla, "plan", Backend.plan):
            super().prepare()


class Refilled(Jkv):
    """As many prompts as run at one time, refilled by the host every `window` steps."""

    @property
    def window(self) -> int:
        """Number of steps between two checks by the host."""
        return WINDOW

    def prepare(self) -> None:
        """Compile."""
        self.begin = jax.jit(decoding.begin, static_argnames=STATIC)
        self.add = jax.jit(decoding.add_prompts)
        self.decode = jax.jit(
            decoding.decode,
            static_argnames="model",
            donate_argnames=("cache", "state"),
        )
        super().prepare()

    def run(self, is_warming_up: bool = False) -> dict[str, Any]:
        """Continue all prompts."""
        workload, limits = self.workload, self.limits(is_warming_up)
        samples = workload.num_samples
        num_slots = workload.num_running // samples
        prompts = workload.padded()
        state = self.begin(
            self.model,
            self.params,
            self.cache,
            np.full((num_slots, prompts.shape[1]), -1, np.int32),
            max_new_tokens=max(workload.limits),
            num_samples=samples,
            max_running=workload.num_running,
            row_counts=self.row_counts,
        )
        waiting, tokens = list(range(len(prompts))), 0
        busy = np.zeros((num_slots,), bool)
        while waiting or busy.any():
            running = np.asarray(state.is_running).reshape(num_slots, samples)
            ended = busy & ~running.any(axis=1)
            lengths = np.asarray(state.result.lengths).reshape(num_slots, samples)
            tokens += int(lengths[ended].sum())
            busy &= ~ended
            free = np.flatnonzero(~busy)[: len(waiting)]
            chosen = [waiting.pop(0) for _ in free]
            busy[free] = True
            if len(free):
                slots = np.full((num_slots,), -1, np.int32)
                slots[: len(free)] = free
                lanes = np.zeros((num_slots,), np.int32)
                lanes[: len(free)] = chosen
                state = self.add(
                    self.cache, state, slots, prompts[lanes], limits=limits[lanes]
                )
            if busy.any():
                self.cache, state = self.decode(
                    self.model,
                    self.params,
                    self.cache,
                    state,
                    sampling=SAMPLING,
                    num_steps=np.int32(self.window),
                )
        counted = state.result.statistics._asdict()
        return {"tokens": tokens} | {name: int(counted[name]) for name in COUNTED}


class RefilledOften(Refilled):
    """`Refilled` with a window scaled like the lengths."""

    @property
    def window(self) -> int:
        """Number of steps between two checks by the host."""
        return max(WINDOW // self.workload.shorten, 1)


class Timed:
    """The device loop of an engine, timing the host's calls to it.

    A window is awaited after the next one started, which is when the engine reads it.
    """

    def __init__(self, loop: Any) -> None:
        """Wrap the loop of an engine."""
        self._loop, self._unread, self.seconds = loop, None, 0.0

    def __getattr__(self, name: str) -> Any:
        """Delegate all other attributes."""
        return getattr(self._loop, name)

    def start_window(self, changes: Any, num_steps: int) -> Any:
        """Start a window and wait for the previous one."""
        began = time.perf_counter()
        unread = self._unread
        self._unread = self._loop.start_window(changes, num_steps)
        jax.block_until_ready(unread)
        self.seconds += time.perf_counter() - began
        return self._unread


class Served(Jkv):
    """The engine with all requests submitted at once; it detokenizes completions."""

    def prepare(self) -> None:
        """Compile."""
        workload = self.workload
        tokenizer = pretrained.load_tokenizer(workload.folder)
        self.engine = Engine(
            self.model,
            self.params,
            self.cache,
            max_running=workload.num_running,
            max_new_tokens=max(workload.limits),
            max_prompt_tokens=max(map(len, workload.prompts)),
            max_samples=workload.num_samples,
            num_ahead=workload.num_running // workload.num_samples,
            max_results=len(workload.prompts),
            detokenize=tokenizer.decode,
        )
        self.engine.warm_up()
        self.engine.generate(workload.prompts[:1], max_new_tokens=1, sampling=SAMPLING)

    def run(self) -> dict[str, Any]:
        """Continue all prompts; record each step while requests wait."""
        workload, scheduler = self.workload, self.engine._scheduler
        scheduler.loop = timed = Timed(scheduler.loop)
        before, turns = self.engine.stats(), []
        for prompt, limit in zip(workload.prompts, workload.limits, strict=True):
            self.engine.submit(
                prompt,
                n=workload.num_samples,
                max_new_tokens=limit,
                sampling=SAMPLING,
            )
        while not self.engine.is_idle:
            inside, began = timed.seconds, time.perf_counter()
            self.engine.step()
            seconds = time.perf_counter() - began
            waiting = scheduler.queue.num_waiting
            turns.append((seconds, timed.seconds - inside, waiting))
        full = [turn for turn in turns if turn[2]] or turns
        whole = sum(seconds for seconds, *_ in full)
        stats = self.engine.stats()
        return {
            "tokens": stats.generated_tokens - before.generated_tokens,
            "num_steps": stats.num_steps - before.num_steps,
            "host_share": 1 - sum(inside for _, inside, _ in full) / whole,
            "window_seconds": whole / len(full),
        }
