"""Tiny random Tunix models, a tokenizer for them, and engines of both kinds."""

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3
from tunix.rl.rollout import base_rollout
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

PAD, BOS, EOS = 0, 1, 2
ALPHABET = "\0\1\2 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"
VOCABULARY = len(ALPHABET)

SIZES = dict(num_layers=2, embed_dim=16, hidden_dim=32, num_heads=4, num_kv_heads=2)
NAMED = dict(head_dim=8, rope_theta=10_000, norm_eps=1e-6, vocab_size=VOCABULARY)
LOCAL, GLOBAL = gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL


class Alphabet:
    """A tokenizer with one token per letter and a beginning-of-sequence token."""

    def encode(self, text):
        return [ALPHABET.index(letter) for letter in text]

    def decode(self, tokens):
        return "".join(ALPHABET[token] for token in tokens)

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


def make_qwen3(**fields):
    config = qwen3.ModelConfig(**SIZES, **NAMED, **fields, use_tied_embedding=True)
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def make_llama3(**fields):
    """Create a Llama 3 with an output head of its own."""
    config = llama3.ModelConfig(**SIZES, **NAMED, **fields)
    return llama3.Llama3(config, rngs=nnx.Rngs(0))


def make_gemma(**fields):
    """Create a Gemma 1: one kv head per query head, in one projection."""
    config = gemma.ModelConfig(
        **(SIZES | dict(num_kv_heads=4)),
        num_embed=VOCABULARY,
        head_dim=8,
        final_logit_softcap=None,
        use_post_attn_norm=False,
        use_post_ffw_norm=False,
        attention_types=(GLOBAL, GLOBAL),
        **fields,
    )
    return gemma.Gemma(config, rngs=nnx.Rngs(0))


def make_gemma2(**fields):
    """Create a Gemma 2: soft caps, windows, norms after each part."""
    config = gemma.ModelConfig(
        **SIZES,
        num_embed=VOCABULARY,
        head_dim=8,
        final_logit_softcap=5.0,
        attn_logits_soft_cap=2.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(LOCAL, GLOBAL),
        sliding_window_size=6,
        **fields,
    )
    return gemma.Gemma(config, rngs=nnx.Rngs(0))


def make_gemma3(**fields):
    """Create a Gemma 3 of six layers: five windowed, one full, with two RoPE bases."""
    config = gemma3.ModelConfig(
        **(SIZES | dict(num_layers=6)),
        num_embed=VOCABULARY,
        head_dim=8,
        sliding_window_size=6,
        global_base_frequency=1_000_000,
        global_scale_factor=2.0,
        param_dtype=jnp.float32,
        **fields,
    )
    return gemma3.Gemma3(config, rngs=nnx.Rngs(0))


# Seeds give varied completions without the padding token: Tunix masks it for later
# tokens, even if the model chose it.
MODELS = {
    "qwen3": (make_qwen3, 2),
    "llama3": (make_llama3, 17),
    "gemma": (make_gemma, 19),
    "gemma2": (make_gemma2, 2),
    "gemma3": (make_gemma3, 9),
}


def shake(module, seed, size=0.3):
    """Add noise to every weight in place: fresh norms and zeros would hide faults."""
    leaves, tree = jax.tree.flatten(nnx.state(module, nnx.Param))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [
        leaf + size * jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    nnx.update(module, jax.tree.unflatten(tree, noise))
    return module


def make_model(name, seed=None, **fields):
    make, usual_seed = MODELS[name]
    return shake(make(**fields), usual_seed if seed is None else seed)


def make_vanilla(module):
    """Return Tunix's own engine for a model."""
    sizes = module.config.num_layers, module.config.num_kv_heads, module.config.head_dim
    return VanillaRollout(module, Alphabet(), base_rollout.CacheConfig(64, *sizes))


def options(**fields):
    """Return rollout options, greedy unless `top_p` is given."""
    usual = dict(max_tokens_to_generate=12, max_prompt_length=9, top_p=None)
    return base_rollout.RolloutConfig(**(usual | dict(return_logprobs=True) | fields))
