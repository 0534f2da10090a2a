"""Prefill for `gpu.py`, with and without cuDNN for prompts without cached tokens.

A single prompt; one beside sequences that decode in the same step; a chunk with cached
tokens, which cuDNN does not support, so that the difference is the cost of the check.
Shapes of Llama 3 8B in bfloat16. Calls are chained as in `gpu_calls.py`, and each
computes the kernel's work lists. The two results are compared before timing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
from gpu_calls import BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, compile_all
from gpu_torch import TORCH, Synchronised, import_torch
from harness import Case

import jkv
from jkv.formats.format import STORED_AS

KERNEL, CUDNN = "jkv", "jkv, prompts by cuDNN"
CALLS = 4  # per program
SAMPLE_OPERATIONS = 1e13  # approximate operations of a sample
CLOSE = 3e-2  # tolerance for numbers around 1, in bfloat16


class Step(NamedTuple):
    """Rows of a prompt, or of its chunk, and sequences that decode in the same step."""

    rows: int
    past: int = 0
    decoding: int = 0
    context: int = 0  # tokens of each decoding sequence

    @property
    def label(self) -> str:
        """Rows, past and decoding sequences in words."""
        words = [f"1 x {self.rows:,}"]
        words += [f"behind {self.past:,}"] if self.past else []
        words += [f"beside {self.decoding} x {self.context:,}"] if self.decoding else []
        return " ".join(words)

    @property
    def requests(self) -> list[tuple[int, int]]:
        """Rows and context of each request; the prompt is the last one."""
        prompt = self.rows, self.past + self.rows
        return [(1, self.context)] * self.decoding + [prompt]

    @property
    def num_operations(self) -> int:
        """Multiplications and additions of a call."""
        pairs = self.rows * self.past + self.rows * (self.rows + 1) // 2
        pairs += self.decoding * self.context
        return 2 * NUM_HEADS * 2 * HEAD_DIM * pairs


def find_steps(quick: bool) -> list[Step]:
    """Return the workloads."""
    if quick:
        return [Step(64), Step(60, decoding=4, context=32)]
    return [
        Step(512),
        Step(2_048),
        Step(4_096),
        Step(8_192),
        Step(32_768),
        Step(8_128, decoding=64, context=2_048),
        Step(8_192, past=8_192),
    ]


def measure_prompts(quick: bool, rounds: int) -> list[dict[str, Any]]:
    """Return a row per peer and step, unsupported ones with their reason."""
    rows: list[dict[str, Any]] = []
    operands = {step: make_operands(step) for step in find_steps(quick)}
    programs: dict[Any, Any] = {}
    for step, given in operands.items():
        for contender, chosen in ((KERNEL, "pallas"), (CUDNN, "cudnn")):
            programs[step, contender] = make_program(chosen), given
            programs[step, contender, 1] = make_program(chosen, calls=1), given
    compiled = compile_all(programs)
    harness.wait_for_turn()
    for step, given in operands.items():
        cases = []
        for contender in (KERNEL, CUDNN, TORCH):
            labels = {"step": step.label, "contender": contender}
            try:
                if contender == TORCH:
                    run = torch_program(step)
                else:
                    if contender == CUDNN:
                        compare(
                            *(
                                _take(compiled[step, name, 1])
                                for name in (contender, KERNEL)
                            ),
                            given,
                        )
                    run = functools.partial(_take(compiled[step, contender]), *given)
                jax.block_until_ready(run())
                cases.append(_make_case(contender, step, run))
            except Exception as error:  # a refusal is a result
                reason = f"{type(error).__name__}: {error}"[:200]
                rows.append({**labels, "refused": reason})
        if not cases:
            continue
        samples = harness.interleave(cases, rounds=rounds, warmup=1, seconds_per_case=4)
        for name, taken in samples.items():
            row = {"step": step.label, "contender": name, **taken.row()}
            row["TFLOP/s"] = step.num_operations / taken.median / 1e12
            row |= {
                f"by {peer}": taken.ratio_to(samples[contender])
                for peer, contender in (("jkv", KERNEL), ("torch", TORCH))
                if contender in samples
            }
            rows.append(row)
        print(f"  measured prompts of {step.label}", flush=True)
    return rows


def _take(program: Any) -> Any:
    """Return a compiled program; raise the error if compiling failed."""
    if isinstance(program, Exception):
        raise program
    return program


def make_operands(step: Step) -> list[jax.Array]:
    """Return queries, pools, tables in random order, and lengths of requests."""
    rows, contexts = np.array(step.requests, np.int32).T
    blocks = -(-contexts // BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(blocks.sum())
    tables = np.zeros((len(rows), blocks.max()), np.int32)
    ends = np.cumsum(blocks)
    for row, (end, count) in enumerate(zip(ends, blocks, strict=True)):
        tables[row, :count] = order[end - count : end]
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    names = jax.random.split(jax.random.key(0), 3)
    shape = 1, int(blocks.sum()), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM
    stored = STORED_AS[jnp.dtype(jnp.bfloat16)]
    pools = (
        jax.lax.bitcast_convert_type(draw(name, shape), stored) for name in names[:2]
    )
    queries = draw(names[2], (int(rows.sum()), NUM_HEADS, HEAD_DIM))
    starts = np.cumsum(rows, dtype=np.int32) - rows
    return [queries, *pools, *map(jnp.asarray, (tables, starts, rows, contexts))]


def make_program(
    implementation: str | None, calls: int = CALLS
) -> Callable[..., jax.Array]:
    """Return a program of calls, each on the previous call's output."""

    def program(queries: jax.Array, *rest: jax.Array) -> jax.Array:
        keys, values, tables, *lengths = rest
        for _ in range(calls):
            queries = jkv.paged_attention(
                *(queries, keys, values, 0, tables, None, *lengths),
                kv_dtype=jnp.bfloat16,
                implementation=implementation,
            )
        return queries

    return program


def compare(
    cudnn: Callable[..., jax.Array],
    kernel: Callable[..., jax.Array],
    given: list[jax.Array],
) -> None:
    """Raise ValueError if cuDNN's results differ from the kernel's."""
    found, wanted = (run(*given).astype(jnp.float32) for run in (cudnn, kernel))
    error = float(jnp.max(jnp.abs(found - wanted)))
    if not error <= CLOSE:  # NaN too
        raise ValueError(f"cuDNN's results differ from the kernel's by {error:.2g}")


def torch_program(step: Step) -> Callable[[], Any]:
    """Return PyTorch's attention over contiguous keys and values."""
    torch = import_torch()
    if step.past or step.decoding:
        raise NotImplementedError("a prompt alone")
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    first, keys, values = (
        make(1, heads, step.rows, HEAD_DIM)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )

    def run() -> Any:
        queries = first
        for _ in range(CALLS):
            queries = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )
        return Synchronised()

    return run


def _make_case(name: str, step: Step, run: Callable[[], Any]) -> Case:
    times = int(SAMPLE_OPERATIONS / (step.num_operations * CALLS))
    times = max(1, min(50, times))

    def run_all(_: None) -> Any:
        for _ in range(times):
            result = run()
        return jax.block_until_ready(result)

    return Case(name=name, prepare=lambda: None, run=run_all, calls=times * CALLS)
