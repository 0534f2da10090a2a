"""Grammars: table sizes, compilation time, and the time of a step's mask.

    python benchmarks/grammars.py [--quick]

The vocabulary is synthetic and reproducible: 256 single bytes, the words of the
standard library's sources with and without a leading space in order of appearance, then
spaces and digits. It has the shape of a byte-level BPE vocabulary, but not its
frequencies. The last token is the end token.

The schema has 20 fields: strings of several kinds, bounded numbers, lists, enums, and a
nested object. "Dense" is a bit and a four-byte next state for each pair of state and
token.

Steps mask the logits of 64 sequences in states spread over the automaton, compared to a
copy of the logits, which reads and writes as many bytes.
"""

import argparse
import functools
import pathlib
import re
import time
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import Case

from jkv.grammar import Grammar, Vocabulary, from_json_object, from_json_schema
from jkv.grammar.token_table import trie_of

RESULTS = pathlib.Path(__file__).parent / "results" / "grammars.json"
AIM_BYTES = 4 * 2**20  # of the tables of 20 fields
ROWS = 64

_KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer", "minimum": 0, "maximum": 1_000_000},
    {"type": "string", "format": "date-time"},
    {"type": "number", "minimum": 0},
    {"enum": ["draft", "open", "closed", "cancelled"]},
    {"type": "array", "items": {"type": "string"}},
    {"type": "boolean"},
    {"type": "string", "maxLength": 40},
    {"anyOf": [{"type": "null"}, {"type": "string", "format": "email"}]},
)
_NAMES = (
    "identifier title created_at price status labels is_active summary contact owner "
    "quantity updated_at discount priority tags is_public note reviewer address weight"
).split()


def make_schema() -> dict[str, Any]:
    """Return the schema of 20 fields."""
    fields = {name: _KINDS[i % len(_KINDS)] for i, name in enumerate(_NAMES)}
    street = {"street": {"type": "string"}, "city": {"type": "string"}}
    fields["address"] = {"type": "object", "properties": street, "required": ["city"]}
    required = [name for place, name in enumerate(_NAMES) if place % 3]
    return {"type": "object", "properties": fields, "required": required}


def make_vocabulary(size: int) -> Vocabulary:
    """Return `size` tokens, reproducible for one version of Python."""
    tokens = {bytes([byte]): None for byte in range(256)}
    for path in sorted(pathlib.Path(re.__file__).parents[1].rglob("*.py")):
        text = path.read_text(errors="ignore")
        for word in re.findall(r" ?[A-Za-z]+|[^\sA-Za-z0-9]+|\d{1,3}| +", text):
            tokens.setdefault(word.encode()[:24])
        if len(tokens) >= size - 1:
            break
    number = 0
    while len(tokens) < size - 1:
        tokens.setdefault(f" {number}".encode())
        number += 1
    return Vocabulary([*list(tokens)[: size - 1], None], end_tokens=[size - 1])


def make_cases(grammar: Grammar, size: int) -> list[Case]:
    """Return the cases of a step and of a copy."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((ROWS, size), np.float32))
    spread = np.linspace(0, grammar.num_states - 1, ROWS).astype(np.int32)
    state, tokens = jnp.asarray(spread), jnp.argmax(logits, axis=1).astype(jnp.int32)
    functions = {
        "process": (Grammar.process, (grammar, state, logits)),
        "process and advance": (
            lambda g, s, x, t: (g.process(s, x), g.advance(s, t)),
            (grammar, state, logits, tokens),
        ),
        "a copy of the logits": (lambda x: x + 1.0, (logits,)),
    }
    return [
        Case(
            name=name,
            prepare=functools.partial(tuple, arguments),
            run=functools.partial(_run, jax.jit(function)),
        )
        for name, (function, arguments) in functions.items()
    ]


def _run(function: Any, arguments: Any) -> Any:
    return jax.block_until_ready(function(*arguments))


def measure_tables(size: int) -> tuple[list[dict[str, Any]], Grammar]:
    """Compile the grammars; return a row of each, and the schema's grammar."""
    vocabulary = make_vocabulary(size)
    began = time.perf_counter()
    trie_of(vocabulary)
    once = time.perf_counter() - began
    rows, found = [], []
    makers = {
        "schema of 20 fields": functools.partial(from_json_schema, make_schema()),
        "any JSON object, depth 2": functools.partial(from_json_object, depth=2),
    }
    for name, make in makers.items():
        began = time.perf_counter()
        grammar = make(vocabulary)
        seconds = time.perf_counter() - began
        found.append(grammar)
        dense = grammar.num_states * (size * 4 + -(-size // 8))
        rows.append(
            {
                "grammar": name,
                "states": grammar.num_states,
                "sets": grammar.masks.shape[0],
                "bytes": grammar.nbytes,
                "dense bytes": dense,
                "aim bytes": AIM_BYTES if name.startswith("schema") else None,
                "compile s": seconds,
                "vocabulary s": once,
            }
        )
    return rows, found[0]


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--quick", action="store_true", help="few tokens, to see that it runs"
    )
    options = parser.parse_args()
    if options.quick:
        options.vocabulary, options.rounds = 2_000, 2
    where = harness.machine()
    print(harness.header("jkv: grammars", where))
    tables, grammar = measure_tables(options.vocabulary)
    print("\n" + harness.table(tables, {key: key for key in tables[0]}))
    cases = make_cases(grammar, options.vocabulary)
    samples = harness.interleave(cases, rounds=options.rounds)
    copy = samples["a copy of the logits"]
    steps = [
        {
            "step": case.name,
            **samples[case.name].row(1e3),
            "times a copy": samples[case.name].ratio_to(copy),
        }
        for case in cases
    ]
    where["load after"] = harness.machine()["load"]
    print("\nmilliseconds\n" + harness.table(steps, {key: key for key in steps[0]}))
    if not options.quick:
        run = {"benchmark": "grammars", "machine": where, "unit": "ms"}
        run["sizes"] = {"vocabulary": options.vocabulary, "rows": ROWS}
        harness.save(RESULTS, run | {"rows": steps, "tables": tables})
        print(f"\nwritten to {RESULTS.name}")


if __name__ == "__main__":
    main()
