"""Training of an EAGLE-3 head on whole sequences, without a cache.

Row i reads token i and a hidden state of row i - 1, and predicts token i + 1. The first
pass of the layer reads the target's hidden states, each later pass the previous pass's
output: pass s computes draft token s of all rows at once ("training-time test", Li et
al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025). As in SpecForge, the target's distribution is restricted to
the draft vocabulary, rows with another most likely token are excluded, and later passes
have lower weights. As in speculators, pass s excludes the first rows, which no draft
reaches: those up to s. Rows of prompts are included: the target's distribution is known
there. Weights have SGLang's names.

Symbols: `N` sequences, `T` tokens of each, `E` hidden size, `L` auxiliary layers, `V`
vocabulary, `D` draft vocabulary.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pretrained import DecoderConfig
from pretrained.layers import cap, scale_to_unit
from safetensors.numpy import save_file

Params = dict[str, jax.Array]  # f32, [out, in]

DECAY = 0.8  # weight of a pass's loss, relative to the previous pass
EPSILON = 1e-5  # added to the mean square in RMSNorm
SPREAD = 0.6  # standard deviation of an untrained head's logits


class Frozen(NamedTuple):
    """Weights shared with the target, which are not trained."""

    embedding: jax.Array  # f32[V, E]
    head: jax.Array  # f32[D, E], of the draft vocabulary
    draft_tokens: jax.Array  # i32[D], ascending


class Texts(NamedTuple):
    """Training sequences, and the target's outputs for each row."""

    tokens: jax.Array  # i32[N, T]
    best: jax.Array  # i32[N, T], the target's most likely next token
    hidden: jax.Array  # [N, T, L + 1, E], auxiliary with mean square 1, then the last
    trained: jax.Array  # bool[N, T], the next token belongs to the sequence
    counted: jax.Array  # bool[N, T], the next token belongs to the completion

    def take(self, rows: np.ndarray) -> "Texts":
        """Return the sequences `rows`, read into memory."""
        return Texts(*(np.asarray(each[rows]) for each in self))


def init_head(
    config: DecoderConfig,
    num_aux: int,
    frozen: Frozen,
    final_norm: jax.Array,
    seed: int = 0,
) -> Params:
    """Return random weights of a head with the sizes of the target's layers.

    The norm is the target's, `final_norm` f32[E], scaled down so that the logits of
    random rows have a standard deviation of `SPREAD`: the initial loss is close to that
    of a uniform distribution.
    """
    wide, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    shapes = {
        "fc": (wide, num_aux * wide),
        "norm": (wide,),
        "midlayer.hidden_norm": (wide,),
        "midlayer.input_layernorm": (wide,),
        "midlayer.post_attention_layernorm": (wide,),
        "midlayer.self_attn.q_proj": (queries, 2 * wide),
        "midlayer.self_attn.k_proj": (keys, 2 * wide),
        "midlayer.self_attn.v_proj": (keys, 2 * wide),
        "midlayer.self_attn.o_proj": (wide, queries),
        "midlayer.mlp.gate_proj": (inner, wide),
        "midlayer.mlp.up_proj": (inner, wide),
        "midlayer.mlp.down_proj": (wide, inner),
    }
    drawn, params = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        is_norm = len(shape) == 1
        weight = np.ones(shape) if is_norm else drawn.normal(0, 0.02, shape)
        params[f"{name}.weight"] = jnp.asarray(weight, jnp.float32)
    products = frozen.head * final_norm[None]
    spread = jnp.sqrt(jnp.mean(jnp.sum(products**2, axis=1)))
    params["norm.weight"] = final_norm * (SPREAD / spread)
    return params


def find_loss(
    params: Params, config: DecoderConfig, frozen: Frozen, texts: Texts, num_runs: int
) -> tuple[jax.Array, jax.Array]:
    """Return the loss, and the tokens per step: 1 plus the accepted draft tokens."""
    *aux, last = jnp.moveaxis(texts.hidden.astype(jnp.float32), 2, 0)
    logits = (last @ frozen.head.T) * config.logit_scale
    wanted = jax.nn.softmax(cap(logits, config.logit_cap))
    weight = texts.trained & jnp.isin(texts.best, frozen.draft_tokens)
    row = jnp.arange(texts.tokens.shape[1])[None]
    carried = shift(jnp.concatenate(aux, axis=-1)) @ params["fc.weight"].T
    past: list[Any] = []
    loss, right, made = jnp.float32(0), texts.counted, jnp.float32(1)
    embedded = frozen.embedding[texts.tokens]
    for run in range(num_runs):
        carried = _run_layer(params, config, embedded, carried, past)
        normed = scale_to_unit(carried, EPSILON) * params["norm.weight"][None, None]
        logits = normed @ frozen.head.T
        losses = -jnp.sum(wanted * jax.nn.log_softmax(logits), axis=-1)
        # A draft starts after the first row, which has no previous hidden state, and
        # is `run` rows further in this pass.
        is_drafted = row > run
        used = weight & is_drafted
        loss += DECAY**run * jnp.sum(losses * used) / jnp.maximum(jnp.sum(used), 1)
        drafted = frozen.draft_tokens[jnp.argmax(logits, axis=-1)]
        right = (shift(right) if run else right) & (drafted == texts.best)
        right &= texts.counted & is_drafted
        made += jnp.sum(right) / jnp.sum(texts.counted)
        carried = shift(carried)
    return loss, made


def save_head(
    folder: Path,
    config: DecoderConfig,
    params: Params,
    frozen: Frozen,
    layers: list[int],
) -> None:
    """Write a checkpoint in SGLang's format, as read by `pretrained.drafters`."""
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": len(frozen.draft_tokens),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": EPSILON,
        "rope_theta": _find_theta(config),
        "max_position_embeddings": config.max_context_length,
        "tie_word_embeddings": False,
        "fc_norm": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    tensors = {name: np.asarray(x, np.float16) for name, x in params.items()}
    ones = np.ones(config.hidden_size, np.float16)
    tensors |= {f"fc_norm.{i}.weight": ones for i in range(len(layers))}
    tensors["lm_head.weight"] = np.asarray(frozen.head, np.float16)
    drafted = np.asarray(frozen.draft_tokens, np.int64)
    tensors["d2t"] = drafted - np.arange(len(drafted))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def shift(x: jax.Array) -> jax.Array:
    """Shift rows of [N, T, ...] to the next index; the first row is zero."""
    return jnp.pad(x[:, :-1], [(0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)])


def _run_layer(
    params: Params,
    config: DecoderConfig,
    embedded: jax.Array,
    hidden: jax.Array,
    past: list[tuple[jax.Array, jax.Array]],  # keys and values of each previous pass
) -> jax.Array:
    """Apply the layer to rows [N, T, E], and append its keys and values to `past`."""
    weights = {name[9:-7]: x for name, x in params.items() if name[:9] == "midlayer."}

    def norm(x: jax.Array, name: str) -> jax.Array:
        return scale_to_unit(x, EPSILON) * weights[name][None, None]

    both = [norm(embedded, "input_layernorm"), norm(hidden, "hidden_norm")]
    rows = jnp.concatenate(both, axis=-1)
    queries, keys, values = (
        (rows @ weights[f"self_attn.{name}_proj"].T).reshape(
            *rows.shape[:2], -1, config.head_dim
        )
        for name in "qkv"
    )
    past.append((_rotate(config, keys), values))
    mixed = _attend(_rotate(config, queries), past)
    hidden = hidden + mixed @ weights["self_attn.o_proj"].T
    rows = norm(hidden, "post_attention_layernorm")
    gated = jax.nn.silu(rows @ weights["mlp.gate_proj"].T)
    fed = (gated * (rows @ weights["mlp.up_proj"].T)) @ weights["mlp.down_proj"].T
    return hidden + fed


def _attend(queries: jax.Array, past: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Attend to rows of the first pass, and to one row of each later pass.

    In pass s the draft of row i starts at row i - s: the row attends to the first
    pass's rows up to there, and to the draft's row in each later pass.
    """
    (num, length, _, dim), run = queries.shape, len(past) - 1
    (keys, values), *later = past
    grouped = queries.reshape(num, length, keys.shape[2], -1, dim) * dim**-0.5
    row = np.arange(length)
    # The first row has no previous hidden state, so no row attends to it.
    seen = (row[:, None] - row[None] >= run) & (row[None] > 0)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, keys)
    parts = [jnp.where(seen[None, None, None], scores, -1e9)]
    moved = [
        tuple(jnp.roll(x, run - i, axis=1) for x in pair)
        for i, pair in enumerate(later, 1)
    ]
    for key, _ in moved:
        parts.append(jnp.einsum("btkgd,btkd->bkgt", grouped, key)[..., None])
    shares = jax.nn.softmax(jnp.concatenate(parts, axis=-1))
    mixed = jnp.einsum("bkgts,bskd->btkgd", shares[..., :length], values)
    for i, (_, value) in enumerate(moved):
        share = jnp.moveaxis(shares[..., length + i], 3, 1)
        mixed += share[..., None] * value[:, :, :, None]
    return mixed.reshape(num, length, -1)


def _rotate(config: DecoderConfig, x: jax.Array) -> jax.Array:
    """Rotate pairs (i, i + dim / 2) of [N, T, heads, dim] by their positions."""
    dim, theta = config.head_dim, _find_theta(config)
    angles = np.arange(x.shape[1])[:, None] * theta ** -(np.arange(0, dim, 2) / dim)
    cos, sin = (f(angles)[None, :, None].astype(np.float32) for f in (np.cos, np.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _find_theta(config: DecoderConfig) -> float:
    """Return the RoPE base of the target's first layer with RoPE, or the usual one."""
    return next((rope.theta for rope in config.ropes if rope), 10_000.0)
