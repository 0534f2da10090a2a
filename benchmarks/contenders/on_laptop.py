"""A published model on jkv, `transformers` and llama.cpp, with identical calls.

    python benchmarks/contenders/on_laptop.py NAME FILE.gguf THREADS

reads calls from standard input, one JSON line each, and prints their times. It is a
separate process, so that memory and threads are its own. With NAME `first` it generates
one token with the last-named contender, and exits.
"""

import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))  # the examples are not a package
QUESTIONS = pathlib.Path(__file__).with_name("questions.txt")
CONTEXT = 1088  # tokens of the longest prompt and completion
MOST_RUNNING = 16  # sequences at one time
Prompts = Sequence[Sequence[int]]


class Jkv:
    """`generate` with one program per number of sequences, and the engine."""

    def __init__(self, path: pathlib.Path) -> None:
        """Load the model as the commands do on a CPU."""
        import jax.numpy as jnp
        import pretrained

        import jkv
        from jkv.commands.compiled_programs import keep_compiled_programs

        keep_compiled_programs()
        self.model, self.params = pretrained.load(path, jnp.float32, loop_layers=True)
        self.tokenizer = pretrained.load_tokenizer(path)
        self._jkv, self._engine = jkv, None

    def make_cache(self, num: int, length: int) -> Any:
        """Return a cache for `num` sequences of `length` tokens."""
        config = self.model.cache_config(
            length, max_sequences=num, dtype=np.float32, step_tokens=256
        )
        return self._jkv.init(config)

    def generate(self, prompts: Prompts, num_new: int) -> int:
        """Continue all prompts; return the number of new tokens."""
        cache = self.make_cache(len(prompts), len(prompts[0]) + num_new + 1)
        _, result = self._jkv.jitted.generate(
            self.model,
            self.params,
            cache,
            np.asarray(prompts, np.int32),
            max_new_tokens=num_new,
        )
        return int(np.asarray(result.lengths).sum())

    def answer(self, prompts: Prompts, num_new: int) -> int:
        """Serve a queue, `MOST_RUNNING` sequences at a time, until their end tokens."""
        from jkv.serving import Engine

        if self._engine is None:
            longest = max(map(len, prompts))
            self._engine = Engine(
                self.model,
                self.params,
                self.make_cache(MOST_RUNNING, longest + num_new + 1),
                max_running=MOST_RUNNING,
                max_new_tokens=num_new,
                max_prompt_tokens=longest,
                stop_tokens=self.model.config.stop_tokens,
            )
        numbers = [self._engine.submit(prompt) for prompt in prompts]
        while not self._engine.is_idle:
            self._engine.step()
        found = [self._engine.results(number)[0] for number in numbers]
        return sum(len(each.tokens) for each in found)


class Transformers:
    """transformers' `generate`, with weights dequantized to float32."""

    def __init__(self, path: pathlib.Path, num_threads: int) -> None:
        """Load the model."""
        import torch
        import transformers

        torch.set_num_threads(num_threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._torch = torch
        where = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32
        )
        self.model = model.eval()
        self.model.generation_config.pad_token_id = 0
        self._ends = self.model.generation_config.eos_token_id

    def generate(self, prompts: Prompts, num_new: int) -> int:
        """Continue all prompts; return the number of new tokens."""
        ids = self._torch.tensor([list(each) for each in prompts])
        found = self._call(ids, self._torch.ones_like(ids), num_new, num_new)
        return found.shape[0] * (found.shape[1] - ids.shape[1])

    def answer(self, prompts: Prompts, num_new: int) -> int:
        """Serve a queue in batches, each until its last sequence has ended."""
        count = 0
        for start in range(0, len(prompts), MOST_RUNNING):
            batch = prompts[start : start + MOST_RUNNING]
            longest = max(map(len, batch))
            ids = [[0] * (longest - len(each)) + list(each) for each in batch]
            mask = [[0] * (longest - len(each)) + [1] * len(each) for each in batch]
            tensors = map(self._torch.tensor, (ids, mask))
            found = self._call(*tensors, num_new)[:, longest:]
            count += int((found != 0).sum())
        return count

    def _call(self, ids: Any, mask: Any, num_new: int, least: int = 0) -> Any:
        limits = dict(max_new_tokens=num_new, min_new_tokens=least, do_sample=False)
        with self._torch.inference_mode():
            return self.model.generate(ids, attention_mask=mask, **limits)


class LlamaCpp:
    """llama.cpp from the package xllamacpp, with the file's quantized weights."""

    def __init__(self, path: pathlib.Path, num_threads: int) -> None:
        """Load the model."""
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = str(path)
        options.n_ctx, options.n_parallel, options.kv_unified = 64 * 128, 64, True
        options.cpuparams.n_threads = num_threads
        options.cpuparams_batch.n_threads = num_threads
        options.cache_prompt, options.warmup, options.verbosity = False, False, -1
        options.cache_ram_mib = 0
        self._server = xllamacpp.Server(options)

    def generate(self, prompts: Prompts, num_new: int) -> int:
        """Continue all prompts; return the number of new tokens."""
        return self._call(prompts, num_new, ignores_end=True)

    def answer(self, prompts: Prompts, num_new: int) -> int:
        """Serve a queue in 64 llama.cpp slots."""
        return self._call(prompts, num_new, ignores_end=False)

    def _call(self, prompts: Prompts, num_new: int, ignores_end: bool) -> int:
        fields = dict(n_predict=num_new, temperature=0, cache_prompt=False)
        many = [list(each) for each in prompts]
        found = self._server.handle_completions(
            {
                **fields,
                "prompt": many if len(many) > 1 else many[0],
                "ignore_eos": ignores_end,
            }
        )
        return int(found["usage"]["completion_tokens"])


class Floor:
    """Machine limits: bytes per second of a sum, operations per second of a product."""

    def __init__(self) -> None:
        """Allocate arrays that exceed the processor's caches."""
        import jax
        import jax.numpy as jnp
        import torch

        numbers, matrix = torch.ones(2**27), jnp.ones((1536, 1536))
        multiply = jax.jit(jnp.matmul)
        multiply(matrix, matrix).block_until_ready()
        # The fastest of torch, numpy and JAX.
        self._works = (
            ("bytes", 4.0 * numbers.numel(), numbers.sum),
            (
                "operations",
                2.0 * 1536**3,
                lambda: multiply(matrix, matrix).block_until_ready(),
            ),
        )

    def measure(self) -> dict[str, float]:
        """Return both, by CPU time of one thread and by wall time."""
        found = {}
        for name, amount, work in self._works:
            taken = take(lambda work=work: [work() for _ in range(4)])
            for clock in ("wall", "processor"):
                found[f"{name}, {clock}"] = 4 * amount / taken[clock]
        return found


def take(work: Any) -> dict[str, Any]:
    """Run `work`; return its result, seconds and peak memory."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    wall, processor = time.perf_counter(), time.process_time()
    found = work()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return {
        "found": found if isinstance(found, int) else None,
        "wall": wall,
        "processor": processor,
        "memory": int(peak) * 1024,
    }


def load(name: str, path: pathlib.Path, num_threads: int) -> Any:
    """Return a contender."""
    if name == "jkv":
        return Jkv(path)
    kinds = {"transformers": Transformers, "llama.cpp": LlamaCpp}
    return kinds[name](path, num_threads)


def main() -> None:
    """Process calls until standard input ends."""
    name, file, num_threads, *first = sys.argv[1:]
    if name == "first":
        load(first[0], pathlib.Path(file), int(num_threads)).generate([range(1, 5)], 1)
        return
    duplicate = os.dup(1)
    os.dup2(2, 1)  # library output goes to standard error
    answers = os.fdopen(duplicate, "w", buffering=1)
    peer = (
        Floor() if name == "floor" else load(name, pathlib.Path(file), int(num_threads))
    )
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        if call == "measure":
            found = peer.measure()
        else:
            found = take(lambda: getattr(peer, call)(*arguments))  # noqa: B023
        print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
