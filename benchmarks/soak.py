"""Soak test of an engine with many short requests: no leaks.

    python benchmarks/soak.py [--requests 100000]

The model is a function of the newest token only, so the time is the engine's own:
scheduling, its three programs and JAX's dispatch. One request in seven is cancelled,
some end by a stop token, the rest by their limit. Requests and tokens per second are
printed, and memory, live arrays and free blocks after a tenth of the requests and at
the end. The run fails if blocks or arrays leak, or if the process grows by more than
allocator noise.
"""

import argparse
import gc
import platform
import time
from pathlib import Path

import jax
import numpy as np

import jkv
from jkv.serving import Engine, QueueFull

VOCABULARY, RUNNING, CONTEXT = 64, 64, 64
MOST_GROWTH = 16 * 2**20  # bytes, less than 200 per request


def count_on(params, tokens, cache, batch):
    """Return logits of the next number."""
    del params
    return jax.nn.one_hot((tokens + 1) % VOCABULARY, VOCABULARY)[batch.last_rows], cache


def resident_bytes():
    """Return the resident memory of this process; 0 if unavailable."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return 0
    return int(status.read_text().split()[1]) * 4096


def snapshot(engine):
    """Return the quantities that must not grow."""
    gc.collect()
    return resident_bytes(), len(jax.live_arrays()), engine.stats().free_blocks


def serve(engine, rng, count):
    """Submit requests as fast as they are accepted, and cancel some."""
    lengths, limits = rng.integers(1, 24, count), rng.integers(1, 9, count)
    starts = rng.integers(0, VOCABULARY - 30, count)
    for i in range(count):
        prompt = np.arange(starts[i], starts[i] + lengths[i])
        request = dict(max_new_tokens=int(limits[i]), stop_tokens=[30], timeout=600.0)
        while True:
            try:
                number = engine.submit(prompt, **request)
                break
            except QueueFull:
                engine.step()
        if i % 7 == 0:
            engine.cancel(number)
    while not engine.is_idle:
        engine.step()


def main():
    """Serve and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    count = parser.parse_args().requests
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=256,
        max_sequences=RUNNING,
        max_context_length=CONTEXT,
        prefix_caching=True,
    )
    engine = Engine(
        count_on,
        None,
        jkv.init(config),
        max_running=RUNNING,
        max_new_tokens=8,
        max_prompt_tokens=24,
        row_counts=(RUNNING, 512),
        max_waiting=1000,
        max_results=100,
    )
    engine.warm_up()
    rng = np.random.default_rng(0)
    serve(engine, rng, count // 10)
    before, started = snapshot(engine), time.perf_counter()
    serve(engine, rng, count - count // 10)
    seconds, after = time.perf_counter() - started, snapshot(engine)
    jkv.check(engine.cache)
    stats = engine.stats()
    print(f"{platform.processor() or platform.machine()}, JAX {jax.__version__}")
    print(f"{count} requests, {stats.cancelled} cancelled: {stats}")
    print(
        f"{(count - count // 10) / seconds:.0f} requests a second, "
        f"{1e3 * seconds / stats.num_windows:.2f} ms a window at most"
    )
    for name, was, now in zip(
        ("bytes of the process", "live arrays", "free blocks"),
        before,
        after,
        strict=True,
    ):
        print(f"{name:22} {was:12} {now:12} {now - was:+10}")
    assert stats.finished + stats.cancelled == count and not stats.failed
    assert after[1:] == before[1:] and after[2] == config.num_blocks
    assert after[0] - before[0] < MOST_GROWTH, "the process has grown"


if __name__ == "__main__":
    main()
