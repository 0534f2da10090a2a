"""Benefit and overhead of prefix caching.

    python benchmarks/reuse.py [--rounds N]

Three measurements, each with its peers in one run:

* the index: looking up 64 prompts of 2,048 tokens, opening sequences on their hits, and
  committing 8 prompts, on pools of 65,536 and 4,096 blocks of 16. The peer is a minimal
  host-side block manager: a Python dict from (parent, tokens) to block, without hashing
  of its own, locks or statistics.
* time to first token: a prompt of 1,024 tokens with 1,000 cached ones, on the bundled
  model, compared to no prefix caching, and to transformers without and with a copy of
  the prefix's past keys and values.
* no hits: a decode step of a random model of 65 million parameters at batch 16, with a
  prefix index that never hits and without, and XLA's counts for both.
"""

import argparse
import copy
import functools
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import Case, Samples

import jkv

ROOT = pathlib.Path(__file__).parent.parent
BUNDLED = ROOT / "examples" / "models" / "pydoc"
RESULTS = pathlib.Path(__file__).parent / "results" / "reuse.json"
sys.path.insert(0, str(ROOT / "examples"))  # the examples are not a package

import pretrained  # noqa: E402  (found through the line above)
from pretrained.checkpoint import random_params  # noqa: E402
from pretrained.config import parse_config  # noqa: E402

BLOCK_SIZE, NUM_PROMPTS, PROMPT_LENGTH, COMMITTED = 16, 64, 2048, 8
SHARED, OWN = 1000, 24
# A Llama of 65 million parameters.
MODEL = {
    "model_type": "llama",
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "vocab_size": 16_384,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
BATCH_SIZE, CONTEXT, NUM_STEPS = 16, 256, 4


class Index:
    """A pool full of cached prompts, and 64 prompts with partial hits."""

    def __init__(self, num_blocks: int) -> None:
        """Fill the pool: prompts are appended, committed and freed."""
        self.num_blocks = num_blocks
        random = np.random.default_rng(0)
        num_known = num_blocks * BLOCK_SIZE // PROMPT_LENGTH
        self.known = random.integers(0, 30_000, (num_known, PROMPT_LENGTH), np.int32)
        self.prompts = np.resize(self.known, (NUM_PROMPTS, PROMPT_LENGTH)).copy()
        for prompt in self.prompts:
            prompt[random.integers(BLOCK_SIZE, PROMPT_LENGTH) :] = 30_001
        config = jkv.CacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_sequences=NUM_PROMPTS,
            max_context_length=PROMPT_LENGTH + BLOCK_SIZE,
            prefix_caching=True,
        )
        self.match = jax.jit(jkv.match)
        self.open = jax.jit(self._open, donate_argnums=0)
        self.append = jax.jit(self._append, donate_argnums=0)
        self.commit = jax.jit(jkv.commit, donate_argnums=0)
        self.free = jax.jit(lambda *a: jkv.free(*a)[0], donate_argnums=0)
        cache = jkv.init(config, storage=False)
        for rows in self.known.reshape(-1, COMMITTED, PROMPT_LENGTH):
            cache, batch = self.append(cache, rows)
            cache = self.free(self.commit(cache, batch), batch.seq_ids)
        self.cache, self.rows = cache, rows

    def cases(self) -> list[Case]:
        """Return match, open and close, and commit."""
        found = self.bare_found()

        def check(counts: jax.Array) -> None:
            np.testing.assert_array_equal(np.asarray(counts) // BLOCK_SIZE, found)

        def close(_: Any) -> None:
            self.cache, opened = self.open(self.cache, self.prompts)
            self.cache = self.free(self.cache, opened.seq_ids)
            jax.block_until_ready(self.cache.metadata)

        def step() -> tuple[jkv.Cache, jkv.Batch]:
            # Blocks must be new to the index, so it is cleared first.
            cache, batch = self.append(jkv.clear_prefixes(self.cache), self.rows)
            return jax.block_until_ready((cache, batch))

        def commit(state: tuple[jkv.Cache, jkv.Batch]) -> None:
            cache = jax.block_until_ready(self.commit(*state))
            self.cache = self.free(cache, state[1].seq_ids)

        case = functools.partial(self.case, "jkv")
        return [
            case("match", lambda: None, self._matched, check),
            case("open and close", self.refill, close),
            case("commit", step, commit),
        ]

    def case(
        self,
        contender: str,
        what: str,
        prepare: Callable[[], Any],
        run: Callable[[Any], Any],
        check: Callable[[Any], None] | None = None,
    ) -> Case:
        """Return a named case."""
        labels = {"what": what, "contender": contender, "pool": self.num_blocks}
        name = f"{what}, {contender}, {self.num_blocks}"
        return Case(name=name, prepare=prepare, run=run, check=check, labels=labels)

    def bare_found(self) -> np.ndarray:
        """Return the hits of each prompt in whole blocks, by comparing tokens."""
        known = np.resize(self.known, self.prompts.shape)
        length = np.argmax(known != self.prompts, axis=1)
        return np.minimum(length, PROMPT_LENGTH - 1) // BLOCK_SIZE

    def refill(self) -> None:
        """Restore the cached prompts after a commit has cleared them."""
        found = np.asarray(self.match(self.cache, self.prompts))
        if found.sum() == 0:
            for rows in self.known.reshape(-1, COMMITTED, PROMPT_LENGTH):
                self.cache, batch = self.append(self.cache, rows)
                self.cache = self.free(self.commit(self.cache, batch), batch.seq_ids)
            jax.block_until_ready(self.cache)

    def _matched(self, _: None) -> jax.Array:
        return self.match(self.cache, self.prompts).block_until_ready()

    def _open(self, cache: jkv.Cache, prompts: jax.Array) -> Any:
        return jkv.allocate(cache, 0, tokens=prompts)

    def _append(self, cache: jkv.Cache, rows: jax.Array) -> Any:
        cache, opened = jkv.allocate(cache, [0] * COMMITTED)
        return jkv.append(
            cache,
            opened.seq_ids,
            PROMPT_LENGTH,
            capacity=rows.size,
            tokens=rows.reshape(-1),
        )


class BareManager:
    """A minimal host-side block manager: a dict of blocks by their tokens."""

    def __init__(self, known: np.ndarray) -> None:
        """Commit the known prompts."""
        self.index: dict[tuple[int, tuple[int, ...]], int] = {}
        self.counts: dict[int, int] = {}
        for row in known.tolist():
            self.commit(row)

    def match(self, prompt: list[int]) -> list[int]:
        """Return the cached blocks of a prompt."""
        parent, blocks = -1, []
        for start in range(0, len(prompt) - BLOCK_SIZE, BLOCK_SIZE):
            key = (parent, tuple(prompt[start : start + BLOCK_SIZE]))
            if key not in self.index:
                break
            parent = self.index[key]
            blocks.append(parent)
        return blocks

    def commit(self, prompt: list[int]) -> None:
        """Add the blocks of a prompt to the index."""
        parent = -1
        for start in range(0, len(prompt), BLOCK_SIZE):
            key = (parent, tuple(prompt[start : start + BLOCK_SIZE]))
            parent = self.index.setdefault(key, len(self.index))

    def open_and_close(self, prompt: list[int]) -> None:
        """Increment and decrement reference counts."""
        blocks = self.match(prompt)
        for block in blocks:
            self.counts[block] = self.counts.get(block, 0) + 1
        for block in reversed(blocks):
            self.counts[block] -= 1

    def cases(self, index: Index) -> list[Case]:
        """Return the same cases as `Index.cases`."""
        prompts, rows = index.prompts.tolist(), index.rows.tolist()
        case = functools.partial(index.case, "bare Python dict")

        def commit(_: Any) -> None:
            empty = BareManager(np.zeros((0, 0), np.int32))
            for row in rows:
                empty.commit(row)

        def each(function: Callable[[list[int]], Any]) -> Callable[[Any], None]:
            return lambda _: [function(prompt) for prompt in prompts] and None

        return [
            case("match", lambda: None, each(self.match)),
            case("open and close", lambda: None, each(self.open_and_close)),
            case("commit", lambda: None, commit),
        ]


def first_token_cases(rounds: int) -> tuple[list[Case], dict[str, str]]:
    """Return cases of one new token after a prompt with 1,000 cached tokens."""
    model, params = pretrained.load(BUNDLED, jnp.float32)
    random = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    shared = random.integers(1, vocabulary, SHARED).tolist()
    # A new suffix each time, so that it is not cached.
    ends = iter(random.integers(1, vocabulary, (8 * rounds + 64, OWN)).tolist())
    generate = jax.jit(
        jkv.generate,
        static_argnames=("model", "max_new_tokens", "chunk_size"),
        donate_argnames="cache",
    )

    def jkv_case(contender: str, prefix_caching: bool, chunk_size: int) -> Case:
        config = jkv.CacheConfig.for_context_length(
            SHARED + OWN + 1,
            max_sequences=2,
            dtype=jnp.float32,
            prefix_caching=prefix_caching,
            **model.cache_fields,
        )
        held = [jkv.init(config)]

        def run(prompt: jax.Array) -> jax.Array:
            held[0], result = generate(
                model, params, held[0], prompt, max_new_tokens=1, chunk_size=chunk_size
            )
            return jax.block_until_ready(result).statistics.cached_tokens

        def check(cached: jax.Array) -> None:
            assert int(cached) == (SHARED if prefix_caching else 0)

        return Case(
            name=contender,
            prepare=lambda: jnp.array([shared + next(ends)]),
            run=run,
            check=check,
            labels={"contender": contender},
        )

    cases = [
        # A step computes all rows of its chunk: short chunks suit short suffixes.
        jkv_case("jkv, 1000 tokens cached, chunks of 32", True, 32),
        jkv_case("jkv, 1000 tokens cached, chunks of 512", True, 512),
        jkv_case("jkv, no reuse, chunks of 512", False, 512),
    ]
    if any(
        importlib.util.find_spec(name) is None for name in ("torch", "transformers")
    ):
        return cases, {}
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(harness.machine()["cores"])
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        BUNDLED, dtype=torch.float32
    ).eval()
    peer.generation_config.eos_token_id = None
    peer.generation_config.pad_token_id = 0
    # The argument and output name changed in transformers 5.24.
    arguments = inspect.signature(peer.forward).parameters
    kept = "cache" if "cache" in arguments else "past_key_values"
    with torch.no_grad():
        past = peer(torch.tensor([shared]), use_cache=True)[kept]

    def peer_case(contender: str, reuse: bool) -> Case:
        def run(tokens: Any) -> Any:
            options = {kept: copy.deepcopy(past)} if reuse else {}
            return peer.generate(tokens, max_new_tokens=1, do_sample=False, **options)

        return Case(
            name=contender,
            prepare=lambda: torch.tensor([shared + next(ends)]),
            run=run,
            labels={"contender": contender},
        )

    cases += [
        peer_case("transformers, past copied", True),
        peer_case("transformers, no reuse", False),
    ]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return cases, versions


def no_hit_cases() -> tuple[list[Case], list[dict[str, Any]]]:
    """Return a decode step with an index that never hits, and without one."""
    model = pretrained.Decoder(parse_config(MODEL))
    params = random_params(model.config, jax.random.key(0), jnp.float32)
    num_params = sum(a.size for a in jax.tree.leaves(params))
    seq_ids = np.arange(BATCH_SIZE, dtype=np.int32)
    prompts = np.random.default_rng(0).integers(0, 16_384, (BATCH_SIZE, CONTEXT))

    def bookkeeping(cache: jkv.Cache, tokens: jax.Array) -> Any:
        cache, batch = jkv.append(cache, seq_ids, tokens=tokens)
        return jkv.commit(cache, batch), batch

    def step(params: Any, cache: jkv.Cache, tokens: jax.Array) -> Any:
        cache, batch = jkv.append(cache, seq_ids, tokens=tokens)
        logits, cache = model(params, tokens, cache, batch)
        cache = jkv.commit(cache, batch)
        return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def prefill(params: Any, cache: jkv.Cache, tokens: jax.Array) -> jkv.Cache:
        cache, opened = jkv.allocate(cache, 0, tokens=tokens)
        cache, batch = jkv.append(
            cache,
            opened.seq_ids,
            tokens.shape[1],
            capacity=tokens.size,
            tokens=tokens.reshape(-1),
        )
        _, cache = model(params, tokens.reshape(-1), cache, batch)
        return jkv.commit(cache, batch)

    cases, counted = [], []
    for prefix_caching in (False, True):
        contender = "with an index" if prefix_caching else "without"
        config = jkv.CacheConfig.for_context_length(
            1024,
            max_sequences=BATCH_SIZE,
            dtype=jnp.float32,
            prefix_caching=prefix_caching,
            **model.cache_fields,
        )
        cache = jkv.init(config)
        empty = jkv.init(config, storage=False)
        first = jnp.zeros((BATCH_SIZE,), jnp.int32)
        compiled = jax.jit(bookkeeping, donate_argnums=0).lower(empty, first).compile()
        costs = compiled.cost_analysis() or {}
        counted.append(
            {
                "contender": contender,
                "parameters": num_params,
                "metadata bytes": config.bytes
                - sum(pool.nbytes for pool in cache.storage[0].arrays.values()),
                "bytes accessed": costs.get("bytes accessed"),
                "operations": costs.get("flops"),
            }
        )
        cache = jax.jit(prefill, donate_argnums=1)(params, cache, jnp.asarray(prompts))
        held = [cache, first]
        jitted = jax.jit(step, donate_argnums=1)

        def run(_: None, held: list[Any] = held, jitted: Any = jitted) -> None:
            for _ in range(NUM_STEPS):
                held[0], held[1] = jitted(params, *held)
            held[1].block_until_ready()

        cases.append(
            Case(
                name=contender,
                prepare=lambda: None,
                run=run,
                calls=NUM_STEPS,
                labels={"contender": contender},
            )
        )
    return cases, counted


def rows_of(cases: list[Case], samples: dict[str, Samples]) -> list[dict[str, Any]]:
    """Return a row per case, in milliseconds."""
    return [{**case.labels, **samples[case.name].row(1e3)} for case in cases]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    where = harness.machine()
    print(harness.header("Prefix reuse: the index, the first token, no hits", where))
    spread = {"median": "median ms", "p10": "p10", "p90": "p90", "samples": "samples"}

    index_cases: list[Case] = []
    for num_blocks in (4_096, 65_536):
        index = Index(num_blocks)
        index_cases += index.cases() + BareManager(index.known).cases(index)
    # The pools are refilled between a commit and the next lookup, untimed.
    index_samples = harness.interleave(index_cases, rounds=options.rounds)
    index_rows = rows_of(index_cases, index_samples)
    print(
        "\n"
        + harness.table(
            index_rows, {"what": "", "contender": "", "pool": "blocks"} | spread
        )
    )
    large, small = (index_samples[f"match, jkv, {n}"] for n in (65_536, 4_096))
    targets = [
        ("match, 64 prompts of 2,048 over 65,536 blocks: ms", large.median * 1e3, 2.0),
        ("match, 65,536 blocks / 4,096 blocks", large.ratio_to(small), 1.3),
    ]

    token_cases, versions = first_token_cases(options.rounds)
    where["versions"] |= versions
    token_samples = harness.interleave(token_cases, rounds=options.rounds, warmup=2)
    token_rows = rows_of(token_cases, token_samples)
    cached = token_samples[token_cases[0].name]
    for row, case in zip(token_rows, token_cases, strict=True):
        row["ratio"] = token_samples[case.name].ratio_to(cached)
    print(
        "\n"
        + harness.table(
            token_rows, {"contender": "first token"} | spread | {"ratio": "by cached"}
        )
    )

    hit_cases, counted = no_hit_cases()
    hit_samples = harness.interleave(hit_cases, rounds=options.rounds)
    hit_rows = rows_of(hit_cases, hit_samples)
    print("\n" + harness.table(hit_rows, {"contender": "decode step"} | spread))
    columns = {key: key for key in counted[0]}
    print("\n" + harness.table(counted, columns))
    ratio = hit_samples["with an index"].ratio_to(hit_samples["without"])
    targets.append(
        ("decode step with an index that finds nothing / without", ratio, 1.03)
    )
    target_rows = [
        {
            "target": name,
            "measured": measured,
            "at most": most,
            "": "met" if measured <= most else "MISSED",
        }
        for name, measured, most in targets
    ]
    print("\n" + harness.table(target_rows, {k: k for k in target_rows[0]}))
    where["load after"] = harness.machine()["load"]
    run = {
        "benchmark": "reuse",
        "machine": where,
        "index": index_rows,
        "first token": token_rows,
        "no hits": {"rows": hit_rows, "counted": counted},
        "targets": target_rows,
    }
    harness.save(options.json, run)
    print(f"\nsaved in {options.json}")


if __name__ == "__main__":
    main()
