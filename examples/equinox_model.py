"""An Equinox model with a paged cache.

    python examples/equinox_model.py

An Equinox module is a pytree, so it is passed as `params`. Its stacked layers run in
`lax.scan` with the cache in the carry. The script generates with random weights and
compares with plain causal attention.
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
    """Transformer block with pre-norm attention and MLP."""

    norms: tuple[eqx.nn.RMSNorm, ...]
    linears: tuple[eqx.nn.Linear, ...]  # QKV, output, up, down

    def __init__(self, key: jax.Array):
        heads, inner = HEADS * HEAD_DIM, 4 * HIDDEN
        sizes = [(HIDDEN, heads + 2 * KV_HEADS * HEAD_DIM), (heads, HIDDEN)]
        sizes += [(HIDDEN, inner), (inner, HIDDEN)]
        pairs = zip(sizes, jax.random.split(key, 4), strict=True)
        self.linears = tuple(eqx.nn.Linear(*size, key=key) for size, key in pairs)
        self.norms = (eqx.nn.RMSNorm(HIDDEN), eqx.nn.RMSNorm(HIDDEN))

    def __call__(self, hidden, attend):
        """Run R tokens [R, E]; `attend` returns the heads and the updated cache."""
        project, output, up, down = map(jax.vmap, self.linears)
        heads = project(jax.vmap(self.norms[0])(hidden))
        heads = heads.reshape(hidden.shape[0], -1, HEAD_DIM)
        heads, cache = attend(*jnp.split(heads, (HEADS, HEADS + KV_HEADS), axis=1))
        hidden = hidden + output(heads.reshape(hidden.shape[0], -1))
        return hidden + down(jax.nn.gelu(up(jax.vmap(self.norms[1])(hidden)))), cache


class Decoder(eqx.Module):
    """Decoder-only transformer with learned positions and stacked blocks."""

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
        """Return the logits [R, V] of R tokens and the updated cache."""

        def run_layer(carry, scanned):
            (hidden, cache), (layer, block) = carry, scanned
            return block(hidden, partial(attend, cache, layer)), None

        hidden = jax.vmap(self.tokens)(tokens) + jax.vmap(self.positions)(positions)
        layers = (jnp.arange(LAYERS, dtype=jnp.int32), self.blocks)
        (hidden, cache), _ = jax.lax.scan(run_layer, (hidden, cache), layers)
        return jax.vmap(self.norm)(hidden) @ self.tokens.weight.T, cache


def model(params, tokens, cache, batch, *, all_rows=False):
    """Run the rows of a batch; a `jkv.Model` whose parameters are a `Decoder`."""

    def attend(cache, layer, queries, keys, values):
        cache = jkv.write(cache, layer, batch, keys, values)
        return jkv.attend(cache, layer, batch, queries), cache

    logits, cache = params(tokens, batch.positions, attend, cache)
    if not all_rows:
        logits = jnp.take(logits, batch.last_rows, axis=0, mode="clip")
    return logits, cache


def dense(decoder, tokens):
    """Return the logits [T, V] of one sequence, without a cache."""

    def attend(cache, _, *heads):
        batched = (x[None] for x in heads)
        return jax.nn.dot_product_attention(*batched, is_causal=True)[0], cache

    return decoder(tokens, jnp.arange(len(tokens), dtype=jnp.int32), attend, None)[0]


def main(num_tokens: int = 12) -> None:
    decoder = jax.tree.map(jnp.float32, Decoder(jax.random.key(0)))
    sizes = dict(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    sizes |= dict(num_blocks=16, block_size=4, max_sequences=2, dtype=jnp.float32)
    config = jkv.CacheConfig(**sizes, max_context_length=CONTEXT)
    # Two prompts of different lengths; the whole generation is one jitted call.
    prompts = jnp.array([[5, 17, 80, 3, 9], [42, 7, -1, -1, -1]], jnp.int32)
    options = dict(max_new_tokens=num_tokens, row_counts=(8,))  # one step shape
    generate = jax.jit(partial(jkv.generate, model, **options), donate_argnums=1)
    cache, result = generate(decoder, jkv.init(config), prompts)
    for prompt, new in zip(prompts, result.tokens, strict=True):
        prompt = prompt[prompt >= 0]  # without padding
        logits = jax.jit(dense)(decoder, jnp.concatenate([prompt, new]))
        greedy = logits.argmax(-1).astype(new.dtype)[len(prompt) - 1 : -1]
        assert (new == greedy).all(), "plain attention must choose the same tokens"
        print(*prompt, *new, "| plain attention chooses the same tokens")
    print(f"blocks free again: {jkv.num_free_blocks(cache)} of {config.num_blocks}")


if __name__ == "__main__":
    with errors_in_one_line():
        Parser(__doc__).parse_args()
        main()
