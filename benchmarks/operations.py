"""Time append, free and fork, compared with a bare Python loop and other allocators.

    python benchmarks/operations.py [--peer CHECKOUT]... [--quick]

Bookkeeping only, as in a decode step before any layer runs: 1024 sequences grow by one
token each (blocks of 16 tokens, staggered lengths, so that a step allocates a block for
one sequence in 16), and 64 sequences of 16 blocks are freed or forked. Pools have 4,096
and 65,536 blocks and were used before, so that the free blocks are in mixed order.
Besides times, the tables have load-independent counts: instructions in the compiled
modules, and the bytes of XLA's cost analysis.
"""

import argparse
import collections
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import peers
from harness import Case, Samples
from peers import Workload, bookkeeping_case

import jkv

RESULTS = pathlib.Path(__file__).parent / "results" / "operations.json"
BARE = "bare Python loop"
NOTHING = "a jitted identity, donated"

# HLO opcodes that move no data.
FREE_OPCODES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


class Verbs:
    """jkv's verbs on one pool.

    The metadata is copied before each sample; the donated storage passes from one
    sample to the next.
    """

    def __init__(self, workload: Workload, num_blocks: int, storage: bool) -> None:
        """Create a used pool and the initial states of the samples."""
        self.workload, self.num_blocks = workload, num_blocks
        self.storage = "storage donated" if storage else "metadata only"
        config = jkv.CacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=64,
            num_blocks=num_blocks,
            block_size=workload.block_size,
            max_sequences=workload.num_sequences,
            max_context_length=workload.max_context_length,
            dtype=jnp.float16,
        )
        self.cache = _used_pool(jkv.init(config, storage=storage), workload)
        empty = self.cache.metadata
        # The live entries of the ring, so that the bare loops allocate the same blocks.
        ring = empty.groups[0].free_blocks
        self.free_order = np.roll(ring.ids, -int(ring.head))[: int(ring.count)].tolist()
        self.copy = jax.jit(lambda metadata: jax.tree.map(jnp.copy, metadata))
        started, self.seq_ids = _grown(self.cache, workload.start_lengths)
        self.started = started.metadata
        lengths = np.full((workload.num_branches,), workload.branch_length, np.int32)
        branches, self.branch_ids = _grown(
            dataclasses.replace(self.cache, metadata=empty), lengths
        )
        self.branches = branches.metadata
        self.append = jax.jit(jkv.append, donate_argnums=0)
        self.free = jax.jit(jkv.free, donate_argnums=0)
        self.fork = jax.jit(jkv.fork, donate_argnums=0)
        self.scan = jax.jit(self._scan, donate_argnums=0)
        self.pass_through = jax.jit(lambda cache, ids: (cache, ids), donate_argnums=0)

    def cases(self) -> list[Case]:
        """Return a case for each operation and way of calling it."""
        cases = [
            self._case("append", "eager, donated", self.started, self._donated),
            self._case("append", "in a scan", self.started, self._scanned),
            self._case("free", "eager, donated", self.branches, self._freed),
            self._case("fork", "eager, donated", self.branches, self._forked),
        ]
        if self.storage == "metadata only":
            cases += [
                self._case("append", "not waiting", self.started, self._hurried),
                self._case("append", "not donated", self.started, self._kept),
                self._floor(),
            ]
        return cases

    def compiled(self) -> dict[str, Any]:
        """Return the compiled modules, by operation."""
        started = self._fresh(self.started)
        branches = self._fresh(self.branches)
        return {
            "append": self.append.lower(started, self.seq_ids).compile(),
            f"{self.workload.num_steps} appends": self.scan.lower(started).compile(),
            "free": self.free.lower(branches, self.branch_ids).compile(),
            "fork": self.fork.lower(branches, self.branch_ids).compile(),
        }

    def _case(
        self,
        operation: str,
        how: str,
        metadata: jkv.Metadata,
        run: Callable[[jkv.Cache], jkv.Cache],
    ) -> Case:
        def keep_storage(cache: jkv.Cache) -> jkv.Cache:
            self.cache = run(cache)
            return self.cache

        return bookkeeping_case(
            operation=operation,
            contender=f"jkv, {how}",
            storage=self.storage,
            workload=self.workload,
            num_blocks=self.num_blocks,
            prepare=lambda: self._fresh(metadata),
            run=keep_storage,
            blocks_in_use=_blocks_in_use,
        )

    def _floor(self) -> Case:
        """Return the case of a jitted identity on a cache."""

        def run(cache: jkv.Cache) -> None:
            for _ in range(self.workload.num_steps):
                cache, ids = self.pass_through(cache, self.seq_ids)
                ids.block_until_ready()
            self.cache = cache

        return Case(
            name=f"{NOTHING} {self.num_blocks}",
            prepare=lambda: self._fresh(self.started),
            run=run,
            calls=self.workload.num_steps,
            labels={
                "operation": "append",
                "contender": NOTHING,
                "pool": self.num_blocks,
                "storage": self.storage,
            },
        )

    def _fresh(self, metadata: jkv.Metadata) -> jkv.Cache:
        metadata = jax.block_until_ready(self.copy(metadata))
        return dataclasses.replace(self.cache, metadata=metadata)

    # All outputs of a call are ready at once: waiting for one suffices.

    def _donated(self, cache: jkv.Cache) -> jkv.Cache:
        for _ in range(self.workload.num_steps):
            cache, batch = self.append(cache, self.seq_ids)
            batch.status.block_until_ready()
        return cache

    def _hurried(self, cache: jkv.Cache) -> jkv.Cache:
        for _ in range(self.workload.num_steps):
            cache, batch = self.append(cache, self.seq_ids)
        batch.status.block_until_ready()
        return cache

    def _kept(self, cache: jkv.Cache) -> jkv.Cache:
        for _ in range(self.workload.num_steps):
            cache, batch = jkv.append(cache, self.seq_ids)
            batch.status.block_until_ready()
        return cache

    def _scan(self, cache: jkv.Cache) -> tuple[jkv.Cache, jkv.Batch]:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            return jkv.append(carry[0], self.seq_ids), None

        # Each step's batch is carried whole, so that XLA removes none of it.
        shapes = jax.eval_shape(jkv.append, cache, self.seq_ids)[1]
        empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        steps = self.workload.num_steps
        return jax.lax.scan(step, (cache, empty), None, length=steps)[0]

    def _scanned(self, cache: jkv.Cache) -> jkv.Cache:
        cache, batch = self.scan(cache)
        batch.status.block_until_ready()
        return cache

    def _freed(self, cache: jkv.Cache) -> jkv.Cache:
        cache, status = self.free(cache, self.branch_ids)
        status.block_until_ready()
        return cache

    def _forked(self, cache: jkv.Cache) -> jkv.Cache:
        cache, forked = self.fork(cache, self.branch_ids)
        forked.status.block_until_ready()
        return cache


def bare_loops(workload: Workload, num_blocks: int, order: list[int]) -> list[Case]:
    """Return the minimal Python implementation: lists, a deque, reference counts.

    Args:
      workload: the work.
      num_blocks: size of the pool.
      order: the free blocks, in allocation order.
    """
    T = workload.block_size
    full, tail = divmod(workload.branch_length, T)

    def start(lengths: list[int]) -> tuple[list[list[int]], list[int], Any, list[int]]:
        free, refs = collections.deque(order), [0] * num_blocks
        rows = [[free.popleft() for _ in range(-(-n // T))] for n in lengths]
        for row in rows:
            for block in row:
                refs[block] = 1
        return rows, list(lengths), free, refs

    def append(state: Any) -> Any:
        rows, lengths, free, _ = state
        for _ in range(workload.num_steps):
            for i, n in enumerate(lengths):
                if n % T == 0:
                    rows[i].append(free.popleft())
                lengths[i] = n + 1
        return state

    def release(state: Any) -> Any:
        rows, _, free, refs = state
        for row in rows:
            for block in reversed(row):
                refs[block] -= 1
                if refs[block] == 0:
                    free.append(block)
            row.clear()
        return state

    def fork(state: Any) -> Any:
        rows, _, free, refs = state
        for i in range(workload.num_branches):
            child = rows[i][:full]
            for block in child:
                refs[block] += 1
            if tail:
                block = free.popleft()
                refs[block] = 1
                child.append(block)
            rows.append(child)
        return state

    starts = workload.start_lengths.tolist()
    branches = [workload.branch_length] * workload.num_branches
    return [
        bookkeeping_case(
            operation=operation,
            contender=BARE,
            workload=workload,
            num_blocks=num_blocks,
            prepare=functools.partial(start, lengths),
            run=run,
            blocks_in_use=lambda state: num_blocks - len(state[2]),
        )
        for operation, lengths, run in (
            ("append", starts, append),
            ("free", branches, release),
            ("fork", branches, fork),
        )
    ]


def counts(verbs: Verbs) -> list[dict[str, Any]]:
    """Return a row per module of the compiled verbs."""
    rows = []
    for name, compiled in verbs.compiled().items():
        text = compiled.as_text()
        opcodes = [opcode for opcode, _ in _instructions(text)]
        entry = [op for op, entry in _instructions(text) if entry]
        cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
        cost = cost[0] if isinstance(cost, list) else cost
        rows.append(
            {
                "module": name,
                "pool": verbs.num_blocks,
                "instructions": len(opcodes),
                "entry_steps": sum(op not in FREE_OPCODES for op in entry),
                "fusions": opcodes.count("fusion"),
                "scatters": opcodes.count("scatter"),
                "loops": opcodes.count("while"),
                "copies": opcodes.count("copy"),
                "bytes_accessed": int(cost["bytes accessed"]),
                "temp_bytes": int(memory.temp_size_in_bytes),
            }
        )
    return rows


def verdicts(samples: dict[str, Samples], cases: list[Case]) -> list[dict[str, Any]]:
    """Return the targets and measured ratios, paired within rounds."""
    by_label = {
        (c.labels["operation"], c.labels["contender"], c.labels["pool"]): samples[
            c.name
        ]
        for c in cases
        if c.labels.get("storage") != "storage donated"
    }
    small, large = sorted({case.labels["pool"] for case in cases})
    rows = []

    def add(target: str, measured: float, limit: float) -> None:
        met = "met" if measured <= limit else "MISSED"
        rows.append(
            {"target": target, "measured": measured, "limit": limit, "verdict": met}
        )

    bare = by_label["append", BARE, large]
    scan = by_label["append", "jkv, in a scan", large]
    for how in ("eager, donated", "not waiting"):
        ratio = by_label["append", f"jkv, {how}", large].ratio_to(bare)
        add(f"append, {how}, {large} blocks / bare Python loop", ratio, 3.0)
    add(f"append, {large} blocks: us a step in a scan", scan.median * 1e6, 30.0)
    for operation, how in (
        ("append", "eager, donated"),
        ("append", "in a scan"),
        ("free", "eager, donated"),
        ("fork", "eager, donated"),
    ):
        of_small = by_label[operation, f"jkv, {how}", small]
        of_large = by_label[operation, f"jkv, {how}", large]
        text = f"{operation}, {how}: {large} blocks / {small} blocks"
        add(text, of_large.ratio_to(of_small), 1.3)
    return rows


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        type=pathlib.Path,
        metavar="CHECKOUT",
        help="root of another project's checkout (see README.md); may be repeated",
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, to see that it runs"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, help=f"default {RESULTS.name}, none if --quick"
    )
    arguments = parser.parse_args()
    workload, pools, rounds = Workload(), (4096, 65536), arguments.rounds
    if arguments.quick:
        workload = Workload(num_sequences=64, num_branches=8, max_context_length=512)
        pools, rounds = (256, 1024), min(rounds, 3)

    where = harness.machine()
    found, absent = peers.load(arguments.peer)
    print(harness.header("jkv bookkeeping: append, free, fork", where))
    print(
        f"  append: {workload.num_sequences} sequences, one token each, blocks of "
        f"{workload.block_size}, {workload.num_steps} steps a sample\n"
        f"  free, fork: {workload.num_branches} sequences of "
        f"{workload.branch_blocks} blocks\n"
        f"  {rounds} interleaved rounds after 3 warm-ups; microseconds per call"
    )
    cases, counted = [], []
    for pool in pools:
        for storage in (False, True):
            verbs = Verbs(workload, pool, storage)
            cases += verbs.cases()
            counted += [] if storage else counts(verbs)
        cases += bare_loops(workload, pool, verbs.free_order)
        for peer in found:
            cases += peer.cases(workload, pool)
    samples = harness.interleave(cases, rounds=rounds, seconds_per_case=3.0)
    where["load after"] = harness.machine()["load"]

    baseline = {
        (case.labels["operation"], case.labels["pool"]): samples[case.name]
        for case in cases
        if case.labels["contender"] == BARE
    }
    rows = []
    for case in cases:
        bare = baseline[case.labels["operation"], case.labels["pool"]]
        measured = samples[case.name]
        rows.append(
            {**case.labels, **measured.row(), "by_bare": measured.ratio_to(bare)}
        )
    rows.sort(key=lambda row: (row["operation"], row["pool"], "peer" in row))
    columns = {
        "operation": "",
        "pool": "blocks",
        "contender": "called",
        "storage": "",
        "median": "median us",
        "p10": "p10",
        "p90": "p90",
        "by_bare": "x bare loop",
        "samples": "n",
    }
    print("\n" + harness.table(rows, columns))
    targets = verdicts(samples, cases)
    headings = {"target": "target", "measured": "measured", "limit": "at most"}
    print("\n" + harness.table(targets, {**headings, "verdict": ""}))
    print("\ncompiled (metadata only, donated); bytes as XLA's cost analysis has them")
    print(harness.table(counted, {key: key.replace("_", " ") for key in counted[0]}))
    print("\npeers")
    for peer in found:
        print(f"  {peer.name} ({peer.version}): {peer.note}.")
    for name, reason in absent.items():
        print(f"  {name}: ABSENT ({reason})")

    path = arguments.json or (None if arguments.quick else RESULTS)
    if path:
        listed = [
            {"name": peer.name, "version": peer.version, "note": peer.note}
            for peer in found
        ]
        run = {
            "benchmark": "operations",
            "machine": where,
            "workload": dataclasses.asdict(workload),
            "rounds": rounds,
            "unit": "us",
            "rows": rows,
            "targets": targets,
            "compiled": counted,
            "peers": listed,
            "absent peers": absent,
        }
        harness.save(path, run)
        print(f"\nwritten to {path.name}")


def _used_pool(cache: jkv.Cache, workload: Workload) -> jkv.Cache:
    """Allocate every block once and free them in another order."""
    size, num_sequences = workload.block_size, workload.num_sequences
    cache, opened = jkv.allocate(cache, np.zeros(num_sequences, np.int32))
    grow = jax.jit(
        functools.partial(jkv.append, max_query_length=size), donate_argnums=0
    )
    tokens = np.full((num_sequences,), size, np.int32)
    for _ in range(cache.num_blocks // num_sequences):
        cache, batch = grow(cache, opened.seq_ids, tokens)
        jkv.raise_for_status(batch.status)
    order = np.random.default_rng(0).permutation(np.asarray(opened.seq_ids))
    cache, status = jkv.free(cache, order)
    jkv.raise_for_status(status)
    return cache


def _grown(cache: jkv.Cache, lengths: np.ndarray) -> tuple[jkv.Cache, jax.Array]:
    """Open sequences with `lengths` tokens."""
    cache, opened = jkv.allocate(cache, np.zeros_like(lengths))
    cache, batch = jkv.append(
        cache, opened.seq_ids, lengths, capacity=int(lengths.sum())
    )
    jkv.raise_for_status(batch.status)
    return cache, opened.seq_ids


def _blocks_in_use(cache: jkv.Cache) -> int:
    return cache.num_blocks - int(jkv.num_free_blocks(cache))


def _instructions(text: str) -> list[tuple[str, bool]]:
    """Return each HLO instruction's opcode, and True if it is in the entry."""
    found, in_entry = [], False
    for line in text.splitlines():
        if line.endswith("{"):
            in_entry = line.startswith("ENTRY")
        match = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*)\(", line)
        if match:
            found.append((match.group(1), in_entry))
    return found


if __name__ == "__main__":
    main()
