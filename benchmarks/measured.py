"""Generate the tables of docs/measured.md from the stored results.

    python benchmarks/measured.py

Each table is between `<!-- name -->` and `<!-- end -->`; the rest is written by hand.
`tests/package/test_pages.py` detects outdated tables.
"""

import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "measured.md"
RESULTS = ROOT / "benchmarks" / "results"

POOL = 65_536
# The page's label of a contender, and its name in the results of each operation.
OPERATIONS = ("append", "free", "fork")
BOOKKEEPING = {
    "a bare Python loop": ["bare Python loop"] * 3,
    "jkv, called from Python, donated, each call waited for": (
        ["jkv, eager, donated"] * 3
    ),
    "jkv inside `lax.scan`": ["jkv, in a scan", "", ""],
    "nano-vllm, on the host": ["nano-vllm BlockManager, host"] * 2 + [""],
    "vLLM 0.33, on the host": ["vLLM KVCacheManager, host"] * 2 + [""],
    "sglang-jax, on the host": (
        ["sglang-jax PagedTokenToKVPoolAllocator, host"] * 2 + [""]
    ),
    "Levanter, append inside `lax.scan`": [
        *("Levanter PageTable, in a scan", "Levanter PageTable, eager"),
        "Levanter PageTable, in jit",
    ],
    "MaxText before May 2026, append inside `lax.scan`": [
        *("MaxText PageManager, in a scan", "MaxText PageManager, eager", "")
    ],
}
BY_OURS = "wall by jkv's"
CASES = {
    "1 text": "1 text, 48 tokens",
    "16 texts": "16 texts, 24 tokens",
    "64 texts": "64 texts, 16 tokens",
    "prompt of 1,000": "a prompt of 1,000 tokens",
    "queue of 64 questions": "64 questions, 16 at a time, 32 tokens",
    "new process, cold": "a new process to its first token",
    "new process, again": "the same again",
}
QUEUES = {
    "1,024 running": "1,024 running",
    "1,024 running, 10,000 waiting": "the same, 10,000 waiting",
    "1,024 running, 10,000 waiting, 4 end in a step": "the same, 4 end in a step",
}
ROLLOUTS = {
    "jkv": "jkv, the whole queue in one jit",
    "jkv, engine": "jkv, the engine",
    "jkv, refilled by the host": "jkv, refilled by the host every 128 steps",
    "tunix, vanilla sampler": "tunix, vanilla sampler",
    "transformers, padded": "transformers, batches with padding",
}
GUESSES = {
    ("repetitive, look-up", 1): "look-up, the most repetitive",
    ("repetitive, look-up", 8): "look-up, the 8 most repetitive",
    ("all, look-up", 46): "look-up, all 46 in the queue, 8 running",
    ("repetitive, draft model", 8): "draft model, the 8 most repetitive",
    ("nothing accepted, draft model", 8): (
        "a draft of one random layer, nothing accepted"
    ),
}
GUESS_AIMS = {"repetitive, look-up": 1.5, "nothing accepted, draft model": 0.97}
PLACEMENTS = (
    "8 kv heads, spread",
    "2 kv heads, each on several devices",
    "tokens of each block, spread",
    "a pool for each",
)


def read_rows(name: str, *benchmarks: str, key: str = "rows") -> list[dict[str, Any]]:
    """Return the rows of all runs of some benchmarks in a results file, newest last."""
    runs = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    return [row for run in runs if run["benchmark"] in benchmarks for row in run[key]]


def list_bookkeeping() -> Iterator[Sequence[str]]:
    """Yield the time of a call, by contender and operation."""
    rows = read_rows("operations", "operations")
    found = {
        (row["operation"], row["contender"]): row["median"]
        for row in rows
        if row["pool"] == POOL and row.get("storage") != "storage donated"
    }
    for label, names in BOOKKEEPING.items():
        each = zip(OPERATIONS, names, strict=True)
        yield label, *(f"{found[key]:,.0f}" if key[1] else "" for key in each)


def list_generation() -> Iterator[Sequence[str]]:
    """Yield jkv's seconds, the peers' ratios to them, and their ratios to the floor."""
    rows = read_rows("real", "smollm2, 2 threads", "smollm2, 2 threads, two rounds")
    found = {(row["case"], row["contender"]): row for row in rows}
    for case, label in CASES.items():
        ours = found[case, "jkv"]
        others = (
            f"{found[case, contender][BY_OURS]:.2f}"
            for contender in ("transformers", "llama.cpp")
        )
        floor = ours.get("wall by floor")
        yield (
            label,
            f"{ours['wall']:.2f}",
            *others,
            f"{floor:.2f}" if floor else "",
        )


def list_queue() -> Iterator[Sequence[str]]:
    """Yield the time of a step in the queue and in a bare loop."""
    for row in read_rows("scheduling", "scheduling"):
        if label := QUEUES.get(row["workload"]):
            numbers = (f"{row[key]:,.0f}" for key in ("bare loop", "median", "added"))
            aim = row.get("limit", "").removesuffix(" us")
            met = f"{aim}: {'met' if row['met'] else 'missed'}" if aim else ""
            yield label, *numbers, met


def list_rollouts() -> Iterator[Sequence[str]]:
    """Yield tokens per second of whole queues."""
    given = "rollouts", "rollouts: sharegpt"
    rates = {row["contender"]: row["tokens/s"] for row in read_rows(*given)}
    aims = {row["target"]: row for row in read_rows(*given, key="targets")}
    for contender, label in ROLLOUTS.items():
        times = f"{rates['jkv'] / rates[contender]:.3g}"
        aim = aims.get(f"jkv / {contender}", {})
        if "at least" in aim:
            times += f" (aim {aim['at least']:g}: {aim['verdict']})"
        yield label, f"{rates[contender]:,.0f}", times


def list_guesses() -> Iterator[Sequence[str]]:
    """Yield generation with speculative decoding and without."""
    rows = read_rows("strategies", "strategies, speculation")
    found = {(row["workload"], row["prompts"]): row for row in rows}
    for (workload, prompts), label in GUESSES.items():
        row = found[workload, prompts]
        rates = (f"{row[key]:,.0f}" for key in ("plain tokens/s", "tokens/s"))
        times, aim = row["speed-up"], GUESS_AIMS.get(workload)
        verdict = f"{aim}: {'met' if times >= aim else 'missed'}" if aim else ""
        yield label, *rates, f"{times:.2f}", verdict


def list_placements() -> Iterator[Sequence[str]]:
    """Yield a layer's collectives, and the argument bytes per device."""
    rows = read_rows("devices", "devices")
    found = {(row["placement"], row["devices"]): row for row in rows}
    for placement in PLACEMENTS:
        one, eight = found[placement, 1], found[placement, 8]
        given = [f"{row['bytes_given'] / 1024:,.0f}" for row in (eight, one)]
        spread = given[0] if given[0] == given[1] else f"{given[0]} ({given[1]})"
        yield placement, eight["collectives"], spread


TABLES = {
    "bookkeeping": list_bookkeeping,
    "generation": list_generation,
    "queue": list_queue,
    "rollouts": list_rollouts,
    "guesses": list_guesses,
    "placements": list_placements,
}


def write_tables(page: str) -> str:
    """Return the page with its table rows replaced by the results'."""
    for name, list_rows in TABLES.items():
        rows = "".join(f"| {' | '.join(row)} |\n" for row in list_rows())
        pattern = rf"(<!-- {name} -->\n\|.*\n\|[-| :]*\n)(?:\|.*\n)*(?=<!-- end -->)"
        page, count = re.subn(pattern, lambda m, rows=rows: m[1] + rows, page)
        if count != 1:
            raise ValueError(
                f"{PAGE.name} must have one table <!-- {name} --> ... <!-- end -->"
            )
    return page


if __name__ == "__main__":
    PAGE.write_text(write_tables(PAGE.read_text()))
