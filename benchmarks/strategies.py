"""Decoding strategies beside plain decoding: speculation, and beam search.

    python benchmarks/strategies.py [--rounds 15] [--only speculation|beams]

Speculation, on the bundled model in float32: tokens a second of `jkv.generate` with
guesses and without, the same call otherwise, in turns.

* repetitive: each prompt is a listing or a table, eight times over; greedy.
* nothing accepted, look-up: the same prompts at temperature 2, guesses for every token
  that occurred before; hardly one is right.
* nothing accepted, draft model: a model of one random layer drafts.

Beam search: `jkv.beam_search` beside `transformers`, the same prompts and beams: tokens
a second, and the blocks at the peak beside those of beams that share nothing.
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # the examples are no package

import pretrained  # noqa: E402

import jkv  # noqa: E402
from jkv.decoding import DraftModel, PromptLookup, Sampling  # noqa: E402

FOLDER = ROOT / "examples" / "models" / "pydoc"
RESULTS = pathlib.Path(__file__).parent / "results" / "strategies.json"
NEW_TOKENS, BEAM_TOKENS, NUM_BEAMS = 256, 48, 4
PARAGRAPHS = (
    'The "with" statement is used to wrap the execution of a block with methods '
    "defined by a context manager. This allows common try, except and finally usage "
    "patterns to be encapsulated for convenient reuse.",
    "Return a list of the names of the entries in the directory given by path. The "
    "list is in arbitrary order, and does not include the special entries.",
    "A class definition defines a class object. The inheritance list usually gives a "
    "list of base classes, so each item in the list should evaluate to a class object.",
    "The import statement combines two operations; it searches for the named module, "
    "then it binds the results of that search to a name in the local scope.",
)
# Listings and tables, which the model goes on repeating.
REPEATED = (
    ">>> x = [1, 2, 3]\n>>> y = [1, 2, 3]\n",
    "| int | an integer | 4 |\n| float | a number | 8 |\n",
    ">>> s = (4, 5, 6)\n>>> t = (4, 5, 6)\n",
    "| str | a string | 1 |\n| bytes | some bytes | 2 |\n",
)
TIMES = 8
GREEDY, HOT = Sampling(), Sampling(temperature=2.0, seeds=1)

generate = jax.jit(
    jkv.generate, static_argnames=("model", "max_new_tokens"), donate_argnames="cache"
)
beam_search = jax.jit(
    jkv.beam_search,
    static_argnames=("model", "num_beams", "max_new_tokens", "num_return"),
    donate_argnames="cache",
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """The bundled model."""

    model: Any
    params: Any
    tokenizer: Any

    def prompts(self, count: int, texts: tuple[str, ...]) -> np.ndarray:
        """Return texts, the first ones again at the end, as i32[count, P]."""
        # Later ones begin later, so that no two are the same.
        ids = [
            self.tokenizer.encode(texts[i % len(texts)]).ids[i:] for i in range(count)
        ]
        rows = np.full((count, max(map(len, ids))), -1, np.int32)
        for row, tokens in zip(rows, ids, strict=True):
            row[: len(tokens)] = tokens
        return rows

    def cache(self, rows: int, length: int) -> jkv.Cache:
        """Return a cache for texts of a length."""
        config = jkv.CacheConfig.for_context_length(
            length, max_sequences=rows, dtype=jnp.float32, **self.model.cache_fields
        )
        return jkv.init(config)

    def random_draft(self, rows: int, length: int) -> DraftModel:
        """Return a draft model that knows nothing: one layer, tokens mixed up."""
        old = self.model.config
        config = dataclasses.replace(
            old, num_layers=1, windows=old.windows[:1], ropes=old.ropes[:1]
        )
        model = dataclasses.replace(self.model, config=config)
        first = jax.tree.map(lambda weights: weights[:1], self.params["layers"][0])
        params = dict(self.params, layers=[first])
        params["embedding"] = params["embedding"][::-1]
        fields = dict(self.model.cache_fields, num_layers=1)
        cache = jkv.init(
            jkv.CacheConfig.for_context_length(
                length, max_sequences=rows, dtype=jnp.float32, **fields
            )
        )
        return DraftModel(model=model, params=params, cache=cache)


class Run:
    """One way to generate, whose cache goes from call to call."""

    def __init__(self, subject: Subject, prompts: np.ndarray, **options: Any):
        self._subject, self._prompts, self._options = subject, prompts, options
        length = prompts.shape[1] + NEW_TOKENS
        self._cache = subject.cache(len(prompts), length)
        self.result: Any = None

    def __call__(self, _: object) -> None:
        """Generate once."""
        self._cache, self.result = generate(
            self._subject.model,
            self._subject.params,
            self._cache,
            self._prompts,
            max_new_tokens=NEW_TOKENS,
            **self._options,
        )
        self.result.tokens.block_until_ready()


def measure_speculation(subject: Subject, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each workload."""
    rows = []
    for kind, count in [
        ("repetitive", 1),
        ("repetitive", 8),
        ("nothing accepted, look-up", 8),
        ("nothing accepted, draft model", 8),
    ]:
        prompts = subject.prompts(count, tuple(text * TIMES for text in REPEATED))
        length = prompts.shape[1] + NEW_TOKENS
        sampling, speculate = GREEDY, PromptLookup()
        if kind == "nothing accepted, look-up":
            sampling, speculate = HOT, PromptLookup(min_ngram=1)
        elif kind == "nothing accepted, draft model":
            speculate = subject.random_draft(count, length)
        plain = Run(subject, prompts, sampling=sampling)
        guessing = Run(subject, prompts, sampling=sampling, speculate=speculate)
        samples = harness.interleave(
            [
                harness.Case(name="plain", prepare=lambda: None, run=plain),
                harness.Case(name="guessing", prepare=lambda: None, run=guessing),
            ],
            rounds=rounds,
            warmup=2,
        )
        # Looked up or drafted for greedy texts, they are the same.
        same = np.array_equal(plain.result.tokens, guessing.result.tokens)
        counts, num_tokens = guessing.result.statistics, int(plain.result.lengths.sum())
        rows.append(
            {
                "workload": kind,
                "prompts": count,
                "same text": same,
                "plain tokens/s": num_tokens / samples["plain"].median,
                "tokens/s": num_tokens / samples["guessing"].median,
                "speed-up": samples["plain"].ratio_to(samples["guessing"]),
                "guessed": int(counts.draft_tokens),
                "accepted": int(counts.accepted_tokens),
                "plain steps": int(plain.result.statistics.num_steps),
                "steps": int(counts.num_steps),
                "seconds": {name: each.row(1) for name, each in samples.items()},
            }
        )
        print(harness.table(rows[-1:], COLUMNS), flush=True)
    return rows


COLUMNS = {
    "workload": "workload",
    "prompts": "prompts",
    "plain tokens/s": "plain tokens/s",
    "tokens/s": "tokens/s",
    "speed-up": "speed-up",
    "guessed": "guessed",
    "accepted": "accepted",
    "plain steps": "plain steps",
    "steps": "steps",
    "same text": "same text",
}


def measure_beams(subject: Subject, rounds: int) -> list[dict[str, Any]]:
    """Return a row for `jkv` beside `transformers`, in one process, in turns."""
    import torch
    import transformers

    count = len(PARAGRAPHS)
    prompts = subject.prompts(count, PARAGRAPHS)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32
    )
    is_token = torch.tensor((prompts >= 0).astype(np.int64))
    # It pads on the left.
    moved = [np.roll(row, int((row < 0).sum())) for row in prompts]
    ids = torch.tensor(np.maximum(moved, 0).astype(np.int64))
    mask = torch.flip(is_token, [1])
    cache = subject.cache(count * NUM_BEAMS, prompts.shape[1] + BEAM_TOKENS)
    found: dict[str, Any] = {"cache": cache}

    def ours(_: object) -> None:
        found["cache"], found["ours"] = beam_search(
            subject.model,
            subject.params,
            found["cache"],
            prompts,
            num_beams=NUM_BEAMS,
            max_new_tokens=BEAM_TOKENS,
        )
        found["ours"].tokens.block_until_ready()

    def theirs(_: object) -> None:
        with torch.no_grad():
            found["theirs"] = peer.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                num_beams=NUM_BEAMS,
                max_new_tokens=BEAM_TOKENS,
                min_new_tokens=BEAM_TOKENS,
                pad_token_id=0,
                eos_token_id=None,
            )

    samples = harness.interleave(
        [
            harness.Case(name="jkv", prepare=lambda: None, run=ours),
            harness.Case(name="transformers", prepare=lambda: None, run=theirs),
        ],
        rounds=rounds,
        warmup=2,
    )
    texts = np.asarray(found["theirs"][:, prompts.shape[1] :])
    statistics, num_tokens = found["ours"].statistics, count * BEAM_TOKENS
    return [
        {
            "prompts": count,
            "beams": NUM_BEAMS,
            "tokens/s": num_tokens / samples["jkv"].median,
            "transformers tokens/s": num_tokens / samples["transformers"].median,
            "speed-up": samples["transformers"].ratio_to(samples["jkv"]),
            "peak blocks": int(statistics.peak_blocks),
            "unshared": int(statistics.unshared_peak_blocks),
            "same texts": bool((np.asarray(found["ours"].tokens[:, 0]) == texts).all()),
            "seconds": {name: each.row(1) for name, each in samples.items()},
        }
    ]


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=("speculation", "beams"))
    options = parser.parse_args()
    model, params = pretrained.load(FOLDER)
    subject = Subject(model, params, pretrained.load_tokenizer(FOLDER))
    where = harness.machine()
    print(harness.header("Decoding strategies", where))
    parts = {"speculation": measure_speculation, "beams": measure_beams}
    for name, measure in parts.items():
        if options.only in (None, name):
            rows = measure(subject, options.rounds)
            shown = COLUMNS if name == "speculation" else None
            keys = [key for key in rows[0] if key != "seconds"]
            print("\n" + harness.table(rows, shown or {key: key for key in keys}))
            run = {"benchmark": f"strategies, {name}", "machine": where, "rows": rows}
            harness.save(RESULTS, run)


if __name__ == "__main__":
    main()
