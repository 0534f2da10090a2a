"""Prefix cache hit rates by eviction policy and offloading store, on request traces.

    python benchmarks/retention.py [TRACE.jsonl ...] [--requests N]

A trace is a file of lines {"timestamp": ms, "hash_ids": [...]}, as published by
Mooncake (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces): each 512
tokens of a prompt have an id that is unique for the prefix up to them. A synthetic day
of coding agents is always included: sessions that share a system prompt, grow by a turn
every half minute, pause, and sometimes restart from a summary.

A column stands for one token of a cache with blocks of one token, so that pools of all
sizes are small. Each prompt is opened with its prefix hits; the rest is appended,
committed and freed. Compared are LRU eviction; LRU with a store of two and ten times
the pool; two retention priorities by rules without parameters; and the optimum for the
pool alone, Belady's, which evicts the columns that recur last. The rules: columns seen
before have priority 1; and the same or none, whichever would have had more hits so far,
by two simulated pools (`Shadow`).
"""

import argparse
import functools
import heapq
import json
import pathlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import jkv

RESULTS = pathlib.Path(__file__).parent / "results" / "retention.json"
SHARES = (0.01, 0.03, 0.1, 0.3)  # pool sizes, of all distinct columns of a trace
STORES = (0, 2, 10)  # times the pool
LRU = "LRU"
RULES = {"came before": False, "the better of both": True}
SPILLED = 32  # blocks per transfer

Trace = list[list[int]]  # the columns of each prompt


def read_trace(path: pathlib.Path, most: int) -> Trace:
    """Return the first `most` prompts of a file."""
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    lines.sort(key=lambda line: line["timestamp"])
    return [line["hash_ids"] for line in lines[:most]]


def make_agents(most: int, seed: int = 0) -> Trace:
    """Return a synthetic day of agents: 24 at a time, in order of their turns."""
    rng = np.random.default_rng(seed)
    numbers = iter(range(10**9))
    system = [next(numbers) for _ in range(24)]  # 12,000 tokens of rules and tools

    def begin() -> tuple[list[int], int]:
        files = [next(numbers) for _ in range(rng.integers(4, 40))]
        return system + files, int(rng.integers(5, 60))

    prompts: Trace = []
    sequences = [begin() for _ in range(24)]
    due = [(float(rng.exponential(30.0)), agent) for agent in range(24)]
    heapq.heapify(due)
    while len(prompts) < most:
        now, agent = heapq.heappop(due)
        sequence, turns = sequences[agent]
        prompts.append(list(sequence))
        sequence = sequence + [next(numbers) for _ in range(rng.integers(1, 6))]
        pause = float(rng.exponential(30.0))
        if turns == 0:
            sequence, turns = begin()
            pause += float(rng.exponential(900.0))  # a user reads the result
        elif len(sequence) > 220:  # a summary replaces the sequence
            sequence = system + [next(numbers) for _ in range(8)]
        sequences[agent] = sequence, turns - 1
        heapq.heappush(due, (now + pause, agent))
    return prompts


def count_found(prompt: Sequence[int], known: Any) -> int:
    """Return the number of known leading columns, without the prompt's last."""
    for number, column in enumerate(prompt[:-1]):
        if column not in known:
            return number
    return len(prompt) - 1


def play_belady(trace: Trace, pool: int) -> int:
    """Return the hits of a pool with Belady's optimal eviction."""
    last = dict[int, list[int]]()
    for time in range(len(trace) - 1, -1, -1):
        for column in trace[time]:
            last.setdefault(column, []).append(time)
    known: dict[int, int] = {}
    order: list[tuple[int, int, int]] = []
    found = 0
    for prompt in trace:
        found += count_found(prompt, known)
        for depth, column in enumerate(prompt):
            last[column].pop()
            known[column] = last[column][-1] if last[column] else len(trace)
            heapq.heappush(order, (-known[column], -depth, column))
        while len(known) > pool:
            time, _, column = heapq.heappop(order)
            if known.get(column) == -time:
                del known[column]
    return found


class Shadow:
    """Simulation of a pool's contents; prefixes are evicted after their extensions."""

    def __init__(self, pool: int) -> None:
        self.pool, self.classes = pool, dict[int, int]()
        self.orders = [OrderedDict[int, None](), OrderedDict[int, None]()]
        self.recent = 0.0  # exponentially weighted hits

    def play(self, prompt: Sequence[int], num_kept: int) -> None:
        """Simulate a prompt with `num_kept` retained columns."""
        found = count_found(prompt, self.classes)
        self.recent = 0.995 * self.recent + found
        for column in prompt:
            if column in self.classes:
                del self.orders[self.classes[column]][column]
        for depth in range(len(prompt) - 1, -1, -1):
            column = prompt[depth]
            number = max(self.classes.get(column, 0), int(depth < num_kept))
            self.classes[column], self.orders[number][column] = number, None
        while len(self.classes) > self.pool:
            column, _ = self.orders[not self.orders[0]].popitem(last=False)
            del self.classes[column]


class Rule:
    """A retention rule: the number of a prompt's columns with priority 1."""

    def __init__(self, pool: int, *, may_rest: bool) -> None:
        self.shadows = [Shadow(pool), Shadow(pool)] if may_rest else []
        self.before = set[int]()
        self.is_resting = False

    def choose(self, prompt: Sequence[int]) -> int:
        """Return the number of retained columns; 0 while the rule is inactive."""
        num_known = next(
            (n for n, column in enumerate(prompt) if column not in self.before),
            len(prompt),
        )
        self.before.update(prompt)
        if self.shadows:
            self.is_resting = self.shadows[0].recent >= self.shadows[1].recent
            for shadow, num in zip(self.shadows, (0, num_known), strict=True):
                shadow.play(prompt, num)
        return 0 if self.is_resting else num_known


class Player:
    """A cache with blocks of one token, and the step that runs a prompt on it."""

    def __init__(
        self, pool: int, longest: int, store: int = 0, rule: Rule | None = None
    ) -> None:
        self.width = longest
        config = jkv.CacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            dtype="int8",
            num_blocks=pool,
            block_size=1,
            max_sequences=2,
            max_context_length=longest,
            prefix_caching=True,
            keep_classes=1 if rule is None else 2,
        )
        self.cache = jkv.init(config)
        spilled_bytes = 2 * (8 + 2)  # per block: keys, values and scales
        self.store = jkv.BlockStore(store * spilled_bytes) if store else None
        self.blank, self.rule, self.was_resting = pool, rule, False

    def play(self, prompt: Sequence[int]) -> int:
        """Run a prompt and return its number of hits."""
        row = np.full(self.width, -1, np.int32)
        row[: len(prompt)] = prompt
        if self.store is not None:
            self._restore(prompt, row)
        num_kept = 0 if self.rule is None else self.rule.choose(prompt)
        self.cache, found = step(self.cache, row, len(prompt), num_kept)
        found = int(found)
        if self.rule is not None and self.rule.is_resting > self.was_resting:
            self.cache = jkv.demote(self.cache, jkv.clock(self.cache))
        self.was_resting = self.rule is not None and self.rule.is_resting
        self.blank -= len(prompt) - found
        return found

    def _restore(self, prompt: Sequence[int], row: np.ndarray) -> None:
        assert self.store is not None
        while self.blank < len(prompt):
            self.cache, spilled = jkv.spill(self.cache, SPILLED)
            self.store.put(spilled)
            self.blank += spilled.num_blocks
        known = int(match(self.cache, row)[0])
        found = self.store.find(prompt, skip=known)
        if found is not None:
            self.cache, num = jkv.restore(self.cache, found, donate=True)
            self.blank -= num


@functools.partial(jax.jit, donate_argnums=0)
def step(
    cache: jkv.Cache, row: jax.Array, length: jax.Array, num_kept: jax.Array
) -> tuple[jkv.Cache, jax.Array]:
    """Open a prompt with its hits, append the rest, commit it and free it.

    Its first columns are freed with priority 1, through a fork.
    """
    cache, opened = jkv.allocate(cache, jnp.zeros(1, jnp.int32), tokens=row[None])
    found = opened.num_cached[0]
    rest = jnp.roll(row, -found)
    cache, batch = jkv.append(
        cache, opened.seq_ids, (length - found)[None], capacity=len(row), tokens=rest
    )
    cache = jkv.commit(cache, batch)
    if cache.metadata.num_classes > 1:
        cache, forked = jkv.fork(cache, opened.seq_ids, num_kept[None])
        cache, _ = jkv.free(cache, forked.seq_ids, keep=1)
    return jkv.free(cache, opened.seq_ids)[0], found


@jax.jit
def match(cache: jkv.Cache, row: jax.Array) -> jax.Array:
    """Return the number of hits of a prompt."""
    return jkv.match(cache, row[None])


def make_players(pool: int, longest: int) -> Iterator[tuple[str, Player]]:
    """Yield caches with each policy, one at a time."""
    for factor in STORES:
        key = f"store of {factor} pools" if factor else LRU
        yield key, Player(pool, longest, factor * pool)
    for key, may_rest in RULES.items():
        yield key, Player(pool, longest, 0, Rule(pool, may_rest=may_rest))


def play(name: str, trace: Trace) -> list[dict[str, Any]]:
    """Return a row per pool size: shares of all columns that hit."""
    total = sum(map(len, trace))
    unique = len({column for prompt in trace for column in prompt})
    longest = max(map(len, trace))
    rows = []
    for share in SHARES:
        pool = max(int(unique * share), 2 * longest)
        row = {"trace": name, "pool": pool, "of all columns": pool / unique}
        for key, player in make_players(pool, longest):
            found = 0
            for number, prompt in enumerate(trace):
                found += player.play(prompt)
                if number % 1000 == 999:
                    harness.progress(f"{name}, {pool}, {key}: {number + 1}")
            row[key] = found / total
        row["Belady"] = play_belady(trace, pool) / total
        best = max(row[key] for key in (LRU, *RULES))
        row |= {"by Belady": row[LRU] / row["Belady"], "best": best / row["Belady"]}
        row["unbounded"] = play_belady(trace, unique) / total
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=pathlib.Path)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    where = harness.machine()
    print(harness.header("Prefix cache hit rates", where))
    rows = play("agents, made here", make_agents(options.requests))
    for path in options.traces:
        rows += play(path.stem, read_trace(path, options.requests))
    print(harness.table(rows, {key: key for key in rows[0]}))
    run = {
        "benchmark": "retention",
        "machine": where,
        "requests": options.requests,
        "rows": rows,
    }
    harness.save(options.json, run)
    print(f"saved in {options.json}")


if __name__ == "__main__":
    main()
