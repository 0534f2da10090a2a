"""An Equinox module that decodes with a paged cache.

    python examples/equinox_model.py

An Equinox module is a pytree and is passed as `params` itself. Its layers are stacked
and run by `lax.scan` with the cache in the carry, which leaves its arrays in place. The
script generates from random weights and compares with plain causal attention.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from generating.arguments import Parser
from generating.exiting import errors_in_one_line

import jkv

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 96, 32, 3, 4, 1, 8, 64


class Block(eqx.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    norms: tuple[eqx.nn.RMSNorm, ...]
    projection: eqx.nn.Linear
    output: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys, width = jax.random.split(key, 4), (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.norms = (eqx.nn.RMSNorm(HIDDEN), eqx.nn.RMSNorm(HIDDEN))
        self.projection = eqx.nn.Linear(HIDDEN, width, use_bias=False, key=keys[0])
        self.output = eqx.nn.Linear(HEADS * HEAD_DIM, HIDDEN, key=keys[1])
        self.up = eqx.nn.Linear(HIDDEN, 4 * HIDDEN, key=keys[2])
        self.down = eqx.nn.Linear(4 * HIDDEN, HIDDEN, key=keys[3])

    def __call__(self, hidden, attend):
        """Run R tokens [R, E]; `attend` also returns the cache it changed."""
        projected = jax.vmap(self.projection)(jax.vmap(self.norms[0])(hidden))
        heads = projected.reshape(hidden.shape[0], -1, HEAD_DIM)
        heads, cache = attend(*jnp.split(heads, (HEADS, HEADS + KV_HEADS), axis=1))
        hidden = hidden + jax.vmap(self.output)(heads.reshape(hidden.shape[0], -1))
        inner = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(hidden)))
        return hidden + jax.vmap(self.down)(inner), cache


class Decoder(eqx.Module):
    """Embeddings of tokens and positions, and blocks stacked over layers."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: Block
    norm: eqx.nn.RMSNorm

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.tokens = eqx.nn.Embedding(VOCAB, HIDDEN, key=keys[0])
        self.positions = eqx.nn.Embedding(CONTEXT, HIDDEN, key=keys[1])
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(keys[2], LAYERS))
        self.norm = eqx.nn.RMSNorm(HIDDEN)

    def __call__(self, tokens, positions, attend, cache):
        """Return the logits [R, V] of R tokens, and the cache after all layers."""

        def run_layer(carry, scanned):
            hidden, cache = carry
            layer, block = scanned
            return block(hidden, partial(attend, cache, layer)), None

        hidden = jax.vmap(self.tokens)(tokens) + jax.vmap(self.positions)(positions)
        layers = (jnp.arange(LAYERS, dtype=jnp.int32), self.blocks)
        (hidden, cache), _ = jax.lax.scan(run_layer, (hidden, cache), layers)
        return jax.vmap(self.norm)(hidden) @ self.tokens.weight.T, cache


def model(params, tokens, cache, batch, *, all_rows=False):
    """Run the rows of a batch: a `jkv.Model` with a `Decoder` as its parameters."""

    def attend(cache, layer, queries, keys, values):
        cache = jkv.write(cache, layer, batch, keys, values)
        return jkv.attend(cache, layer, batch, queries), cache

    logits, cache = params(tokens, batch.positions, attend, cache)
    if not all_rows:
        logits = jnp.take(logits, batch.last_rows, axis=0, mode="clip")
    return logits, cache


def dense(decoder, tokens):
    """Return the logits [T, V] of one whole text, without a cache."""

    def attend(cache, _, *heads):
        batched = (x[None] for x in heads)
        return jax.nn.dot_product_attention(*batched, is_causal=True)[0], cache

    return decoder(tokens, jnp.arange(len(tokens), dtype=jnp.int32), attend, None)[0]


def main(num_tokens: int = 12) -> None:
    decoder = jax.tree.map(jnp.float32, Decoder(jax.random.key(0)))
    fields = dict(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    sizes = dict(num_blocks=16, block_size=4, max_sequences=2, dtype=jnp.float32)
    config = jkv.CacheConfig(**fields, **sizes, max_context_length=CONTEXT)
    # Two prompts of unequal length, and the whole generation inside one jit.
    prompts = jnp.array([[5, 17, 80, 3, 9], [42, 7, -1, -1, -1]], jnp.int32)
    # Steps of one size compile fastest.
    options = dict(max_new_tokens=num_tokens, row_counts=(8,))
    generate = partial(jkv.generate, model, **options)
    generate = jax.jit(generate, donate_argnums=1)  # the cache is updated in place
    cache, result = generate(decoder, jkv.init(config), prompts)
    for prompt, new in zip(prompts, result.tokens, strict=True):
        prompt = prompt[prompt >= 0]  # without the padding at its end
        logits = jax.jit(dense)(decoder, jnp.concatenate([prompt, new]))
        greedy = logits.argmax(-1).astype(new.dtype)[len(prompt) - 1 : -1]
        assert (new == greedy).all(), "plain attention must choose the same tokens"
        print(*prompt, *new, "| plain attention chooses the same tokens")
    print(f"blocks free again: {jkv.num_free_blocks(cache)} of {config.num_blocks}")


if __name__ == "__main__":
    with errors_in_one_line():
        Parser(__doc__).parse_args()
        main()
