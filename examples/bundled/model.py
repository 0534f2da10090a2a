"""Llama in plain JAX for `train_pydoc.py`, and its evaluation.

The forward pass has dense causal attention over whole windows and no cache, as training
and evaluation need. (`pretrained` loads the same checkpoint and decodes with a cache.)
`measure` writes the last section of the model card.

Dimension letters: `B` sequences, `T` tokens, `V` the vocabulary, `K` key/value heads,
`G` query heads per key/value head, `D` the head dimension.
"""

import math
import platform
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from . import corpus

FOLDER = Path(__file__).parents[1] / "models" / "pydoc"
# Separates documents.
END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 3072,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float16",
}
# Attention runs over chunks of queries, to skip masked keys after each chunk.
QUERY_CHUNK = 256
PROMPTS = ('The "with" statement', "Return a list of")
SAMPLE_TOKENS, SAMPLE_SEED = 120, 0
MARKER = "## Measured"

Params = dict[str, jax.Array]  # f32, names and shapes [out, in] as in Hugging Face


def init_params(key: jax.Array, config: dict = CONFIG) -> Params:
    width, hidden = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (width,),
            prefix + "self_attn.q_proj.weight": (queries, width),
            prefix + "self_attn.k_proj.weight": (keys, width),
            prefix + "self_attn.v_proj.weight": (keys, width),
            prefix + "self_attn.o_proj.weight": (width, queries),
            prefix + "post_attention_layernorm.weight": (width,),
            prefix + "mlp.gate_proj.weight": (hidden, width),
            prefix + "mlp.up_proj.weight": (hidden, width),
            prefix + "mlp.down_proj.weight": (width, hidden),
        }
    shapes["model.norm.weight"] = (width,)
    params = {}
    for (name, shape), k in zip(
        shapes.items(), jax.random.split(key, len(shapes)), strict=True
    ):
        # Smaller initial weights for additions to the residual stream, so that it does
        # not grow with depth (Radford et al., 2019, section 2.3).
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = 0.02 / math.sqrt(2 * config["num_hidden_layers"]) if residual else 0.02
        params[name] = (
            jnp.ones(shape, jnp.float32)
            if len(shape) == 1
            else scale * jax.random.normal(k, shape, jnp.float32)
        )
    return params


def forward(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the logits f32[B, T, V] of tokens i32[B, T], with causal attention.

    Any width and number of layers is supported; heads have the sizes of `CONFIG`.
    """
    x = params["model.embed_tokens.weight"][tokens]
    for layer in range(sum(name.endswith("input_layernorm.weight") for name in params)):
        weights = partial(_weight, params, f"model.layers.{layer}.")
        h = _rms_norm(x, weights("input_layernorm"))
        x = x + _attention(h, weights)
        h = _rms_norm(x, weights("post_attention_layernorm"))
        gate = jax.nn.silu(h @ weights("mlp.gate_proj").T)
        x = x + (gate * (h @ weights("mlp.up_proj").T)) @ weights("mlp.down_proj").T
    x = _rms_norm(x, params["model.norm.weight"])
    return x @ params["model.embed_tokens.weight"].T


def _weight(params: Params, prefix: str, name: str) -> jax.Array:
    return params[f"{prefix}{name}.weight"]


def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + CONFIG["rms_norm_eps"]) * weight[None, None]


def _attention(h: jax.Array, weights: Callable[[str], jax.Array]) -> jax.Array:
    (B, T, _), D = h.shape, CONFIG["head_dim"]
    K = CONFIG["num_key_value_heads"]
    q, k, v = (
        (h @ weights(f"self_attn.{n}_proj").T).reshape(B, T, -1, D) for n in "qkv"
    )
    q = _rotate(q).reshape(B, T, K, -1, D)
    k = _rotate(k)
    chunks = []
    for start in range(0, T, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, T)
        scores = jnp.einsum("btkgd,bskd->bkgts", q[:, start:end], k[:, :end])
        future = np.arange(end)[None] > np.arange(start, end)[:, None]
        scores = jnp.where(future[None, None, None], -jnp.inf, scores / math.sqrt(D))
        mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores), v[:, :end])
        chunks.append(mixed.reshape(B, end - start, -1))
    return jnp.concatenate(chunks, axis=1) @ weights("self_attn.o_proj").T


def _rotate(x: jax.Array) -> jax.Array:
    """Apply RoPE to pairs (i, i + D/2) of x f32[B, T, heads, D]."""
    half = x.shape[-1] // 2
    frequencies = CONFIG["rope_theta"] ** -(np.arange(half) / half)
    angles = np.arange(x.shape[1])[:, None] * frequencies
    cos, sin = (f(angles)[None, :, None].astype(np.float32) for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def token_losses(params: Params, windows: jax.Array) -> jax.Array:
    """Return the negative log-likelihood of all tokens but the first, f32[B, T]."""
    logits = forward(params, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])


def encode(tokenizer: Tokenizer, documents: list[corpus.Document]) -> list[np.ndarray]:
    """Return the tokens of each document, i32[T], after an end-of-text token."""
    encoded = tokenizer.encode_batch([document.text for document in documents])
    return [np.array([END_OF_TEXT_ID, *e.ids], np.int32) for e in encoded]


def evaluate(
    params: Params, documents: list[np.ndarray], context: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the summed loss and the number of tokens by position, both [context].

    Each document is cut into windows of `context` tokens, evaluated one by one: the
    context of a token is the preceding part of its window. The counted tokens are those
    of the document and the end-of-text token after it.
    """
    losses, counts = np.zeros(context), np.zeros(context, int)
    measure = jax.jit(token_losses)
    for document in documents:
        document = np.append(document, np.int32(END_OF_TEXT_ID))
        for start in range(0, len(document) - 1, context):
            window = document[start : start + context + 1]
            length = len(window) - 1
            window = np.pad(window, (0, context - length))
            losses[:length] += np.asarray(measure(params, window[None])[0, :length])
            counts[:length] += 1
    return losses, counts


def generate(
    params: Params, tokenizer: Tokenizer, prompt: str, temperature: float
) -> str:
    """Generate without a cache, since samples are short and few."""
    tokens = tokenizer.encode(prompt).ids
    size = len(tokens) + SAMPLE_TOKENS
    last_logits = jax.jit(lambda params, window, n: forward(params, window)[0, n - 1])
    rng = np.random.default_rng(SAMPLE_SEED)
    while len(tokens) < size and tokens[-1] != END_OF_TEXT_ID:
        window = np.array([tokens + [0] * (size - len(tokens))], np.int32)
        logits = np.asarray(last_logits(params, window, np.int32(len(tokens))))
        if temperature:
            # Gumbel-max sampling.
            logits = logits / temperature + rng.gumbel(size=logits.shape)
        tokens.append(int(logits.argmax()))
    return tokenizer.decode(tokens)  # without special tokens


def load(folder: Path) -> tuple[Params, Tokenizer]:
    weights = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {k: jnp.asarray(x, jnp.float32) for k, x in weights.items()}, tokenizer


def measure(folder: Path) -> Iterator[str]:
    """Yield the model card's last section in parts: perplexities and samples."""
    params, tokenizer = load(folder)
    _, held_out = corpus.split()
    num_bytes = sum(len(document.text.encode()) for document in held_out)
    documents = encode(tokenizer, held_out)
    full = CONFIG["max_position_embeddings"]

    yield f"{len(held_out)} held-out documents of Python {platform.python_version()}, "
    yield f"{num_bytes:,} bytes; float16 weights, float32 arithmetic.\n\n"
    yield "| context | tokens | perplexity per token | bits per byte |\n"
    yield "|---|---|---|---|\n"
    for context in (256, 512, 1024, full):
        losses, counts = evaluate(params, documents, context)
        mean = losses.sum() / counts.sum()
        bits = losses.sum() / math.log(2) / num_bytes
        yield f"| {context} | {counts.sum()} | {math.exp(mean):.2f} | {bits:.3f} |\n"

    yield f"\nBy the token's position in the window, context {full}:\n\n"
    yield "| position | tokens | perplexity per token |\n|---|---|---|\n"
    for low, high in ((0, 512), (512, 1024), (1024, full)):
        number = counts[low:high].sum()
        mean = losses[low:high].sum() / number
        yield f"| {low} to {high} | {number} | {math.exp(mean):.2f} |\n"

    yield f"\nThe first {SAMPLE_TOKENS} tokens after each prompt, not chosen:\n"
    for prompt in PROMPTS:
        for temperature in (0.0, 0.8):
            text = generate(params, tokenizer, prompt, temperature)
            how = f"temperature {temperature}" if temperature else "greedy"
            yield f"\n`{prompt}`, {how}:\n\n~~~text\n{text}\n~~~\n"


def write_card(folder: Path) -> str:
    """Evaluate, and replace the section of the model card after `MARKER`."""
    text = "".join(measure(folder))
    card = folder / "README.md"
    above = card.read_text().partition(MARKER)[0] if card.exists() else ""
    card.write_text(f"{above}{MARKER}\n\n{text}")
    return text
