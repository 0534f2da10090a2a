"""Gradients of attention for `gpu.py`: forward and backward passes, as in training.

Prompts of equal length, and samples that share a prompt's blocks, as in `jkv.score`.
The gradients are with respect to queries, keys and values; a call is one program. The
rate counts the matrix products of both passes, two forward and five backward, without
recomputation.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
from gpu_calls import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, compile_all
from gpu_torch import TORCH, Synchronised, import_torch
from harness import Case

import jkv

JKV, PLAIN = "jkv", "jkv, plain path"
PLAIN_ROWS = 4_096  # row limit of the XLA backend
CALLS = 5  # enqueued in a sample


class Sequences(NamedTuple):
    """Sequences with a shared prompt and their own tokens."""

    count: int
    own: int  # tokens of each sequence
    shared: int = 0  # tokens of the shared prompt, a multiple of the block size
    dtype: str = "float16"
    block_size: int = 16

    @property
    def label(self) -> str:
        """Counts and lengths in words."""
        words = [f"{self.count} x {self.own:,}"]
        words += [f"behind {self.shared:,} shared"] if self.shared else []
        return ", ".join([*words, self.dtype, f"blocks of {self.block_size}"])

    @property
    def num_rows(self) -> int:
        """Query rows of a call."""
        return self.shared + self.count * self.own

    @property
    def num_operations(self) -> int:
        """Multiplications and additions of both passes."""
        pairs = self.shared * (self.shared + 1) // 2
        pairs += self.count * (self.own * self.shared + self.own * (self.own + 1) // 2)
        return 7 * 2 * NUM_HEADS * HEAD_DIM * pairs


def find_sequences(quick: bool) -> list[Sequences]:
    """Return the workloads, shortest first."""
    if quick:
        return [
            Sequences(2, 16, dtype="float32"),
            Sequences(3, 16, 32, dtype="float32"),
        ]
    return [
        Sequences(1, 2_048),
        Sequences(1, 2_048, block_size=64),
        Sequences(1, 2_048, dtype="float32"),
        Sequences(64, 128, 1_024),
        Sequences(64, 128, 1_024, dtype="float32"),
        Sequences(16, 1_024),
        Sequences(1, 16_384),
    ]


def measure_gradients(
    quick: bool, rounds: int, every: Sequence[Sequences] | None = None
) -> list[dict[str, Any]]:
    """Return a row per peer and shape, unsupported ones with their reason.

    Args:
      quick: tiny shapes.
      rounds: samples of each case.
      every: shapes; None for all.
    """
    rows: list[dict[str, Any]] = []
    chosen = find_sequences(quick) if every is None else every
    operands = {sequences: _make_operands(sequences) for sequences in chosen}
    compiled = compile_all(
        {
            (sequences, contender): (_make_gradient(contender), operands[sequences])
            for sequences in chosen
            for contender in (JKV, PLAIN)
            if contender == JKV or sequences.num_rows <= PLAIN_ROWS
        }
    )
    harness.wait_for_turn()
    for sequences in chosen:
        cases = []
        for contender in (JKV, PLAIN, TORCH):
            try:
                if contender == TORCH:
                    run = _torch_program(sequences)
                elif (sequences, contender) not in compiled:
                    continue
                else:
                    program = compiled[sequences, contender]
                    if isinstance(program, Exception):
                        raise program
                    run = functools.partial(program, *operands[sequences])
                jax.block_until_ready(run())
                cases.append(_make_case(contender, run))
            except Exception as error:  # a refusal is a result
                reason = f"{type(error).__name__}: {error}"[:200]
                rows.append(
                    {
                        "sequences": sequences.label,
                        "contender": contender,
                        "refused": reason,
                    }
                )
        if not cases:
            continue
        samples = harness.interleave(cases, rounds=rounds, warmup=1, seconds_per_case=4)
        for name, taken in samples.items():
            row = {"sequences": sequences.label, "contender": name, **taken.row()}
            row["TFLOP/s"] = sequences.num_operations / taken.median / 1e12
            if JKV in samples:
                row["ratio"] = taken.ratio_to(samples[JKV])
            rows.append(row)
        print(f"  measured the gradient of {sequences.label}", flush=True)
    return rows


def _make_case(name: str, run: Callable[[], Any]) -> Case:
    def run_all(_: None) -> Any:
        for _ in range(CALLS):
            result = run()
        return jax.block_until_ready(result)

    return Case(name=name, prepare=lambda: None, run=run_all, calls=CALLS)


def _make_operands(sequences: Sequences) -> list[jax.Array]:
    """Return queries, keys, values, cotangents, tables and lengths of requests."""
    tables, *lengths = _lay_out(sequences)
    num_blocks = int(tables.max()) + 1
    draw = functools.partial(jax.random.normal, dtype=sequences.dtype)
    shape = 1, num_blocks, NUM_KV_HEADS, sequences.block_size, HEAD_DIM
    names = jax.random.split(jax.random.key(0), 4)
    queries = draw(names[0], (sequences.num_rows, NUM_HEADS, HEAD_DIM))
    pools = draw(names[1], shape), draw(names[2], shape)
    cotangents = draw(names[3], queries.shape)
    return [*map(jnp.asarray, (queries, *pools, cotangents, tables, *lengths))]


def _make_gradient(contender: str) -> Callable[..., Any]:
    """Return a function of `_make_operands` that computes the three gradients."""

    def differentiate(*arrays: jax.Array) -> Any:
        *variables, cotangents, tables = arrays[:5]

        def attend(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
            return jkv.paged_attention(
                *(queries, keys, values, 0, tables, None, *arrays[5:]),
                implementation="xla" if contender == PLAIN else None,
            )

        return jax.vjp(attend, *variables)[1](cotangents)

    return differentiate


def _lay_out(sequences: Sequences) -> list[np.ndarray]:
    """Return tables in random order, and starts, lengths and contexts of requests."""
    shared, own = (
        sequences.shared // sequences.block_size,
        -(-sequences.own // sequences.block_size),
    )
    order = np.random.default_rng(0).permutation(shared + sequences.count * own)
    mine = order[shared:].reshape(sequences.count, own)
    prefix = np.broadcast_to(order[:shared], (sequences.count, shared))
    tables = np.concatenate([prefix, mine], axis=1)
    lengths = [sequences.own] * sequences.count
    if sequences.shared:  # the shared prompt is also a request
        tables, lengths = (
            np.concatenate([tables[:1], tables]),
            [sequences.shared, *lengths],
        )
    rows = np.array(lengths, np.int32)
    contexts = rows + sequences.shared
    if sequences.shared:
        contexts[0] = sequences.shared
    starts = np.cumsum(rows, dtype=np.int32) - rows
    return [tables.astype(np.int32), starts, rows, contexts.astype(np.int32)]


def _torch_program(sequences: Sequences) -> Callable[[], Any]:
    """Return PyTorch's attention over contiguous sequences, and its gradient."""
    torch = import_torch()
    if sequences.shared:
        raise NotImplementedError("no shared prompts")
    dtype = getattr(torch, sequences.dtype)
    make = functools.partial(torch.randn, device="cuda", dtype=dtype)
    queries, keys, values = (
        make(sequences.count, heads, sequences.own, HEAD_DIM, requires_grad=True)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    cotangents = make(sequences.count, NUM_HEADS, sequences.own, HEAD_DIM)

    def run() -> Any:
        output = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        torch.autograd.grad(output, (queries, keys, values), cotangents)
        return Synchronised()

    return run
