"""Logits processors: overhead of a grammar per step, and savings by forced tokens.

    python benchmarks/logits_processors.py [--only PART ...] [--quick]

* step-512, step-2048, by hidden size: a decode step of 64 sequences, 8 layers, a
  vocabulary of 131,072 tokens, random weights in float32; with the grammar of a JSON
  schema of 20 fields and without, greedy and sampled at temperature 1.
* guesses: sequences of a JSON schema by the bundled model, with forced tokens as draft
  tokens and without; with all tokenizations of forced text, and with one.

The vocabulary is synthetic: bytes, digits, and syllables with and without a leading
space, in a fixed order.

A part is a separate run in `results/logits_processors.json`.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from decoder import Shapes, compute_logits, describe_weights
from harness import Case, judge

import jkv
from jkv import decoding
from jkv.grammar import (
    Grammar,
    Vocabulary,
    from_json_schema,
    vocabulary_of,
    with_one_spelling,
)

ROOT = pathlib.Path(__file__).parent.parent
BUNDLED = ROOT / "examples" / "models" / "pydoc"
RESULTS = pathlib.Path(__file__).parent / "results" / "logits_processors.json"
sys.path.insert(0, str(ROOT / "examples"))  # the examples are not a package

import pretrained  # noqa: E402  (found through the line above)

NUM_TOKENS, NUM_SEQUENCES, PROMPT, NUM_STEPS = 2**17, 64, 32, 2
STATIC = ("model", "max_new_tokens", "max_running", "row_counts")


@dataclasses.dataclass(frozen=True)
class Options:
    """Rounds of each part, and True for a smoke test with tiny sizes."""

    rounds: int
    quick: bool


# A part returns its rows and rows of limits.
Part = tuple[list[Any], list[Any]]


def make_vocabulary(num_tokens: int) -> Vocabulary:
    """Return a plausible vocabulary; the last token is the end token."""
    letters = [chr(97 + i) for i in range(26)]
    pieces = [bytes([i]) for i in range(256)]
    pieces += [str(i).encode() for i in range(10, 1000)]
    for length in (2, 3, 4):
        for parts in itertools.product(letters, repeat=length):
            word = "".join(parts).encode()
            pieces += [word, b" " + word]
            if len(pieces) >= num_tokens - 1:
                break
        if len(pieces) >= num_tokens - 1:
            break
    return Vocabulary([*pieces[: num_tokens - 1], None], end_tokens=[num_tokens - 1])


def make_schema(num_fields: int) -> dict[str, Any]:
    """Return a JSON schema of an object with fields of five kinds."""
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer"},
        {"type": "boolean"},
        {"enum": ["small", "medium", "large"]},
        {"type": "array", "items": {"type": "number"}},
    ]
    fields = {
        f"field_{number}_of_it": kinds[number % len(kinds)]
        for number in range(num_fields)
    }
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


@functools.cache
def make_grammar(num_tokens: int) -> Grammar:
    """Return the grammar of the schema of 20 fields."""
    return from_json_schema(make_schema(20), make_vocabulary(num_tokens))


def measure_steps(hidden: int, options: Options) -> Part:
    """Return a row for each sampling method, with a grammar and without."""
    num_tokens = 2**12 if options.quick else NUM_TOKENS
    steps = Steps(128 if options.quick else hidden, num_tokens)
    samples = harness.interleave(steps.cases(), rounds=options.rounds, warmup=2)
    rows, limits = [], []
    for how in ("greedy", "drawn"):
        plain, processor = samples[how], samples[f"{how}, processed"]
        for name in (how, f"{how}, processed"):
            row = {"hidden": hidden, "step": name} | samples[name].row(1e3)
            rows.append(row | {"by plain": samples[name].ratio_to(plain)})
        ratio = processor.ratio_to(plain)
        limits.append(judge(f"a processed step, {how}, by one without", ratio, 1.05))
    grammar = make_grammar(num_tokens)
    rows[0] |= {"states": grammar.num_states, "table bytes": grammar.nbytes}
    return rows, limits


class Steps:
    """Decode steps of one model, with constrained sequences or not."""

    def __init__(self, hidden: int, num_tokens: int) -> None:
        """Create the model; all cases share its weights."""
        self.shapes = Shapes(
            num_layers=8,
            num_heads=hidden // 64,
            num_kv_heads=max(1, hidden // 256),
            head_dim=64,
            hidden_dim=2 * hidden,
            vocabulary=num_tokens,
        )
        key = jax.random.key(0)
        described = describe_weights(self.shapes)
        leaves, structure = jax.tree.flatten(described)
        keys = jax.random.split(key, len(leaves))
        weights = [
            jax.random.normal(k, leaf.shape, jnp.float32) * leaf.shape[0] ** -0.5
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        self.params = jax.tree.unflatten(structure, weights)
        self.grammar = make_grammar(num_tokens)
        config = jkv.CacheConfig.for_context_length(
            2 * PROMPT,
            max_sequences=NUM_SEQUENCES,
            num_layers=self.shapes.num_layers,
            num_kv_heads=self.shapes.num_kv_heads,
            head_dim=self.shapes.head_dim,
            dtype=jnp.float32,
        )
        self.cache = jkv.init(config)
        random = np.random.default_rng(0)
        self.prompts = random.integers(0, 1000, (NUM_SEQUENCES, PROMPT), np.int32)

    def __call__(
        self, params: Any, tokens: jax.Array, cache: jkv.Cache, batch: jkv.Batch
    ) -> tuple[jax.Array, jkv.Cache]:
        """Run one step, as a `jkv.Model`."""

        def attend(layer: int, *given: jax.Array) -> jax.Array:
            nonlocal cache
            queries, keys, values = given
            cache = jkv.write(cache, layer, batch, keys, values)
            return jkv.attend(cache, layer, batch, queries)

        logits = compute_logits(
            params, tokens, batch.positions, attend, self.shapes, batch.last_rows
        )
        return logits, cache

    def cases(self) -> list[Case]:
        """Return a case for each sampling method, with a grammar and without."""
        temperatures = {"greedy": 0.0, "drawn": 1.0}
        return [
            self._case(name + suffix, temperature, logits_processor)
            for name, temperature in temperatures.items()
            for suffix, logits_processor in (("", None), (", processed", self.grammar))
        ]

    def _case(
        self, name: str, temperature: float, logits_processor: Grammar | None
    ) -> Case:
        sampling = jkv.Sampling(temperature=jnp.full((NUM_SEQUENCES,), temperature))
        prefill = jax.jit(decoding.prefill, static_argnames=STATIC)
        decode = jax.jit(
            decoding.decode,
            static_argnames="model",
            donate_argnames=("cache", "state"),
        )
        begun = prefill(
            self,
            self.params,
            self.cache,
            self.prompts,
            max_new_tokens=PROMPT,
            max_running=NUM_SEQUENCES,
            row_counts=(NUM_SEQUENCES,),
            sampling=sampling,
            logits_processor=logits_processor,
        )
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

        def run(given: Any) -> Any:
            cache, state = decode(
                self,
                self.params,
                *given,
                sampling=sampling,
                num_steps=np.int32(NUM_STEPS),
                logits_processor=logits_processor,
            )
            state.result.tokens.block_until_ready()
            return state

        def check(state: Any) -> None:
            # All 64 sequences are running, with one token per step.
            assert bool(state.is_running.all())
            assert (np.asarray(state.result.lengths) == 1 + NUM_STEPS).all()

        return Case(
            name=name,
            prepare=lambda: jax.block_until_ready(copy(begun)),
            run=run,
            calls=NUM_STEPS,
            check=check,
        )


def measure_guesses(options: Options) -> Part:
    """Return the steps of constrained sequences, with draft tokens and without."""
    del options  # counts, no times
    model, params = pretrained.load(BUNDLED, jnp.float32)
    vocabulary = vocabulary_of(
        pretrained.load_tokenizer(BUNDLED), tuple(model.config.stop_tokens)
    )
    kinds: list[dict[str, Any]] = [{"type": "boolean"}, {"enum": ["red", "green"]}]
    names = "is_public is_function has_arguments return_annotation deprecated_since"
    fields = {name: kinds[i % 2] for i, name in enumerate(names.split())}
    schema = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    many = from_json_schema(schema, vocabulary, whitespace="")
    one, count = with_one_spelling(many, vocabulary), 8
    tokenizer = pretrained.load_tokenizer(BUNDLED)
    starts = "The with statement|A list is|To open a file|This function".split("|")
    prompts = [tokenizer.encode(text).ids for text in 2 * starts]
    cache = jkv.init(
        jkv.CacheConfig.for_context_length(
            192, max_sequences=count, dtype=jnp.float32, **model.cache_fields
        )
    )
    generate = jax.jit(jkv.generate, static_argnames=STATIC)
    rows: list[dict[str, Any]] = []
    # Prompt lookup runs only if it should pay off; forced tokens always do.
    lookup = decoding.PromptLookup(num_tokens=7)
    for name, grammar, speculate in (
        ("without speculation", many, None),
        ("with speculation", many, lookup),
        ("one spelling, without speculation", one, None),
        ("one spelling, with speculation", one, lookup),
    ):
        _, result = generate(
            model,
            params,
            cache,
            prompts,
            max_new_tokens=128,
            sampling=jkv.Sampling(temperature=0.7),
            logits_processor=grammar,
            speculate=speculate,
        )
        texts = [
            tokenizer.decode(row[:n].tolist())
            for row, n in zip(
                np.asarray(result.tokens), np.asarray(result.lengths), strict=True
            )
        ]
        for text in texts:
            assert json.loads(text).keys() == fields.keys()
        counts = result.statistics
        rows.append(
            {
                "sequences": name,
                "steps": int(counts.num_steps),
                "new tokens": int(result.lengths.sum()),
                "guessed": int(counts.draft_tokens),
                "accepted": int(counts.accepted_tokens),
            }
        )
    what = "steps of JSON with speculation, by those without"
    return rows, [
        judge(what, rows[1]["steps"] / rows[0]["steps"], 0.5),
        judge(f"{what}, one spelling", rows[3]["steps"] / rows[2]["steps"], 0.5),
    ]


PARTS = {
    "step-512": functools.partial(measure_steps, 512),
    "step-2048": functools.partial(measure_steps, 2048),
    "guesses": measure_guesses,
}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    given = parser.parse_args()
    options = Options(2 if given.quick else given.rounds, given.quick)
    for name in given.only:
        where = harness.machine()
        rows, limits = PARTS[name](options)
        where["load after"] = harness.machine()["load"]
        print(harness.header(f"\nLogits processors: {name}", where))
        columns = {key: key for row in rows for key in row}
        print("\n" + harness.table(rows, columns))
        print("\n" + harness.table(limits, {key: key for key in limits[0]}), flush=True)
        if not given.quick:
            title = f"logits processors, {name}"
            run = {"benchmark": title, "machine": where, "rows": rows, "limits": limits}
            harness.save(given.json, run)


if __name__ == "__main__":
    main()
