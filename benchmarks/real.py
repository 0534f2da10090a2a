"""Two published models on a CPU: jkv, `transformers` and llama.cpp.

    python benchmarks/real.py [--models smollm2 gemma3] [--threads N] [--rounds N]

The models of `tools/models.py`, greedy, with the same prompt tokens: 1, 4, 16 and 64
sequences with prompts of 32 tokens, a prompt of 1,000 tokens, a queue of 64 questions,
and the time to first token, warm and of a new process. jkv and `transformers` compute
in float32 with the file's weights dequantized, llama.cpp (`pip install xllamacpp`) with
4 bits.

Each contender is a separate process (`contenders/on_laptop.py`) that idles while others
compute; each round runs all cases of all contenders in random order, with as many cores
as threads. CPU time is reported besides wall time, as load affects it less. `floor` is
the longer of the times to read the weights once per step and to compute the products,
at the rates of `Floor` in the same rounds; `by floor` is the measured time over it.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import harness
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = pathlib.Path(__file__).parent / "results" / "real.json"
CHILD = ROOT / "benchmarks" / "contenders" / "on_laptop.py"
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "examples")]

import models  # noqa: E402  (found through the line above)
import pretrained  # noqa: E402
from contenders.on_laptop import QUESTIONS  # noqa: E402

PEERS = ("jkv", "transformers", "llama.cpp")
# Thread counts of CPU libraries, to limit all of them.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Case(NamedTuple):
    """A compared call."""

    name: str
    call: str  # method of the contender
    num_sequences: int
    prompt: int  # tokens per prompt
    num_new: int  # new tokens per sequence


CASES = (
    Case("1 text", "generate", 1, 32, 48),
    Case("4 texts", "generate", 4, 32, 32),
    Case("16 texts", "generate", 16, 32, 24),
    Case("64 texts", "generate", 64, 32, 16),
    Case("prompt of 1,000", "generate", 1, 1000, 1),
    Case("first token, warm", "generate", 1, 32, 1),
    Case("queue of 64 questions", "answer", 64, 0, 32),
)


class Sizes(NamedTuple):
    """Bytes read and operations of a step."""

    body: int  # weights of the layers
    head: int  # of the product with the vocabulary
    bytes_in_file: int

    def floor(self, case: Case, peer: str, rates: dict[str, float]) -> float:
        """Return the minimal seconds of a call."""
        size = 4 * (self.body + self.head)
        read = (self.bytes_in_file if peer == "llama.cpp" else size) / rates["bytes"]

        def step(rows: int) -> float:
            work = 2 * (rows * self.body + case.num_sequences * self.head)
            return max(read, work / rates["operations"])

        first = step(case.num_sequences * case.prompt)
        return first + (case.num_new - 1) * step(case.num_sequences)


class Child:
    """A contender in a separate process."""

    def __init__(self, name: str, path: pathlib.Path, threads: int) -> None:
        """Start the process; return after it has loaded its model."""
        command = [sys.executable, str(CHILD), name, str(path), str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            env=make_environment(threads),
        )
        self._read()

    def ask(self, *call: Any) -> Any:
        """Run a call and return its result."""
        assert self._process.stdin is not None
        print(json.dumps(call), file=self._process.stdin)
        return self._read()

    def close(self) -> None:
        """Close the process."""
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"contender exited: {self._process.args}")
        return json.loads(line)


def make_environment(threads: int) -> dict[str, str]:
    """Return environment variables that set the number of threads."""
    found = os.environ | dict.fromkeys(THREADS, str(threads))
    if threads == 1:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
        found["XLA_FLAGS"] = flags.strip()
    return found


def make_prompts(case: Case, path: pathlib.Path, vocabulary: int) -> list[list[int]]:
    """Return token ids, random or of the questions."""
    if case.call == "generate":
        drawn = np.random.default_rng(0)
        shape = (case.num_sequences, case.prompt)
        return drawn.integers(1000, vocabulary - 1000, shape).tolist()
    tokenizer, chats = (
        pretrained.load_tokenizer(path),
        pretrained.has_chat_template(path),
    )
    questions = QUESTIONS.read_text().splitlines()
    if chats:
        questions = [pretrained.render_chat(path, each) for each in questions]
    return [
        each.ids
        for each in tokenizer.encode_batch(questions, add_special_tokens=not chats)
    ]


def start_anew(peer: str, path: pathlib.Path, threads: int) -> Iterator[dict[str, Any]]:
    """Yield a new process's time to first token, cold, then warm."""
    with tempfile.TemporaryDirectory() as kept:
        environment = make_environment(threads) | {"XDG_CACHE_HOME": kept}
        command = [sys.executable, str(CHILD), "first", str(path), str(threads), peer]
        if peer == "jkv":
            script = str(ROOT / "examples" / "generate.py")
            command = [sys.executable, script, "--model", str(path), "--json"]
            command += ["--temperature", "0", "--max-new-tokens", "1", "Hello, world"]
        for name in ("cold", "again"):
            began, before = time.perf_counter(), os.times()
            subprocess.run(command, env=environment, check=True, capture_output=True)
            after = os.times()
            spent = after.children_user - before.children_user
            spent += after.children_system - before.children_system
            wall = time.perf_counter() - began
            yield {"case": f"new process, {name}", "wall": wall, "processor": spent}


def measure(
    name: str, threads: int, rounds: int, peers: list[str], cases: list[Case]
) -> list[dict[str, Any]]:
    """Return the rows of a model."""
    path = models.fetch(name)
    config = pretrained.read_config(path)
    whole = sum(int(np.prod(s)) for s in _list_shapes(config))
    head = config.vocab_size * config.hidden_size
    sizes = Sizes(whole - head, head, path.stat().st_size)
    prompts = {each: make_prompts(each, path, config.vocab_size) for each in cases}
    children = {each: Child(each, path, threads) for each in ("floor", *peers)}
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    rates, order = [], random.Random(0)
    for round_ in range(rounds + 1):  # the first one compiles, and is dropped
        rates.append(children["floor"].ask("measure"))
        for case in cases:
            for peer in order.sample(peers, len(peers)):
                taken = children[peer].ask(case.call, prompts[case], case.num_new)
                taken["load"] = os.getloadavg()[0]
                if round_:
                    samples.setdefault((case.name, peer), []).append(taken)
            harness.progress(f"{name}: round {round_} of {rounds}, {case.name}")
    for child in children.values():
        child.close()
    return [
        _row(peer, case, taken, sizes, rates) for (case, peer), taken in samples.items()
    ]


def start_all(name: str, threads: int, peers: list[str]) -> list[dict[str, Any]]:
    """Return the rows of new processes."""
    path, samples = models.fetch(name), {}
    for round_ in range(2):
        for peer in random.Random(round_).sample(peers, len(peers)):
            for taken in start_anew(peer, path, threads):
                samples.setdefault((taken["case"], peer), []).append(taken)
            harness.progress(f"{name}: new processes of {peer}")
    return [_row(peer, case, taken) for (case, peer), taken in samples.items()]


def _row(
    peer: str,
    name: str,
    taken: list[dict[str, Any]],
    sizes: Sizes | None = None,
    rates: Sequence[dict[str, float]] = (),
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": name, "contender": peer}
    for clock in ("wall", "processor"):
        seconds = [each[clock] for each in taken]
        row[clock] = statistics.median(seconds)
        row[f"{clock}, least"], row[f"{clock}, most"] = min(seconds), max(seconds)
    row["samples"] = len(taken)
    found = [each["found"] for each in taken if each.get("found")]
    if found:
        row["new tokens"] = found[-1]
        row["MB"] = max(each["memory"] for each in taken) / 1e6
    case = next((each for each in CASES if each.name == name), None)
    if sizes and case and case.call == "generate":
        for clock in ("wall", "processor"):
            reached = {
                kind: statistics.median(each[f"{kind}, {clock}"] for each in rates)
                for kind in ("bytes", "operations")
            }
            row[f"rates, {clock}"] = reached
            row[f"floor, {clock}"] = sizes.floor(case, peer, reached)
            row[f"{clock} by floor"] = row[clock] / row[f"floor, {clock}"]
    return row


def _list_shapes(config: pretrained.DecoderConfig) -> Iterator[tuple[int, ...]]:
    from pretrained.tensors import layer_tensors, model_tensors

    yield from (each.shape for each in model_tensors(config).values())
    for run in config.runs:
        yield from (each.shape for each in layer_tensors(config, run).values())


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add each peer's times relative to jkv's."""
    own = {row["case"]: row for row in rows if row["contender"] == "jkv"}
    for row in rows:
        mine = own.get(row["case"])
        if mine is not None:
            for clock in ("wall", "processor"):
                row[f"{clock} by jkv's"] = row[clock] / mine[clock]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*models.MODELS])
    parser.add_argument("--cases", nargs="+", help="these alone; no new processes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="+", default=[*PEERS], choices=PEERS)
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        # Some libraries create more threads than configured.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: options.threads])
    where = harness.machine()
    print(harness.header("Two published models", where), flush=True)
    shown = ("case", "contender", "wall", "processor", "MB", "wall by floor")
    shown += ("processor by floor", "wall by jkv's", "processor by jkv's")
    for name in options.models:
        cases = [each for each in CASES if each.name in (options.cases or {each.name})]
        rows = measure(name, options.threads, options.rounds, options.peers, cases)
        if options.cases is None:
            rows += start_all(name, options.threads, options.peers)
        add_ratios(rows)
        print(f"\n{name}\n" + harness.table(rows, {key: key for key in shown}))
        ended = [round(load, 2) for load in os.getloadavg()]
        run = {
            "benchmark": f"{name}, {options.threads} threads",
            "machine": where | {"load at the end": ended},
            "rows": rows,
        }
        harness.save(options.json, run)
        print(f"\nsaved in {options.json}", flush=True)


if __name__ == "__main__":
    main()
