"""Decoding strategies compared to plain decoding: speculation, beam search, best-of-n.

    python benchmarks/strategies.py [--rounds 5] [--only PART]

Parts: speculation, heads, beams, samples, prefixes.

All but heads with the bundled model in float32, on the beginnings of the 46 held-out
documents, 192 tokens each, continued greedily by 128 tokens.

Speculative decoding: tokens per second of `jkv.generate` with draft tokens and without,
otherwise the same call, interleaved. Sequences are ranked by repetition, measured on
the plain completions by `zlib` compression.

* repetitive: the eight prompts, and the one, with the most repetitive completions.
* ordinary: the eight in the middle; the draft model is that of the examples.
* all: every document in the queue, eight running at a time, in order.
* nothing accepted, look-up: the eight of the first row at temperature 2, with draft
  tokens for every token seen before; hardly any is accepted.
* nothing accepted, draft model: one random layer drafts.

Load-independent counts: steps without and with draft tokens, draft tokens computed, and
accepted ones.

Heads: SmolLM2, downloaded once, with questions as a chat: look-up, and an EAGLE-3 head
that `examples/train_drafter.py` trained (`--head FOLDER`), with three draft tokens in
each step.

Beam search: `jkv.beam_search` and `transformers`, with the same prompts and beams:
tokens per second, and the peak number of blocks with and without sharing between beams.
Best-of-n: the peak number of blocks of samples, and the ideal, each prompt's full
blocks once.

Prefixes: decode steps of eight samples with one long prompt, with shared-prefix
attention and without: by the bundled model, and by SmolLM2, downloaded once.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import unittest.mock
import zlib
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # the examples are not a package

sys.path.insert(0, str(ROOT / "tools"))

import models  # noqa: E402
import pretrained  # noqa: E402
from bundled import corpus  # noqa: E402
from pretrained.drafters import load_drafter  # noqa: E402

import jkv  # noqa: E402
from jkv.attention.backend import Backend  # noqa: E402
from jkv.attention.xla.interface import Xla  # noqa: E402
from jkv.decoding import (  # noqa: E402
    DraftModel,
    PromptLookup,
    Sampling,
    decode,
    prefill,
)

FOLDER = ROOT / "examples" / "models" / "pydoc"
DRAFT_FOLDER = ROOT / "examples" / "models" / "pydoc_draft"
RESULTS = pathlib.Path(__file__).parent / "results" / "strategies.json"
QUESTIONS = pathlib.Path(__file__).parent / "contenders" / "questions.txt"
PROMPT_TOKENS, NEW_TOKENS, RUNNING = 192, 128, 8
BEAM_TOKENS, NUM_BEAMS, BEAM_PROMPTS = 48, 4, 4
SAMPLES, SAMPLED_PROMPTS = 8, 4
PREFIX_STEPS = 16
GREEDY, HOT = Sampling(), Sampling(temperature=2.0, seeds=1)

generate = jax.jit(
    jkv.generate,
    static_argnames=("model", "max_new_tokens", "max_running", "num_samples"),
    donate_argnames="cache",
)
beam_search = jax.jit(
    jkv.beam_search,
    static_argnames=("model", "num_beams", "max_new_tokens", "num_return"),
    donate_argnames="cache",
)


# Name, prompts, sampling, and the drafters to compare.
Workload = tuple[str, np.ndarray, Sampling, dict[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A model, its weights, and its prompts."""

    model: Any
    params: Any
    prompts: np.ndarray  # i32[46, PROMPT_TOKENS], -1 after the end of short documents
    stop_tokens: tuple[int, ...] = ()

    @classmethod
    def load(cls) -> "Subject":
        """Load the bundled model and the documents' beginnings."""
        model, params = pretrained.load(FOLDER, dtype=jnp.float32)
        tokenizer = pretrained.load_tokenizer(FOLDER)
        _, held_out = corpus.split()
        prompts = np.full((len(held_out), PROMPT_TOKENS), -1, np.int32)
        for row, document in zip(prompts, held_out, strict=True):
            ids = tokenizer.encode(document.text).ids[:PROMPT_TOKENS]
            row[: len(ids)] = ids
        return cls(model, params, prompts)

    def cache(self, rows: int, length: int = PROMPT_TOKENS + NEW_TOKENS) -> jkv.Cache:
        """Return a cache for sequences of `length` tokens."""
        return make_cache(self.model, rows, length)

    @functools.cached_property
    def ranked(self) -> np.ndarray:
        """The prompts, most repetitive greedy completions first."""
        plain = Run(self, self.prompts)
        plain(None)
        tokens = np.asarray(plain.result.tokens, np.int32)
        sizes = [len(zlib.compress(row.tobytes(), 9)) for row in tokens]
        return self.prompts[np.argsort(sizes, kind="stable")]

    @property
    def ordinary(self) -> np.ndarray:
        """As many prompts as run, with completions of median repetition."""
        start = (len(self.ranked) - RUNNING) // 2
        return self.ranked[start : start + RUNNING]

    def draft(self, rows: int) -> DraftModel:
        """Return the draft model of the examples."""
        return as_draft(*pretrained.load(DRAFT_FOLDER, dtype=jnp.float32), rows)

    def random_draft(self, rows: int) -> DraftModel:
        """Return an uninformed draft model: one layer, tokens permuted."""
        config = self.model.config.take_layer(0)
        model = dataclasses.replace(self.model, config=config)
        first = jax.tree.map(lambda weights: weights[:1], self.params["layers"][0])
        params = dict(self.params, layers=[first])
        params["embedding"] = params["embedding"][::-1]
        return as_draft(model, params, rows)


def make_cache(model: Any, rows: int, length: int) -> jkv.Cache:
    """Return a cache for sequences of `length` tokens."""
    return jkv.init(find_config(model, rows, length))


def find_config(model: Any, rows: int, length: int) -> jkv.CacheConfig:
    """Return the sizes of a cache for sequences of `length` tokens."""
    return jkv.CacheConfig.for_context_length(
        length, max_sequences=rows, dtype=jnp.float32, **model.cache_fields
    )


def as_draft(model: Any, params: Any, rows: int) -> DraftModel:
    """Return a model as a draft model for `rows` sequences."""
    config = find_config(model, rows, PROMPT_TOKENS + NEW_TOKENS)
    return DraftModel(model=model, params=params, config=config)


class Run:
    """A generation with given options, which reuses its cache."""

    def __init__(self, subject: Subject, prompts: np.ndarray, **options: Any):
        self._subject, self._prompts = subject, prompts
        self._options = {"sampling": GREEDY, "stop_tokens": subject.stop_tokens}
        self._options |= options
        self._running = min(RUNNING, len(prompts))
        config = find_config(subject.model, self._running, PROMPT_TOKENS + NEW_TOKENS)
        if (drafter := options.get("speculate")) is not None:
            config = jkv.with_drafter(config, drafter)
        self._cache = jkv.init(config)
        self.result: Any = None

    def __call__(self, _: object) -> None:
        """Generate once."""
        self._cache, self.result = generate(
            self._subject.model,
            self._subject.params,
            self._cache,
            self._prompts,
            max_new_tokens=NEW_TOKENS,
            max_running=self._running,
            **self._options,
        )
        self.result.tokens.block_until_ready()


def measure_speculation(subject: Subject, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each workload."""
    everything, best = subject.prompts, subject.ranked
    eager = PromptLookup(min_ngram=1)
    lookup, draft = PromptLookup(), subject.draft
    workloads: list[Workload] = [
        ("repetitive", best[:1], GREEDY, {"look-up": lookup, "draft model": draft(1)}),
        (
            "repetitive",
            best[:RUNNING],
            GREEDY,
            {"look-up": lookup, "draft model": draft(RUNNING)},
        ),
        ("all", everything, GREEDY, {"look-up": lookup}),
        ("ordinary", subject.ordinary, GREEDY, {"draft model": draft(RUNNING)}),
        ("nothing accepted", best[:RUNNING], HOT, {"look-up": eager}),
        (
            "nothing accepted",
            best[:RUNNING],
            GREEDY,
            {"draft model": subject.random_draft(RUNNING)},
        ),
    ]
    return compare_speculation(subject, workloads, rounds)


def measure_heads(
    subject: Subject, rounds: int, folder: pathlib.Path
) -> list[dict[str, Any]]:
    """Return rows of SmolLM2 with questions, look-up and an EAGLE-3 head."""
    del subject
    path = models.fetch("smollm2")
    tokenizer = pretrained.load_tokenizer(path)
    model, params = pretrained.load(path, dtype=jnp.float32, loop_layers=True)
    prompts = np.full((RUNNING, PROMPT_TOKENS), -1, np.int32)
    # Without the first question, which has an answer of a few tokens.
    questions = QUESTIONS.read_text().splitlines()[1:]
    for row, question in zip(prompts, questions, strict=False):
        chat = pretrained.render_chat(path, question)
        ids = tokenizer.encode(chat, add_special_tokens=False).ids
        row[: len(ids)] = ids
    workloads: list[Workload] = []
    for count in (1, RUNNING):
        config = find_config(model, count, PROMPT_TOKENS + NEW_TOKENS)
        head = load_drafter(folder, model, params, config, num_tokens=3)
        drafters = {
            "look-up": PromptLookup(),
            "head in each step": dataclasses.replace(head, cost=1.0),
        }
        workloads.append(("questions", prompts[:count], GREEDY, drafters))
    subject = Subject(model, params, prompts, model.config.stop_tokens)
    return compare_speculation(subject, workloads, rounds)


def compare_speculation(
    subject: Subject, workloads: list[Workload], rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each workload and drafter; plain runs are interleaved."""
    rows = []
    for name, prompts, sampling, drafters in workloads:
        plain = Run(subject, prompts, sampling=sampling)
        drafting = {
            label: Run(subject, prompts, sampling=sampling, speculate=drafter)
            for label, drafter in drafters.items()
        }
        samples = harness.interleave(
            [
                harness.Case(name=label, prepare=lambda: None, run=run)
                for label, run in {"plain": plain, **drafting}.items()
            ],
            rounds=rounds,
            warmup=1,
        )
        before, num_tokens = plain.result, int(plain.result.lengths.sum())
        for label, run in drafting.items():
            counts = run.result.statistics
            drafted, accepted = int(counts.draft_tokens), int(counts.accepted_tokens)
            most = drafters[label].num_tokens
            rows.append(
                {
                    "workload": f"{name}, {label}",
                    "prompts": len(prompts),
                    "plain tokens/s": num_tokens / samples["plain"].median,
                    "tokens/s": num_tokens / samples[label].median,
                    "speed-up": samples["plain"].ratio_to(samples[label]),
                    "plain steps": int(before.statistics.num_steps),
                    "steps": int(counts.num_steps),
                    "with speculation": int(counts.checking_steps),
                    "guessed": drafted,
                    "accepted": accepted,
                    # For the sequence with the most draft tokens, including its own
                    # token.
                    "tokens of a step": 1 + most * accepted / max(drafted, 1),
                    # Greedy completions must not depend on draft tokens.
                    "same sequences": np.array_equal(before.tokens, run.result.tokens),
                    "seconds": {
                        each: samples[each].row(1) for each in ("plain", label)
                    },
                }
            )
            print(harness.table(rows[-1:], columns(rows)), flush=True)
    return rows


def columns(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the columns of a table, without the details of the times."""
    return {key: key for key in rows[0] if key != "seconds"}


def measure_beams(subject: Subject, rounds: int) -> list[dict[str, Any]]:
    """Return a row for jkv and transformers, in one process, interleaved."""
    import torch
    import transformers

    is_whole = (subject.prompts >= 0).all(axis=1)
    prompts = subject.prompts[is_whole][:BEAM_PROMPTS]
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32
    )
    ids = torch.tensor(prompts.astype(np.int64))
    cache = subject.cache(len(prompts) * NUM_BEAMS, PROMPT_TOKENS + BEAM_TOKENS)
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
                attention_mask=torch.ones_like(ids),
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
        warmup=1,
    )
    tokens = np.asarray(found["theirs"][:, PROMPT_TOKENS:])
    statistics, num_tokens = found["ours"].statistics, len(prompts) * BEAM_TOKENS
    return [
        {
            "prompts": len(prompts),
            "beams": NUM_BEAMS,
            "tokens/s": num_tokens / samples["jkv"].median,
            "transformers tokens/s": num_tokens / samples["transformers"].median,
            "speed-up": samples["transformers"].ratio_to(samples["jkv"]),
            "peak blocks": int(statistics.peak_blocks),
            "of copying caches": int(statistics.unshared_peak_blocks),
            "same sequences": bool(
                (np.asarray(found["ours"].tokens[:, 0]) == tokens).all()
            ),
            "seconds": {name: each.row(1) for name, each in samples.items()},
        }
    ]


def measure_samples(subject: Subject, rounds: int) -> list[dict[str, Any]]:
    """Return the blocks of samples of some prompts, and the ideal."""
    del rounds  # untimed
    prompts = subject.prompts[:SAMPLED_PROMPTS]
    count = SAMPLED_PROMPTS * SAMPLES
    cache, result = generate(
        subject.model,
        subject.params,
        subject.cache(count),
        prompts,
        max_new_tokens=NEW_TOKENS,
        num_samples=SAMPLES,
        sampling=Sampling(temperature=0.9, seeds=1),
    )
    lengths, size = (prompts >= 0).sum(axis=1), cache.block_size
    # The last token of a sequence is not cached.
    whole = -(-(lengths + NEW_TOKENS - 1) // size)
    shared = lengths // size
    ideal = int(np.sum(shared + SAMPLES * (whole - shared)))
    peak = int(result.statistics.peak_blocks)
    return [
        {
            "prompts": SAMPLED_PROMPTS,
            "samples of each": SAMPLES,
            "peak blocks": peak,
            "ideal": ideal,
            "by the ideal": peak / ideal,
            "without sharing": int(SAMPLES * whole.sum()),
        }
    ]


def measure_prefixes(subject: Subject, rounds: int) -> list[dict[str, Any]]:
    """Return a row per model: a decode step of samples with a long prompt."""
    smollm2 = models.fetch("smollm2")
    loaded = pretrained.load(smollm2, dtype=jnp.float32, loop_layers=True)
    subjects = [
        ("bundled", 2048, subject.model, subject.params, FOLDER),
        ("SmolLM2 135M", 1500, *loaded, smollm2),
    ]
    text = (ROOT / "docs" / "design.md").read_text() * 2
    rows = []
    for name, length, model, params, folder in subjects:
        prompt = pretrained.load_tokenizer(folder).encode(text).ids[:length]
        steps = {
            "read for each": Steps(model, params, prompt, shares=False),
            "read once": Steps(model, params, prompt, shares=True),
        }
        samples = harness.interleave(
            [
                harness.Case(
                    name=how, prepare=lambda: None, run=run, calls=PREFIX_STEPS
                )
                for how, run in steps.items()
            ],
            rounds=rounds,
            warmup=1,
        )
        each, once = samples.values()
        tokens = [np.asarray(run.tokens) for run in steps.values()]
        rows.append(
            {
                "model": name,
                "prompt": length,
                "samples": SAMPLES,
                "ms a step, read for each": 1e3 * each.median,
                "read once": 1e3 * once.median,
                "of its time": once.ratio_to(each),
                "tokens/s": SAMPLES / once.median,
                "same tokens": bool((tokens[0] == tokens[1]).all()),
            }
        )
    return rows


class Steps:
    """Decode steps of samples with a cached prompt."""

    def __init__(self, model: Any, params: Any, prompt: list[int], *, shares: bool):
        plan = Xla.plan if shares else Backend.plan
        options = {"sampling": Sampling(temperature=1.0, seeds=1)}
        num_new = PREFIX_STEPS + 8
        # The prompt once, and each sample's tokens: a call copies the pool.
        config = jkv.CacheConfig(
            num_blocks=-(-len(prompt) // 16) + SAMPLES * (num_new // 16 + 2),
            max_sequences=SAMPLES + 1,
            max_context_length=len(prompt) + num_new,
            dtype=jnp.float32,
            **model.cache_fields,
        )

        @jax.jit
        def begin(params: Any, cache: jkv.Cache, prompts: jax.Array) -> Any:
            limits = {"max_new_tokens": num_new, "num_samples": SAMPLES}
            begun = prefill(model, params, cache, prompts, **limits, **options)
            return decode(model, params, *begun[:2], num_steps=2, **options)[:2]

        @jax.jit
        def go_on(params: Any, begun: Any) -> Any:
            return decode(model, params, *begun, num_steps=PREFIX_STEPS, **options)[1]

        with unittest.mock.patch.object(Xla, "plan", plan):
            self._params = params
            prompts = jnp.asarray([prompt], jnp.int32)
            self._begun = begin(params, jkv.init(config), prompts)
            # Discard traces of the other variant.
            jax.clear_caches()
            self._go_on = go_on.lower(params, self._begun).compile()
        self.tokens: Any = None

    def __call__(self, _: object) -> None:
        """Run the steps."""
        state = self._go_on(self._params, self._begun)
        self.tokens = jax.block_until_ready(state).result.tokens


def main() -> None:
    """Measure, print, save."""
    parts: dict[str, Any] = {
        "speculation": measure_speculation,
        "beams": measure_beams,
        "samples": measure_samples,
        "prefixes": measure_prefixes,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=(*parts, "heads"))
    parser.add_argument("--head", type=pathlib.Path, help="of the part heads")
    options = parser.parse_args()
    if options.head is not None:
        parts["heads"] = functools.partial(measure_heads, folder=options.head)
    where = harness.machine()
    print(harness.header("Decoding strategies", where), flush=True)
    subject = Subject.load()
    for name, measure in parts.items():
        if options.only in (None, name):
            rows = measure(subject, options.rounds)
            print("\n" + harness.table(rows, columns(rows)), flush=True)
            where["load after"] = harness.machine()["load"]
            run = {"benchmark": f"strategies, {name}", "machine": where, "rows": rows}
            harness.save(RESULTS, run)


if __name__ == "__main__":
    main()
