"""Coverage of JSON schemas from public repositories, compared to llguidance.

    python benchmarks/schemas.py FOLDER [--count 400] [--seed 50]

FOLDER has MaskBench's files (maskbench/data of
https://github.com/guidance-ai/jsonschemabench), one schema each, with valid and invalid
instances; a sample of them is drawn by seed. The vocabulary is single bytes, so that
only schema compilation is compared. Instances are serialized by Python's `json`: a
valid one may be rejected for the order of its properties, or for unmentioned
properties.
"""

import argparse
import collections
import json
import pathlib
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import harness
import llguidance

from jkv.grammar.bounds import Bounds
from jkv.grammar.determinization import determinize
from jkv.grammar.languages import MAX_BYTES
from jkv.grammar.parts import DEPTH, RECURSION, WHITESPACE
from jkv.grammar.schema.compilation import Reading, compile_schema

RESULTS = pathlib.Path(__file__).parent / "results" / "schemas.json"
READING = Reading(WHITESPACE, DEPTH, RECURSION, False)
Matches = Callable[[bytes], bool]


class SingleBytes:
    """A byte vocabulary with llguidance's interface."""

    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a string."""
        return list(text.encode())


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(SingleBytes()))


def ours(schema: Any) -> Matches:
    """Compile a schema by jkv; return its membership test."""
    bounds = Bounds(MAX_BYTES, timeout=60)
    return determinize(compile_schema(schema, READING, bounds), bounds).matches


def theirs(schema: Any) -> Matches:
    """Compile a schema by llguidance; return its membership test."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))

    def begin() -> Any:
        return llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)

    if begin().is_error():
        raise ValueError(begin().get_error())

    def matches(text: bytes) -> bool:
        matcher = begin()
        return bool(matcher.consume_tokens(list(text)) and matcher.is_accepting())

    return matches


def measure(paths: Iterable[pathlib.Path], make: Callable[[Any], Matches]) -> Any:
    """Compile all schemas; return counts of schemas and instances, and errors."""
    counts, reasons = collections.Counter[str](), collections.Counter[str]()
    seconds = []
    for path in paths:
        case = json.loads(path.read_text(encoding="utf-8"))
        began = time.process_time()
        try:
            matches = make(case["schema"])
        except ValueError as error:
            reasons[re.sub(r" at #.*|[0-9,]+", "", str(error))[:60]] += 1
            continue
        finally:
            seconds.append(time.process_time() - began)
        counts["served"] += 1
        for test in case["tests"]:
            is_text = matches(json.dumps(test["data"], ensure_ascii=False).encode())
            kind = "valid" if test["valid"] else "invalid"
            counts[kind] += 1
            counts[f"{kind} that are texts"] += is_text
    row = {"schemas": len(seconds), **counts, "median s": statistics.median(seconds)}
    return row, dict(reasons.most_common(12))


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=50)
    options = parser.parse_args()
    names = sorted(path.name for path in options.folder.glob("*.json"))
    count = min(options.count, len(names))
    sample = random.Random(options.seed).sample(names, count)
    where, rows, reasons = harness.machine(), [], {}
    print(harness.header("jkv: schemas", where))
    for name, make in (("jkv", ours), ("llguidance", theirs)):
        row, reasons[name] = measure((options.folder / one for one in sample), make)
        rows.append({"compiler": name, **row})
    print("\n" + harness.table(rows, {key: key for key in rows[0]}))
    print(json.dumps(reasons, indent=1))
    run = {"benchmark": "schemas", "machine": where, "seed": options.seed}
    harness.save(RESULTS, run | {"files": len(names), "rows": rows, "refused": reasons})


if __name__ == "__main__":
    main()
