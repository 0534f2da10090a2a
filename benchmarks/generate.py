"""Throughput of jkv.generate and of transformers' generate on one checkpoint.

    python benchmarks/generate.py [--model FOLDER] [--rounds N]

Greedy, float32, same prompts, machine and process. transformers runs with one thread
and with one per core: its threads busy-wait, so that one thread may be faster on a
loaded machine. "Prefill" is a call with one new token, "decode" the further tokens of a
longer call: the median over rounds of the two calls' difference. The prompts of the
last workload differ in length: jkv packs them, transformers pads them to the longest.
Both must generate the same tokens. Compilation is part of the warm-up.
"""

import argparse
import dataclasses
import importlib.util
import pathlib
import statistics
import sys
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import Case, Samples

import jkv

ROOT = pathlib.Path(__file__).parent.parent
BUNDLED = ROOT / "examples" / "models" / "pydoc"
RESULTS = pathlib.Path(__file__).parent / "results" / "generate.json"
sys.path.insert(0, str(ROOT / "examples"))  # the examples are not a package

import pretrained  # noqa: E402  (found through the line above)

NEW_TOKENS = 64  # of the longer call, after the first


@dataclasses.dataclass(frozen=True)
class Workload:
    """A batch of prompts with the given lengths."""

    name: str
    lengths: tuple[int, ...]

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return random token ids, without the end-of-document token 0."""
        random = np.random.default_rng(0)
        return [random.integers(1, vocabulary, n).tolist() for n in self.lengths]


WORKLOADS = (
    Workload("1 prompt of 256", (256,)),
    Workload("8 prompts of 256", (256,) * 8),
    Workload("8 prompts of 32 to 256", tuple(range(32, 257, 32))),
)


class Jkv:
    """jkv.generate with one donated cache per workload."""

    name = "jkv"

    def __init__(self, folder: pathlib.Path) -> None:
        """Load the checkpoint."""
        self.model, self.params = pretrained.load(folder, jnp.float32)
        self.generate = jax.jit(
            jkv.generate,
            static_argnames=("model", "max_new_tokens"),
            donate_argnames="cache",
        )
        self.caches: dict[Workload, jkv.Cache] = {}

    def prepare(self, workload: Workload) -> jax.Array:
        """Return the padded prompts; the cache is reused between calls."""
        prompts = workload.prompts(self.model.config.vocab_size)
        longest = max(workload.lengths)
        if workload not in self.caches:
            config = jkv.CacheConfig.for_context_length(
                longest + NEW_TOKENS + 1,
                max_sequences=len(prompts),
                dtype=jnp.float32,
                **self.model.cache_fields,
            )
            self.caches[workload] = jkv.init(config)
        padded = [prompt + [-1] * (longest - len(prompt)) for prompt in prompts]
        return jnp.array(padded, jnp.int32)

    def run(self, workload: Workload, prompts: jax.Array, num_new: int) -> np.ndarray:
        """Return the new tokens, [B, num_new]."""
        self.caches[workload], result = self.generate(
            self.model,
            self.params,
            self.caches[workload],
            prompts,
            max_new_tokens=NEW_TOKENS + 1,
            limits=jnp.full((len(prompts),), num_new, jnp.int32),
        )
        return np.asarray(result.tokens)[:, :num_new]


class Transformers:
    """transformers' generate with its defaults: eager, dynamic cache."""

    def __init__(self, folder: pathlib.Path, num_threads: int) -> None:
        """Load the checkpoint; all calls use `num_threads` threads."""
        import torch
        import transformers

        self.num_threads = num_threads
        plural = "" if num_threads == 1 else "s"
        self.name = f"transformers, {num_threads} thread{plural}"
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.torch, self.versions = (
            torch,
            {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        )
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        # No end token: every call generates all its tokens.
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def prepare(self, workload: Workload) -> dict[str, Any]:
        """Return the prompts, padded on the left, and their mask."""
        self.torch.set_num_threads(self.num_threads)
        prompts = workload.prompts(self.model.config.vocab_size)
        longest = max(workload.lengths)
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - n) + [1] * n for n in workload.lengths]
        return {
            "input_ids": self.torch.tensor(ids),
            "attention_mask": self.torch.tensor(mask),
        }

    def run(
        self, workload: Workload, prompts: dict[str, Any], num_new: int
    ) -> np.ndarray:
        """Return the new tokens, [B, num_new]."""
        tokens = self.model.generate(**prompts, max_new_tokens=num_new, do_sample=False)
        return tokens[:, max(workload.lengths) :].numpy()


def make_case(peer: Jkv | Transformers, workload: Workload, num_new: int) -> Case:
    """Return one call of one peer."""

    def check(tokens: np.ndarray) -> None:
        assert tokens.shape == (len(workload.lengths), num_new) and (tokens >= 0).all()

    return Case(
        name=f"{peer.name}, {workload.name}, {num_new}",
        prepare=lambda: peer.prepare(workload),
        run=lambda prompts: peer.run(workload, prompts, num_new),
        check=check,
    )


def less(longer: Samples, shorter: Samples) -> Samples:
    """Return the differences by round."""
    common = longer.seconds.keys() & shorter.seconds.keys()
    return Samples({r: longer.seconds[r] - shorter.seconds[r] for r in common})


def agreement(peers: list[Any], workload: Workload) -> float:
    """Return the share of new tokens on which the peers agree."""
    first, *others = (
        peer.run(workload, peer.prepare(workload), NEW_TOKENS + 1) for peer in peers
    )
    return min((float(np.mean(first == other)) for other in others), default=1.0)


def make_rows(
    peers: list[Any], samples: dict[str, Samples], agreements: dict[str, float]
) -> list[dict[str, Any]]:
    """Return tokens per second of each peer, phase and workload."""
    rows = []
    for workload in WORKLOADS:
        for phase in ("prefill", "decode"):
            times = {}
            for peer in peers:
                one = samples[f"{peer.name}, {workload.name}, 1"]
                many = samples[f"{peer.name}, {workload.name}, {NEW_TOKENS + 1}"]
                times[peer.name] = one if phase == "prefill" else less(many, one)
            num_tokens = sum(workload.lengths)
            if phase == "decode":
                num_tokens = NEW_TOKENS * len(workload.lengths)
            for name, taken in times.items():
                rates = [num_tokens / s for s in taken.seconds.values()]
                low, high = np.percentile(rates, [10, 90])
                rows.append(
                    {
                        "workload": workload.name,
                        "phase": phase,
                        "what": name,
                        "tokens_per_second": statistics.median(rates),
                        "p10": float(low),
                        "p90": float(high),
                        "ratio": times["jkv"].ratio_to(taken) ** -1,
                        "same tokens": agreements[workload.name],
                        "samples": len(rates),
                    }
                )
    return rows


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, default=BUNDLED)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()

    where = harness.machine()
    peers: list[Any] = [Jkv(options.model)]
    absent = [
        name
        for name in ("torch", "transformers")
        if importlib.util.find_spec(name) is None
    ]
    if not absent:
        for num_threads in sorted({1, where["cores"]}):
            peers.append(Transformers(options.model, num_threads))
        where["versions"] |= peers[-1].versions
    print(harness.header("Generation: prefill and decode, float32, greedy", where))
    print(f"  model {options.model.name}; XLA uses as many threads as there are cores")

    cases = [
        make_case(peer, workload, num_new)
        for workload in WORKLOADS
        for peer in peers
        for num_new in (1, NEW_TOKENS + 1)
    ]
    samples = harness.interleave(cases, rounds=options.rounds, warmup=2)
    where["load after"] = harness.machine()["load"]
    agreements = {w.name: agreement(peers, w) for w in WORKLOADS}
    rows = make_rows(peers, samples, agreements)
    headings = {
        "workload": "workload",
        "phase": "phase",
        "what": "",
        "tokens_per_second": "tokens/s",
        "p10": "p10",
        "p90": "p90",
        "ratio": "jkv by this",
        "same tokens": "same tokens",
        "samples": "samples",
    }
    print("\n" + harness.table(rows, headings))
    if absent:
        print(f"\ntransformers: absent ({', '.join(absent)} not installed)")
    run = {
        "benchmark": "generate",
        "machine": where,
        "model": options.model.name,
        "rows": rows,
        "absent": ["transformers"] if absent else [],
    }
    harness.save(options.json, run)
    print(f"\nsaved in {options.json}")


if __name__ == "__main__":
    main()
