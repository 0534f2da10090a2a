"""A Flax NNX model with a paged cache.

    python examples/flax_model.py

The module does not depend on a cache: each layer passes its queries, keys and values to
an `attend` function. With plain causal attention the model can be trained; with
`Step.attend` it decodes. The script generates with random weights and shows that both
return the same logits.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from generating.arguments import Parser
from generating.exiting import errors_in_one_line

import jkv

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 96, 32, 2, 4, 2, 8, 64


class Block(nnx.Module):
    """Transformer block with pre-norm attention and MLP."""

    def __init__(self, rngs: nnx.Rngs):
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.attention_norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.projection = nnx.Linear(HIDDEN, width, use_bias=False, rngs=rngs)
        self.output = nnx.Linear(HEADS * HEAD_DIM, HIDDEN, use_bias=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 4 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(4 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, hidden: jax.Array, attend: Callable) -> jax.Array:
        projected = self.projection(self.attention_norm(hidden))
        heads = projected.reshape(hidden.shape[0], -1, HEAD_DIM)
        split = jnp.split(heads, (HEADS, HEADS + KV_HEADS), axis=1)
        attended = attend(*split).reshape(hidden.shape[0], -1)
        hidden = hidden + self.output(attended)
        return hidden + self.down(nnx.gelu(self.up(self.mlp_norm(hidden))))


class Decoder(nnx.Module):
    """Decoder-only transformer: logits [R, V] of R tokens and positions."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)

    def __call__(self, tokens, positions, attend: Callable) -> jax.Array:
        hidden = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden, attend)
        return self.tokens.attend(self.norm(hidden))


def paged(decoder: Decoder) -> tuple[jkv.Model, nnx.State]:
    """Return the module as a `jkv.Model` and its parameters."""
    graph, params = nnx.split(decoder)

    def forward(params, tokens, positions, step: jkv.Step) -> jax.Array:
        return nnx.merge(graph, params)(tokens, positions, step.attend)

    return jkv.model_of(forward, rows="packed"), params


def dense(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    """Return the logits [T, V] of one sequence, without a cache."""

    def attend(queries, keys, values):
        batched = (x[None] for x in (queries, keys, values))
        return jax.nn.dot_product_attention(*batched, is_causal=True)[0]

    return decoder(tokens, jnp.arange(len(tokens), dtype=jnp.int32), attend)


def main(num_tokens: int = 12) -> None:
    decoder = Decoder(nnx.Rngs(0))
    model, params = paged(decoder)
    fields = dict(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    sizes = dict(num_blocks=16, block_size=4, max_sequences=2, dtype=jnp.float32)
    cache = jkv.init(jkv.CacheConfig(**fields, **sizes, max_context_length=CONTEXT))

    @partial(jax.jit, donate_argnames="cache")
    def step(params, cache, seq_ids, lengths, tokens):
        cache, batch = jkv.append(cache, seq_ids, lengths, capacity=len(tokens))
        logits, cache = model(params, tokens, cache, batch)
        return jkv.commit(cache, batch), batch.status, logits

    # Two prompts of different lengths, packed into one array of rows.
    sequences, lengths = [[5, 17, 80, 3, 9], [42, 7]], jnp.array([5, 2])
    cache, opened = jkv.allocate(cache, lengths)
    rows = jnp.array(sum(sequences, []))
    for _ in range(num_tokens):
        cache, status, logits = step(params, cache, opened.seq_ids, lengths, rows)
        jkv.raise_for_status(status)
        rows, lengths = logits.argmax(-1), jnp.array([1, 1])
        sequences = [
            [*sequence, int(token)]
            for sequence, token in zip(sequences, rows, strict=True)
        ]

    whole = jax.jit(partial(dense, decoder))
    for sequence, paged_logits in zip(sequences, logits, strict=True):
        error = jnp.abs(whole(jnp.array(sequence[:-1]))[-1] - paged_logits).max()
        assert error < 1e-4, "the paged model must agree with plain attention"
        print(*sequence, f"| paged and plain logits differ by at most {error:.0e}")


if __name__ == "__main__":
    with errors_in_one_line():
        Parser(__doc__).parse_args()
        main()
