"""Causal convolutions over the last few tokens, for each channel on its own.

A layer's state is the K - 1 tokens before the next one. LFM2 has nothing else in such
a layer, between two gates that are each a product of the layer's input
(https://arxiv.org/abs/2511.23404); Mamba 2 and the delta rule convolve what their
states are fed with.

Rules come in two forms. That of one token is ``rule(state, input) -> state, output``;
that of up to C tokens, ``chunk_rule(state, inputs, count) -> state, outputs``, has a
leading axis C in inputs and outputs, of which the first ``count`` i32[] are tokens.
What lies behind them is not looked at. Both are for one sequence.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from ..layers import Weights, linear

Arrays = Mapping[str, jax.Array]
Rule = Callable[[Arrays, Arrays], tuple[dict[str, jax.Array], jax.Array]]
ChunkRule = Callable[
    [Arrays, Arrays, jax.Array], tuple[dict[str, jax.Array], jax.Array]
]


def convolve(
    past: jax.Array, row: jax.Array, kernel: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Convolve one token with those before it.

    Args:
        past: [K - 1, *channels], the tokens before it, oldest first.
        row: [*channels], the token.
        kernel: [K, *channels], its last row is the token's own.
        bias: [*channels], added if there is one.

    Returns:
        f32[*channels], and the next ``past``.
    """
    window = jnp.concatenate([past, row.astype(past.dtype)[None]])
    return _sum_window(window, kernel, bias, 1)[0], window[1:]


def convolve_chunk(
    past: jax.Array,
    rows: jax.Array,
    count: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolve several tokens with those before each.

    Args:
        past: [K - 1, *channels], the tokens before the first, oldest first.
        rows: [C, *channels].
        count: i32[], how many of the rows are tokens.
        kernel: [K, *channels], its last row is a token's own.
        bias: [*channels], added if there is one.

    Returns:
        f32[C, *channels], of which the rows behind the tokens mean nothing; and the
        ``past`` of the token that comes next.
    """
    window = jnp.concatenate([past, rows.astype(past.dtype)])
    following = jax.lax.dynamic_slice_in_dim(window, count, past.shape[0])
    return _sum_window(window, kernel, bias, rows.shape[0]), following


def keep_tokens(inputs: Arrays, count: jax.Array) -> dict[str, jax.Array]:
    """Return the inputs [C, ...] of a chunk with zeros behind its tokens."""

    def keep(rows: jax.Array) -> jax.Array:
        numbers = jnp.arange(rows.shape[0], dtype=jnp.int32)
        is_token = jnp.expand_dims(numbers < count, range(1, rows.ndim))
        return jnp.where(is_token, rows, jnp.zeros_like(rows))

    return {name: keep(rows) for name, rows in inputs.items()}


def project(weights: Weights, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the second gate of each row, and what it feeds to the rules.

    Args:
        weights: of the layer; of them ``mixer_first`` and ``mixer_second``, the gates,
            and ``mixer_row``, perhaps with biases.
        x: [R, E].

    Returns:
        [R, E], and the inputs of `make_rules` for each row: the first gate times a
        third product of `x`.
    """
    first, second, row = (
        linear(x, weights, f"mixer_{name}") for name in ("first", "second", "row")
    )
    return second, {"row": first * row}


def make_rules(kernel: jax.Array, bias: jax.Array | None) -> tuple[Rule, ChunkRule]:
    """Return both forms of a layer that only convolves.

    Its state is ``past`` [K - 1, *channels], its input ``row`` [*channels], which is
    all that has to be kept of a token to take it back; outputs are f32[*channels].

    Args:
        kernel: [K, *channels].
        bias: [*channels], or None.
    """

    def rule(state: Arrays, input: Arrays) -> tuple[dict[str, jax.Array], jax.Array]:
        output, past = convolve(state["past"], input["row"], kernel, bias)
        return {"past": past}, output

    def chunk_rule(
        state: Arrays, inputs: Arrays, count: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        rows = keep_tokens(inputs, count)["row"]
        outputs, past = convolve_chunk(state["past"], rows, count, kernel, bias)
        return {"past": past}, outputs

    return rule, chunk_rule


def _sum_window(
    window: jax.Array, kernel: jax.Array, bias: jax.Array | None, num_rows: int
) -> jax.Array:
    """Return rows whose tokens end a piece of the window, as long as the kernel."""
    # Shifted sums, K of them: XLA has no fast convolution by channel on every device.
    wide = jnp.float32
    parts = [
        window[i : i + num_rows].astype(wide) * kernel[i].astype(wide)[None]
        for i in range(kernel.shape[0])
    ]
    if bias is not None:
        parts.append(bias.astype(wide)[None])
    return sum(parts[1:], parts[0])
