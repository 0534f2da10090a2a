"""Recurrent-state layers: overhead of the cache, and savings by prefix caching.

    python benchmarks/states.py [--only PART ...] [--quick]

All with random models in float32, with the gated delta rule in six of eight layers.

* step-512, step-2048, by hidden size: a decode step of 64 sequences of 256 tokens,
  compared to the same model with its states in bare arrays: one [L, S, ...] for all
  layers, or one per layer. A step has all sequences in row order, so that the bare
  model gathers nothing. The reference is a copy of the states' bytes.
* bytes: per running sequence, with room for 4 draft tokens, and without.
* hits: the time to first tokens of 8 prompts, in steps shared with 8 running sequences;
  the prompts begin with 4,000 cached tokens and end with 96 of their own.
* speculation: greedy, repetitive sequences with prompt lookup and without.
* generate: 16 sequences of a Qwen3-Next of 100 million parameters, compared to
  `transformers` with the same weights.

A part is a separate run in `results/states.json`.
"""

import argparse
import dataclasses
import functools
import pathlib
import tempfile
import zlib
from collections.abc import Callable
from typing import Any

import harness
import hybrids
import jax
import jax.numpy as jnp
import numpy as np
from harness import Case, judge
from hybrids import BareModel, dense_fields, find_states, make_config, make_model

import jkv
from jkv import decoding
from jkv.decoding import PromptLookup

RESULTS = pathlib.Path(__file__).parent / "results" / "states.json"
NUM_GUESSES = 4

STATIC = ("model", "max_new_tokens", "max_running")
generate = jax.jit(jkv.generate, static_argnames=STATIC, donate_argnames="cache")


@dataclasses.dataclass(frozen=True)
class Options:
    """Rounds of each part, and True for a smoke test with tiny sizes."""

    rounds: int
    quick: bool

    def pick(self, size: Any, quick: Any) -> Any:
        """Return a size, or the one of a quick run."""
        return quick if self.quick else size


# A part returns its rows, rows of limits, and versions of its peers.
Part = tuple[list[Any], list[Any], dict[str, str]]
CONTEXT, NUM_STEPS = 256, 2
# True for an array per layer.
BARE = {"bare, one array [L, S, ...]": False, "bare, an array for each layer": True}
COPY = "the bytes of the states, read and written"


def measure_steps(hidden: int, options: Options) -> Part:
    """Return a row for each location of a model's states."""
    rows, steps = [], Steps(options.pick(hidden, 128), options.pick(64, 4))
    samples = harness.interleave(steps.cases(), rounds=options.rounds, warmup=2)
    for name, taken in samples.items():
        row = {"hidden": hidden, "states": name} | taken.row(1e3)
        rows.append(row | {"jkv / this": samples["jkv"].ratio_to(taken)})
    rows[-1]["GB/s"] = 2 * steps.state_bytes / samples[COPY].median / 1e9
    ratios = {name: samples["jkv"].ratio_to(samples[name]) for name in BARE}
    limits = [judge(f"step, by {name}", ratio, 1.05) for name, ratio in ratios.items()]
    return rows, limits, {}


class Steps:
    """Decode steps of one model, with states in a cache or in bare arrays."""

    def __init__(self, hidden: int, num_sequences: int) -> None:
        """Create the model; all cases share its weights."""
        self.model, self.params = make_model(dense_fields(hidden))
        self.seq_ids = np.arange(num_sequences, dtype=np.int32)
        self.config = make_config(self.model, 8 * CONTEXT, num_sequences)
        states = find_states(self.config)
        self.state_bytes = states.bytes_per_sequence * num_sequences
        self.chosen: dict[int, np.ndarray] = {}  # by the first step of a sample

    def cases(self) -> list[Case]:
        """Return a case for each location of the states, and a copy of their bytes."""

        def step(params: Any, cache: jkv.Cache, tokens: jax.Array) -> Any:
            cache, batch = jkv.append(cache, self.seq_ids)
            logits, cache = self.model(params, tokens, cache, batch)
            return jkv.commit(cache, batch), _choose(logits)

        cases = [self._case("jkv", step, self._open(jkv.init(self.config)))]
        for name, by_layer in BARE.items():
            bare = BareModel(self.model, by_layer)
            cache, arrays = bare.init(self.config)
            run = functools.partial(self._step_bare, bare)
            cases.append(self._case(name, run, (self._open(cache), arrays)))
        return [*cases, self._copy_case()]

    def _step_bare(self, bare: Any, params: Any, carry: Any, tokens: jax.Array) -> Any:
        cache, arrays = carry
        cache, batch = jkv.append(cache, self.seq_ids)
        logits, (cache, arrays) = bare(params, tokens, (cache, arrays), batch)
        return (jkv.commit(cache, batch), arrays), _choose(logits)

    def _open(self, cache: jkv.Cache) -> jkv.Cache:
        """Open sequences; the contents of their states do not matter here."""
        count = len(self.seq_ids)

        def run(cache: jkv.Cache) -> jkv.Cache:
            cache, opened = jkv.allocate(cache, [0] * count)
            rows = count * CONTEXT
            cache, batch = jkv.append(cache, opened.seq_ids, CONTEXT, capacity=rows)
            return jkv.commit(cache, batch)

        return jax.jit(run, donate_argnums=0)(cache)

    def _case(self, name: str, step: Callable[..., Any], carry: Any) -> Case:
        jitted = jax.jit(step, donate_argnums=1)
        held = [carry, jnp.asarray(self.seq_ids), 0]

        def run(_: None) -> None:
            for _ in range(NUM_STEPS):
                held[0], held[1] = jitted(self.params, held[0], held[1])
            held[1].block_until_ready()
            held[2] += NUM_STEPS

        def check(_: None) -> None:
            # All must choose the same tokens.
            tokens = np.asarray(held[1])
            np.testing.assert_array_equal(
                tokens, self.chosen.setdefault(held[2], tokens)
            )

        return Case(
            name=name, prepare=lambda: None, run=run, calls=NUM_STEPS, check=check
        )

    def _copy_case(self) -> Case:
        add = jax.jit(lambda array: array + 1, donate_argnums=0)
        held = [jnp.zeros(self.state_bytes // 4, jnp.float32)]

        def run(_: None) -> None:
            held[0] = add(held[0]).block_until_ready()

        return Case(name=COPY, prepare=lambda: None, run=run)


def _choose(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def measure_bytes(_: Options) -> Part:
    """Return the bytes per sequence of both step models and of Qwen3-Next."""
    rows, limits = [], []
    named = {f"hidden {n}": dense_fields(n) for n in (512, 2048)}
    for name, fields in (named | {"Qwen3-Next 80B": hybrids.QWEN3_NEXT_80B}).items():
        model = hybrids.describe_model(fields)
        alone, guessing = (
            find_states(make_config(model, 4096, 1, max_pending=n)).bytes_per_sequence
            for n in (0, NUM_GUESSES)
        )
        ratio = guessing / alone
        columns = {"MiB": alone / 2**20, "with 4 guesses": guessing / 2**20}
        rows.append({"model": name} | columns | {"ratio": ratio})
        limits.append(judge(f"bytes with 4 guesses, {name}", ratio, 1.1))
    return rows, limits, {}


def measure_hits(options: Options) -> Part:
    """Return a row with prefix caching and one without."""
    arrivals = [Arrivals(options, reuses) for reuses in (True, False)]
    cases = [each.case() for each in arrivals]
    samples = harness.interleave(cases, rounds=options.rounds, warmup=1)
    rows = []
    for each, case in zip(arrivals, cases, strict=True):
        taken = samples[case.name]
        row = {"prompts": case.name} | taken.row(1e3) | each.counts
        rows.append(row | {"by no reuse": taken.ratio_to(samples[cases[1].name])})
    limit = judge("first tokens with hits, by no reuse", rows[0]["by no reuse"], 0.15)
    return rows, [limit], {}


class Arrivals:
    """Prompts that arrive while other sequences run."""

    def __init__(self, options: Options, reuses: bool) -> None:
        """Start the running sequences, after caching the shared prefix."""
        self.reuses, self.num = reuses, 8
        shared, own = options.pick((4_000, 96), (500, 12))
        self.model, self.params = make_model(dense_fields(options.pick(512, 128)))
        random = np.random.default_rng(0)
        self.tokens = functools.partial(random.integers, 1, 8_000, dtype=np.int32)
        self.shared, self.own = self.tokens(shared), own
        self.width, self.most_new = shared + own, options.pick(512, 64)
        length = self.width + self.most_new
        config = make_config(self.model, length, 2 * self.num, prefix_caching=reuses)
        self.decode = jax.jit(
            functools.partial(decoding.decode, self.model),
            donate_argnames=("cache", "state"),
        )
        self.add = jax.jit(decoding.add_prompts, donate_argnames="state")
        self.copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self.counts: dict[str, int] = {}
        how = "hits" if reuses else "no reuse"
        harness.progress(f"compiling the steps of {how}, and starting the sequences")
        self.begun = self._begin(jkv.init(config))

    def case(self) -> Case:
        """Return the case: step until each new prompt has one more token."""

        def prepare() -> Any:
            return jax.block_until_ready((*self.copy(self.begun), self._make_prompts()))

        def run(given: Any) -> None:
            cache, state, prompts = given
            state = self.add(cache, state, np.arange(self.num, 2 * self.num), prompts)
            before = state.result.statistics
            steps, cached = int(before.num_steps), int(before.cached_tokens)
            while not np.asarray(state.result.lengths)[self.num :].all():
                cache, state = self._step(cache, state)
            counts = state.result.statistics
            self.counts = {
                "steps": int(counts.num_steps) - steps,
                "cached": int(counts.cached_tokens) - cached,
            }

        def check(_: None) -> None:
            # Snapshots are taken at multiples of 16 blocks.
            every = 16 * hybrids.BLOCK_SIZE
            hit = len(self.shared) // every * every
            assert self.counts["cached"] == self.reuses * self.num * hit, self.counts

        name = "hits" if self.reuses else "no reuse"
        return Case(name=name, prepare=prepare, run=run, check=check)

    def _begin(self, cache: jkv.Cache) -> tuple[jkv.Cache, Any]:
        state = jax.jit(decoding.begin, static_argnames=STATIC)(
            self.model,
            self.params,
            cache,
            np.full((2 * self.num, self.width), -1, np.int32),
            max_new_tokens=self.most_new,
            max_running=2 * self.num,
        )
        first = self._make_prompts()[:1]
        state = self.add(
            cache, state, np.array([self.num]), first, limits=np.ones(1, np.int32)
        )
        while np.asarray(state.is_running).any():
            cache, state = self._step(cache, state)
        tokens = np.full((self.num, self.width), -1, np.int32)
        tokens[:, :128] = self.tokens((self.num, 128))
        state = self.add(cache, state, np.arange(self.num), tokens)
        while not np.asarray(state.result.lengths)[: self.num].all():
            cache, state = self._step(cache, state)
        return cache, state

    def _step(self, cache: jkv.Cache, state: Any) -> Any:
        return self.decode(self.params, cache, state, num_steps=np.int32(1))

    def _make_prompts(self) -> np.ndarray:
        """Return prompts with uncached suffixes."""
        beginnings = np.tile(self.shared, (self.num, 1))
        return np.concatenate([beginnings, self.tokens((self.num, self.own))], axis=1)


def repeat_itself(params: Any) -> Any:
    """Return weights of a model that generates repetitive sequences.

    The newest token outweighs all layers and mostly determines the next one, and 256
    tokens are likelier than all others: sequences run into cycles of these. The amount
    of computation is unchanged.
    """
    is_frequent = jnp.arange(params["head"].shape[0]) < 256
    return params | {
        "embedding": params["embedding"] * 500,
        "head": params["head"] * jnp.where(is_frequent, 1.0, 0.3)[:, None],
    }


def measure_speculation(options: Options) -> Part:
    """Return a row for one sequence and for eight, the most repetitive ones."""
    fields = dense_fields(options.pick(512, 128)) | {"tie_word_embeddings": False}
    model, params = make_model(fields)
    params = repeat_itself(params)
    length, num_new = 32, options.pick(192, 48)
    random = np.random.default_rng(0)
    prompts = random.integers(1, 8_000, (options.pick(32, 8), length), np.int32)

    def make_case(name: str, chosen: np.ndarray, **guessing: Any) -> tuple[Case, Any]:
        pending = NUM_GUESSES if guessing else 0
        config = make_config(model, length + num_new, 8, max_pending=pending)
        held: list[Any] = [jkv.init(config), None]

        def run(_: None) -> None:
            held[0], held[1] = generate(
                model,
                params,
                held[0],
                chosen,
                max_new_tokens=num_new,
                max_running=min(8, len(chosen)),
                **guessing,
            )
            held[1].tokens.block_until_ready()

        return Case(name=name, prepare=lambda: None, run=run), held

    # Eight at a time, with the program of eight plain sequences.
    sizes = []
    for first in range(0, len(prompts), 8):
        harness.progress(f"ranking sequences from {first} of {len(prompts)} on")
        case, held = make_case("ranking", prompts[first : first + 8])
        case.run(None)
        made = np.asarray(held[1].tokens)
        sizes += [len(zlib.compress(row.tobytes(), 9)) for row in made]
    ranked, rows, limits = prompts[np.argsort(sizes, kind="stable")], [], []
    for count in (1, 8):
        plain, plain_held = make_case("plain", ranked[:count])
        guess = PromptLookup(num_tokens=NUM_GUESSES)
        ours, held = make_case("look-up", ranked[:count], speculate=guess)
        samples = harness.interleave([plain, ours], rounds=options.rounds, warmup=1)
        counts, before = held[1].statistics, plain_held[1].statistics
        np.testing.assert_array_equal(held[1].tokens, plain_held[1].tokens)
        speed_up = samples["plain"].ratio_to(samples["look-up"])
        rows.append(
            {
                "sequences": count,
                "plain tokens/s": count * num_new / samples["plain"].median,
                "tokens/s": count * num_new / samples["look-up"].median,
                "speed-up": speed_up,
                "plain steps": int(before.num_steps),
                "steps": int(counts.num_steps),
                "with speculation": int(counts.checking_steps),
                "guessed": int(counts.draft_tokens),
                "accepted": int(counts.accepted_tokens),
                "seconds": {name: each.row(1) for name, each in samples.items()},
            }
        )
        limits.append(judge(f"look-up, texts: {count}", speed_up, 1.3, at_least=True))
    return rows, limits, {}


def measure_generate(options: Options) -> Part:
    """Return tokens per second of 16 sequences for jkv and transformers."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(harness.machine()["cores"])
    torch.manual_seed(0)
    fields = hybrids.experts_fields(options.pick(512, 128))
    peer = transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**fields, pad_token_id=0)
    ).eval()
    peer.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        model, params = hybrids.pretrained.load(folder, jnp.float32)
    num_new = options.pick(64, 8)
    random = np.random.default_rng(0)
    prompts = random.integers(1, 8_000, (16, options.pick(128, 16)), np.int32)
    held = [jkv.init(make_config(model, prompts.shape[1] + num_new, 16))]
    tokens: dict[str, np.ndarray] = {}

    def run_ours(_: None) -> None:
        held[0], result = generate(
            model, params, held[0], prompts, max_new_tokens=num_new
        )
        tokens["jkv"] = np.asarray(result.tokens)

    def run_theirs(_: None) -> None:
        given = torch.tensor(prompts, dtype=torch.int64)
        made = peer.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=num_new,
            do_sample=False,
        )
        tokens["transformers"] = made[:, prompts.shape[1] :].numpy()

    runs = {"jkv": run_ours, "transformers": run_theirs}
    cases = [Case(name=n, prepare=lambda: None, run=run) for n, run in runs.items()]
    samples = harness.interleave(cases, rounds=options.rounds, warmup=1)
    rows = [
        {
            "contender": name,
            "parameters": sum(each.size for each in jax.tree.leaves(params)),
            "tokens/s": tokens[name].size / taken.median,
            "jkv by this": taken.ratio_to(samples["jkv"]),
            "same tokens": float(np.mean(tokens[name] == tokens["jkv"])),
            "seconds": taken.row(1),
        }
        for name, taken in samples.items()
    ]
    ratio = rows[1]["jkv by this"]
    limit = judge("generate, tokens/s by transformers", ratio, 2.0, at_least=True)
    packages = (torch, transformers)
    return rows, [limit], {each.__name__: each.__version__ for each in packages}


PARTS = {
    "step-512": functools.partial(measure_steps, 512),
    "step-2048": functools.partial(measure_steps, 2048),
    "bytes": measure_bytes,
    "hits": measure_hits,
    "speculation": measure_speculation,
    "generate": measure_generate,
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
        harness.progress(f"begins: {name}")
        where = harness.machine()
        rows, limits, versions = PARTS[name](options)
        where["versions"] |= versions
        where["load after"] = harness.machine()["load"]
        print(harness.header(f"\nRecurrent-state layers: {name}", where))
        columns = {key: key for row in rows for key in row if key != "seconds"}
        print("\n" + harness.table(rows, columns))
        print("\n" + harness.table(limits, {key: key for key in limits[0]}), flush=True)
        if not given.quick:
            title = f"states, {name}"
            run = {"benchmark": title, "machine": where, "rows": rows, "limits": limits}
            harness.save(given.json, run)


if __name__ == "__main__":
    main()
