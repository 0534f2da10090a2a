"""Write tiny checkpoints of every architecture, and transformers' results for them.

    python tests/support/checkpoints/checkpoint_fixtures.py [NAME ...]

writes ``tests/fixtures/checkpoints``: random checkpoints as ``transformers`` saves them
and, beside each, ``expected.npz`` with the logits and greedy tokens that it computes
from the folder. The parity tests call the same functions with a temporary folder if
``transformers`` is installed, and read the committed files everywhere. ``transformers``
is imported only to write. For the bundled model (``pydoc``) only logits are written;
rewrite them after training it.
"""

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
PYDOC = Path(__file__).parents[3] / "examples" / "models" / "pydoc"

# The vision part of a tiny checkpoint.
VISION = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=8,
    patch_size=4,
)
NUM_STEPS = 50
VOCAB_SIZE = 128
# Unequal prompts: one token, longer than every window, and in between.
PROMPT_LENGTHS = (1, 26, 11)
# Decode logits are kept for this prompt only (greedy tokens suffice for the others);
# committed files keep only a few steps.
DETAILED = 1
COMMITTED_STEPS = (0, 12, 23, 36, 49)
PYDOC_PROMPTS = ("A class that", "Return a list of the")

SMALL = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
)

# For configurations whose default ids exceed the small vocabulary.
NO_IDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint: its configuration and storage form."""

    model_type: str
    settings: dict[str, Any]
    seed: int
    dtype: str = "float16"
    max_shard_size: str = "5GB"
    old_form: bool = False  # config.json in the form of transformers 4
    quantized: str | None = None  # quantization_config's method
    # For recurrent layers, transformers' cached decoding rounds differently from its
    # full pass, so every step is a full pass.
    has_states: bool = False
    # Patterns that rename its saved tensors to the published names.
    renamed: tuple[tuple[str, str], ...] = ()
    # Keys of the small sizes that its class rejects.
    without: tuple[str, ...] = ()
    # Small relative to the layers' outputs: a tied model would echo its last token.
    embedding_scale: float = 0.3
    # transformers' class, if not a causal language model.
    class_name: str = "AutoModelForCausalLM"


# One recurrent layer, and one attention layer.
STATES = dict(
    **NO_IDS,
    num_key_value_heads=2,
    layer_types=["linear_attention", "full_attention"],
)

# Fewer key heads than state heads, and values longer than keys.
QWEN_STATES = STATES | dict(
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)

# Groups of heads share keys and queries.
MAMBA_STATES = dict(
    **NO_IDS,
    num_hidden_layers=2,
    num_key_value_heads=2,
    mamba_n_heads=4,
    mamba_n_groups=2,
    mamba_d_state=8,
    mamba_chunk_size=8,
)

# Two head dims; every other layer has a window.
GEMMA4 = dict(
    **NO_IDS,
    tie_word_embeddings=False,
    head_dim=8,
    global_head_dim=16,
    sliding_window=8,
    final_logit_softcapping=5.0,
)

YARN = dict(
    rope_type="yarn",
    rope_theta=10_000.0,
    factor=4.0,
    beta_fast=4.0,
    original_max_position_embeddings=32,
)

# Query scaling grows every eight positions.
MISTRAL_YARN = YARN | dict(
    factor=16.0,
    original_max_position_embeddings=8,
    mscale=1.0,
    mscale_all_dim=0.7,
    llama_4_scaling_beta=0.5,
)

# Seeds were chosen for varied tokens without near ties.
CASES = {
    "llama2": Case(
        "llama",
        dict(num_key_value_heads=4, rms_norm_eps=1e-5),
        seed=7,
        max_shard_size="20KB",
        old_form=True,
    ),
    "llama_linear": Case(
        "llama",
        dict(
            num_key_value_heads=2,
            tie_word_embeddings=True,
            attention_bias=True,
            rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=5_000.0),
        ),
        seed=3,
        old_form=True,
    ),
    "llama3": Case(
        "llama",
        dict(
            num_hidden_layers=3,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
            # Of eight frequencies one is unchanged, one blended and six scaled.
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10_000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
        seed=12,
        dtype="bfloat16",
    ),
    "mistral": Case(
        "mistral",
        dict(num_key_value_heads=1, sliding_window=8),
        seed=6,
        dtype="bfloat16",
        old_form=True,
    ),
    # Full attention in the first layer, a window of sixteen tokens in the other two.
    "qwen2": Case(
        "qwen2",
        dict(
            num_hidden_layers=3,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=1,
        ),
        seed=0,
    ),
    "qwen3": Case(
        "qwen3",
        dict(num_key_value_heads=2, head_dim=16),
        seed=12,
        dtype="bfloat16",
        max_shard_size="20KB",
    ),
    "llama_dynamic": Case(
        "llama",
        dict(
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=16,
            rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1_000.0),
        ),
        seed=7,
    ),
    "qwen3_yarn": Case(
        "qwen3",
        dict(
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10_000.0,
                factor=4.0,
                original_max_position_embeddings=32,
                beta_fast=4.0,
            ),
        ),
        seed=6,
    ),
    "gemma": Case(
        "gemma",
        dict(**NO_IDS, num_key_value_heads=1, head_dim=16),
        seed=0,
    ),
    "gemma2": Case(
        "gemma2",
        dict(
            **NO_IDS,
            tie_word_embeddings=False,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
        ),
        embedding_scale=0.05,
        seed=3,
    ),
    # Of three layers the last has full attention and another RoPE base.
    "gemma3": Case(
        "gemma3_text",
        dict(
            **NO_IDS,
            tie_word_embeddings=False,
            num_hidden_layers=3,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters=dict(
                full_attention=dict(
                    rope_type="linear", factor=2.0, rope_theta=1_000_000.0
                ),
                sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
            ),
        ),
        embedding_scale=0.05,
        seed=4,
        old_form=True,
    ),
    # The last two of four layers reuse the keys of the first two.
    "gemma4": Case(
        "gemma4_text",
        GEMMA4
        | dict(
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            num_key_value_heads=1,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB_SIZE,
        ),
        embedding_scale=0.05,
        seed=1,
    ),
    # In the full-attention layer, values are projected like keys.
    "gemma4_moe": Case(
        "gemma4_text",
        GEMMA4
        | dict(
            layer_types=["sliding_attention", "full_attention"],
            num_key_value_heads=2,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            moe_intermediate_size=8,
            num_experts=6,
            top_k_experts=3,
        ),
        embedding_scale=0.05,
        seed=1,
    ),
    "phi3": Case(
        "phi3",
        dict(
            **NO_IDS,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            original_max_position_embeddings=16,
            sliding_window=24,
            partial_rotary_factor=0.75,
            hidden_size=64,
            num_attention_heads=4,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10_000.0,
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                long_factor=[1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
            ),
        ),
        seed=2,
    ),
    "olmo2": Case(
        "olmo2",
        dict(**NO_IDS, num_key_value_heads=2),
        seed=3,
    ),
    # The second of three layers has full attention and the scaled RoPE.
    "olmo3": Case(
        "olmo3",
        dict(
            **NO_IDS,
            num_hidden_layers=3,
            num_key_value_heads=2,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                full_attention=YARN | dict(attention_factor=1.2, rope_theta=500_000.0),
                sliding_attention=dict(rope_type="default", rope_theta=500_000.0),
            ),
        ),
        seed=7,
        old_form=True,
    ),
    # The second of three layers has full attention without RoPE.
    "exaone4": Case(
        "exaone4",
        dict(
            num_hidden_layers=3,
            num_key_value_heads=2,
            sliding_window=8,
            sliding_window_pattern=2,
        ),
        seed=9,
    ),
    # The second of three layers has a window and no RoPE.
    "smollm3": Case(
        "smollm3",
        dict(
            **NO_IDS,
            num_hidden_layers=3,
            num_key_value_heads=2,
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=8,
            attention_bias=True,
            mlp_bias=True,
        ),
        seed=3,
    ),
    "granite": Case(
        "granite",
        dict(
            num_key_value_heads=2,
            tie_word_embeddings=False,
            attention_multiplier=0.2,
            embedding_multiplier=3.0,
            residual_multiplier=0.7,
            logits_scaling=0.7,
        ),
        embedding_scale=0.1,
        seed=1,
    ),
    "seed_oss": Case(
        "seed_oss",
        dict(**NO_IDS, num_key_value_heads=2, head_dim=16),
        seed=4,
    ),
    # Queries and keys are normalized per head.
    "cohere": Case(
        "cohere",
        dict(**NO_IDS, num_key_value_heads=2, use_qk_norm=True, logit_scale=2.0),
        embedding_scale=0.1,
        seed=2,
    ),
    # The second of three layers has full attention without RoPE.
    "cohere2": Case(
        "cohere2",
        dict(
            **NO_IDS,
            num_hidden_layers=3,
            num_key_value_heads=2,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            logit_scale=2.0,
            attention_bias=True,
        ),
        embedding_scale=0.1,
        seed=3,
    ),
    # Query scaling grows twice within its longest prompt.
    "ministral3": Case(
        "ministral3",
        dict(
            **NO_IDS,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters=MISTRAL_YARN,
        ),
        seed=4,
    ),
    # The first of two layers has no experts.
    "mistral4": Case(
        "mistral4",
        dict(
            **NO_IDS,
            num_key_value_heads=4,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=12,
            first_k_dense_replace=1,
            moe_intermediate_size=8,
            n_routed_experts=6,
            num_experts_per_tok=3,
            routed_scaling_factor=1.5,
            rope_parameters=MISTRAL_YARN,
        ),
        seed=7,
        class_name="Mistral4ForCausalLM",
    ),
    "mixtral": Case(
        "mixtral",
        dict(
            num_key_value_heads=2,
            tie_word_embeddings=True,
            intermediate_size=16,
            num_local_experts=4,
            sliding_window=16,
        ),
        seed=6,
    ),
    # The second of three layers has no experts.
    "qwen3_moe": Case(
        "qwen3_moe",
        dict(
            num_hidden_layers=3,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
            moe_intermediate_size=16,
            num_experts=6,
            num_experts_per_tok=3,
            mlp_only_layers=[1],
        ),
        seed=2,
    ),
    "gpt_oss": Case(
        "gpt_oss",
        dict(
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
            intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            swiglu_limit=1.5,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10_000.0,
                factor=4.0,
                beta_fast=4.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=32,
            ),
        ),
        seed=12,
        quantized="mxfp4",
    ),
    "deepseek_v2": Case(
        "deepseek_v2",
        dict(
            num_hidden_layers=2,
            tie_word_embeddings=True,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=12,
            first_k_dense_replace=0,
            moe_intermediate_size=8,
            n_routed_experts=6,
            n_shared_experts=2,
            num_experts_per_tok=2,
            topk_method="group_limited_greedy",
            n_group=3,
            topk_group=1,
            routed_scaling_factor=3.0,
        ),
        seed=5,
    ),
    # The first of three layers has no experts.
    "deepseek_v3": Case(
        "deepseek_v3",
        dict(
            num_hidden_layers=3,
            tie_word_embeddings=True,
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=12,
            first_k_dense_replace=1,
            moe_intermediate_size=8,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10_000.0,
                factor=4.0,
                beta_fast=4.0,
                mscale=1.0,
                mscale_all_dim=0.7,
                original_max_position_embeddings=32,
            ),
        ),
        seed=2,
        dtype="float32",
        quantized="fp8",
    ),
    "bamba": Case(
        "bamba",
        MAMBA_STATES | dict(attn_layer_indices=[1], time_step_limit=[0.02, 0.5]),
        seed=2,
        has_states=True,
    ),
    # Attention and state in each layer, with a multiplier for every part.
    "falcon_h1": Case(
        "falcon_h1",
        MAMBA_STATES
        | dict(
            mamba_d_ssm=32,
            mamba_rms_norm=True,
            ssm_in_multiplier=1.25,
            ssm_out_multiplier=0.8,
            ssm_multipliers=[0.7, 1.3, 0.8, 1.2, 0.9],
            mlp_multipliers=[0.8, 1.4],
            key_multiplier=0.6,
            attention_in_multiplier=1.1,
            attention_out_multiplier=0.7,
            embedding_multiplier=2.0,
            lm_head_multiplier=1.5,
        ),
        seed=1,
        has_states=True,
    ),
    "granite_hybrid": Case(
        "granitemoehybrid",
        MAMBA_STATES
        | dict(
            layer_types=["mamba", "attention"],
            intermediate_size=8,
            num_local_experts=6,
            num_experts_per_tok=3,
            shared_intermediate_size=16,
            embedding_multiplier=3.0,
            logits_scaling=0.5,
            residual_multiplier=0.7,
            attention_multiplier=0.2,
        ),
        seed=1,
        has_states=True,
    ),
    # Without experts, with RoPE.
    "granite_dense": Case(
        "granitemoehybrid",
        MAMBA_STATES
        | dict(
            layer_types=["attention", "mamba"],
            num_local_experts=0,
            shared_intermediate_size=48,
            position_embedding_type="rope",
            tie_word_embeddings=True,
        ),
        seed=1,
        has_states=True,
    ),
    "lfm2": Case(
        "lfm2",
        dict(
            **NO_IDS,
            num_hidden_layers=3,
            num_key_value_heads=2,
            full_attn_idxs=[1],
            block_multiple_of=16,
        ),
        seed=1,
        has_states=True,
    ),
    # The first of two layers has no experts.
    "lfm2_moe": Case(
        "lfm2_moe",
        dict(
            **NO_IDS,
            num_hidden_layers=2,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
            conv_bias=True,
            num_dense_layers=1,
            moe_intermediate_size=8,
            num_experts=6,
            num_experts_per_tok=3,
            routed_scaling_factor=1.5,
        ),
        seed=7,
        has_states=True,
    ),
    "mamba2": Case(
        "mamba2",
        dict(
            **NO_IDS,
            num_heads=4,
            head_dim=16,
            n_groups=2,
            state_size=8,
            chunk_size=8,
        ),
        seed=1,
        has_states=True,
        without=("intermediate_size", "max_position_embeddings", "num_attention_heads"),
    ),
    # One layer of each kind, and another recurrent one.
    "nemotron_h": Case(
        "nemotron_h",
        dict(
            **NO_IDS,
            hybrid_override_pattern="M-*EM",
            num_key_value_heads=2,
            head_dim=8,
            mamba_num_heads=4,
            mamba_head_dim=8,
            n_groups=2,
            ssm_state_size=8,
            chunk_size=8,
            time_step_min=0.03,
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=8,
            moe_shared_expert_intermediate_size=16,
            moe_latent_size=16,
            routed_scaling_factor=1.7,
        ),
        seed=1,
        has_states=True,
        without=("num_hidden_layers",),
    ),
    # The second of three layers has no experts.
    "qwen3_next": Case(
        "qwen3_next",
        QWEN_STATES
        | dict(
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            moe_intermediate_size=16,
            shared_expert_intermediate_size=8,
            num_experts=6,
            num_experts_per_tok=3,
            mlp_only_layers=[1],
        ),
        seed=1,
        has_states=True,
    ),
    "qwen3_5": Case(
        "qwen3_5_text",
        QWEN_STATES | dict(tie_word_embeddings=True),
        seed=7,
        has_states=True,
    ),
    "qwen3_5_moe": Case(
        "qwen3_5_moe_text",
        QWEN_STATES
        | dict(
            moe_intermediate_size=16,
            shared_expert_intermediate_size=8,
            num_experts=6,
            num_experts_per_tok=3,
        ),
        seed=1,
        has_states=True,
        without=("intermediate_size",),  # all layers have experts
    ),
    # Equal key and value lengths: transformers splits their convolutions evenly.
    "olmo_hybrid": Case(
        "olmo_hybrid",
        STATES
        | dict(
            rope_parameters=None,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        seed=1,
        has_states=True,
        renamed=(
            (r"(layers\.1)\.feedforward_layer_norm", r"\1.post_attention_layernorm"),
        ),
    ),
    "glm": Case(
        "glm",
        dict(**NO_IDS, num_key_value_heads=2, head_dim=16),
        seed=5,
    ),
    "glm4": Case(
        "glm4",
        dict(**NO_IDS, num_key_value_heads=2, head_dim=16),
        seed=5,
        old_form=True,
    ),
    # The first of two layers has no experts.
    "glm4_moe": Case(
        "glm4_moe",
        dict(
            **NO_IDS,
            num_key_value_heads=2,
            head_dim=16,
            moe_intermediate_size=8,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            attention_bias=True,
            use_qk_norm=True,
            routed_scaling_factor=1.5,
        ),
        seed=1,
    ),
    "glm4_moe_lite": Case(
        "glm4_moe_lite",
        dict(
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=12,
            moe_intermediate_size=8,
            n_routed_experts=8,
            num_experts_per_tok=3,
        ),
        seed=1,
    ),
    "hunyuan_dense": Case(
        "hunyuan_v1_dense",
        dict(
            num_key_value_heads=2,
            head_dim=16,
            attention_bias=True,
        ),
        seed=6,
    ),
    "hunyuan_moe": Case(
        "hunyuan_v1_moe",
        dict(
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=16,
            num_experts=6,
            moe_topk=[3, 3],
            rope_parameters=dict(
                rope_type="dynamic", factor=1.0, alpha=50.0, rope_theta=1_000.0
            ),
        ),
        seed=7,
    ),
    "ernie4_5": Case(
        "ernie4_5",
        dict(num_key_value_heads=2, head_dim=16, use_bias=True),
        seed=1,
    ),
    # The last of three layers has no experts.
    "ernie4_5_moe": Case(
        "ernie4_5_moe",
        dict(
            num_hidden_layers=3,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            moe_intermediate_size=16,
            moe_num_experts=6,
            moe_k=3,
            moe_num_shared_experts=2,
            moe_layer_start_index=0,
            moe_layer_end_index=1,
            use_bias=True,
        ),
        seed=6,
    ),
    # The first of two layers has no experts and a window.
    "qwen2_moe": Case(
        "qwen2_moe",
        dict(
            num_key_value_heads=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=8,
            num_experts=6,
            num_experts_per_tok=3,
            mlp_only_layers=[0],
            use_sliding_window=True,
            sliding_window=8,
        ),
        seed=6,
    ),
    "minimax_m2": Case(
        "minimax_m2",
        dict(
            **NO_IDS,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=16,
            num_local_experts=6,
            num_experts_per_tok=3,
            rotary_dim=8,
        ),
        seed=5,
        dtype="float32",
        quantized="fp8",
    ),
    # At the length of these prompts its class uses the short factors.
    "phimoe": Case(
        "phimoe",
        dict(
            num_key_value_heads=2,
            intermediate_size=16,
            num_local_experts=6,
            sliding_window=16,
            attention_bias=True,
            lm_head_bias=True,
            router_jitter_noise=0.3,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10_000.0,
                original_max_position_embeddings=96,
                short_factor=[1.0, 1.2, 1.5, 2.0],
                long_factor=[1.0, 2.0, 4.0, 8.0],
                short_mscale=1.2,
                long_mscale=1.4,
            ),
        ),
        seed=3,
    ),
    # The first of two layers has no experts.
    "kimi_linear": Case(
        "kimi_linear",
        STATES
        | dict(
            num_key_value_heads=4,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=12,
            linear_head_dim=8,
            linear_num_heads=4,
            moe_intermediate_size=8,
            num_local_experts=6,
            num_experts_per_tok=3,
            n_shared_experts=1,
        ),
        seed=4,
        has_states=True,
        renamed=((r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj"),),
    ),
    # The second of three layers has no window, no experts, and the longer context.
    "mellum": Case(
        "mellum",
        dict(
            **NO_IDS,
            num_hidden_layers=3,
            num_key_value_heads=2,
            head_dim=16,
            moe_intermediate_size=16,
            num_experts=6,
            num_experts_per_tok=3,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            rope_parameters=dict(
                full_attention=YARN | dict(rope_theta=500_000.0),
                sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
            ),
        ),
        seed=5,
    ),
    # The second of two layers has a window, more query heads, and experts.
    "laguna": Case(
        "laguna",
        dict(
            **NO_IDS,
            num_key_value_heads=2,
            head_dim=16,
            num_attention_heads_per_layer=[4, 8],
            moe_intermediate_size=8,
            shared_expert_intermediate_size=16,
            num_experts=6,
            num_experts_per_tok=3,
            moe_routed_scaling_factor=2.5,
            moe_router_logit_softcapping=2.0,
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention"],
            rope_parameters=dict(
                full_attention=YARN | dict(partial_rotary_factor=0.5),
                sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
            ),
        ),
        seed=2,
    ),
    # The first of three layers has no experts, and is turned without a window.
    "cohere2_moe": Case(
        "cohere2_moe",
        dict(
            **NO_IDS,
            num_hidden_layers=3,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=16,
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=48,
            num_experts=6,
            num_experts_per_tok=3,
            num_shared_experts=2,
            expert_selection_fn="sigmoid",
            sliding_window=8,
            sliding_window_pattern=2,
            logit_scale=2.0,
        ),
        embedding_scale=0.1,
        seed=2,
    ),
    # The second of two layers has no window, and is not turned. A norm's epsilon is
    # large enough to be seen.
    "muse_glimmer": Case(
        "muse_glimmer",
        dict(
            text_config=SMALL
            | NO_IDS
            | dict(
                num_key_value_heads=2,
                head_dim=16,
                sliding_window=8,
                qk_scale_factor=2.0,
                post_norm_eps=0.5,
                output_multiplier=0.7,
                final_logit_softcapping=5.0,
            ),
            vision_config=dict(
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                patch_size=4,
                pos_emb_height=2,
                pos_emb_width=2,
            ),
            out_hidden_size=64,
            projector_hidden_size=8,
        ),
        seed=11,
        without=(*SMALL,),
        class_name="MuseGlimmerForConditionalGeneration",
    ),
    # The first of two layers has no experts.
    "bailing_hybrid": Case(
        "bailing_hybrid",
        STATES
        | dict(
            num_key_value_heads=4,
            head_dim=8,
            kv_lora_rank=16,
            q_lora_rank=None,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=12,
            first_k_dense_replace=1,
            moe_intermediate_size=8,
            num_experts=6,
            num_experts_per_tok=3,
            n_group=3,
            topk_group=2,
        ),
        seed=2,
        has_states=True,
    ),
    # A convolution, a window, and a layer that sees everything.
    "lfm3": Case(
        "lfm3",
        dict(
            **NO_IDS,
            num_hidden_layers=3,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=False,
            conv_L_cache=4,
            conv_bias=True,
            sliding_window=8,
            layer_types=["conv", "sliding_attention", "full_attention"],
        ),
        seed=26,
    ),
    # The second of two layers has a window. Rows of the first one may have no expert.
    "zaya": Case(
        "zaya",
        dict(
            **NO_IDS,
            num_key_value_heads=2,
            head_dim=16,
            moe_intermediate_size=16,
            num_experts=6,
            router_hidden_size=16,
            tie_word_embeddings=False,
            cca_time1=3,
            attention_bias=True,
            lm_head_bias=True,
            sliding_window=8,
            layer_types=["hybrid", "hybrid_sliding"],
        ),
        embedding_scale=1.0,
        seed=52,
        has_states=True,
        without=("intermediate_size",),
    ),
}


def write_checkpoint(name: str, folder: Path) -> None:
    """Save the random checkpoint of a case with transformers."""
    import torch
    import transformers

    case = CASES[name]
    settings = {n: v for n, v in SMALL.items() if n not in case.without} | case.settings
    config = transformers.AutoConfig.for_model(case.model_type, **settings)
    kind = getattr(transformers, case.class_name)
    model = (kind.from_config if kind.__name__.startswith("Auto") else kind)(config)
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        biases = "correction_bias", "expert_bias", "balancing_biases", "layer_scalar"
        learnt = [b for b in model.named_buffers() if b[0].endswith(biases)]
        for parameter_name, parameter in [*model.named_parameters(), *learnt]:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(parameter_name, drawn, case))
    model = model.to(getattr(torch, case.dtype))
    with _quiet():
        model.save_pretrained(folder, max_shard_size=case.max_shard_size)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors saves files readable by their owner only
    if case.old_form:
        _rewrite_config_in_old_form(folder / "config.json")
    if case.renamed:
        _rename_tensors(folder / "model.safetensors", case.renamed)
    if case.quantized:
        QUANTIZERS[case.quantized](folder)


def checkpoint_folder(name: str) -> Path:
    """Return the folder of the committed checkpoint."""
    return PYDOC if name == "pydoc" else FIXTURES / name


def expected(
    name: str,
    folder: Path,
    kept: Sequence[int] = range(NUM_STEPS),
    generated: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Compute the expected results with transformers, in float32.

    Args:
        name: of the case, or "pydoc".
        folder: of its checkpoint.
        kept: steps with returned logits.
        generated: the greedy tokens, if known; then one call covers a whole sequence,
            and each token must be the argmax of its prefix. Not for RoPE that depends
            on the sequence length.

    Returns:
        ``prompt_lengths [P]`` and ``prompts``, all prompts concatenated, int32;
        ``prefill f32[sum, V]``, the logits of every prompt token;
        ``generated i32[P, NUM_STEPS + 1]``, greedy tokens;
        ``decode f32[len(steps), V]``, logits of the DETAILED prompt after its generated
        tokens number ``steps``;
        ``margin f32[]``, the smallest lead of a chosen token over the runner-up.
    """
    import torch
    import transformers

    # More threads would only wait for each other on matrices this small.
    torch.set_num_threads(1)
    prompts = _pydoc_prompts() if name == "pydoc" else _random_prompts()
    kept = np.asarray(kept, np.int32)
    with _quiet():
        kind = CASES[name].class_name if name in CASES else Case.class_name
        model = (
            getattr(transformers, kind)
            .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            .eval()
        )
    prefill, decode, found, margin = [], [], [], np.inf
    for i, prompt in enumerate(prompts):
        # Each prompt alone, without padding.
        if generated is None and name in CASES and CASES[name].has_states:
            logits = _step_anew(model, prompt)
        elif generated is None:
            logits = _step_greedily(model, prompt)
        else:
            logits = _compute_at_once(model, [*prompt, *generated[i][:-1]])
        choices = logits[len(prompt) - 1 :]
        second, first = np.sort(choices).T[-2:]
        margin = min(margin, (first - second).min())
        prefill.append(logits[: len(prompt)])
        decode.append(logits[len(prompt) :])
        found.append(choices.argmax(-1))
    return dict(
        prompt_lengths=np.asarray([len(prompt) for prompt in prompts], np.int32),
        prompts=np.concatenate(prompts).astype(np.int32),
        prefill=np.concatenate(prefill),
        generated=np.asarray(found, np.int32),
        decode=decode[DETAILED][kept],
        steps=kept,
        margin=np.float32(margin),
    )


def _step_greedily(model: Any, prompt: np.ndarray) -> np.ndarray:
    """Decode with transformers' cache; return f32[len(prompt) + NUM_STEPS, V]."""
    import torch

    with torch.no_grad():
        # RoPE that stretches with the sequence is reset only by a short sequence.
        model(torch.zeros((1, 1), dtype=torch.long))
        rows, cache, steps = torch.tensor(prompt)[None].long(), {}, []
        # Name of the cache in arguments and output; transformers 5.24 renamed it.
        arguments = inspect.signature(model.forward).parameters
        kept = "cache" if "cache" in arguments else "past_key_values"
        for _ in range(NUM_STEPS + 1):
            out = model(rows, use_cache=True, **cache)
            cache = {kept: out[kept]}
            steps.append(out.logits[0].float().numpy())
            rows = out.logits[0, -1].argmax()[None, None]
    return np.concatenate(steps)


def _step_anew(model: Any, prompt: np.ndarray) -> np.ndarray:
    """Recompute the sequence each step; return f32[len(prompt) + NUM_STEPS, V]."""
    sequence = [int(token) for token in prompt]
    for _ in range(NUM_STEPS):
        sequence.append(int(_compute_at_once(model, sequence)[-1].argmax()))
    return _compute_at_once(model, sequence)


def _compute_at_once(model: Any, sequence: Sequence[int]) -> np.ndarray:
    """Return the logits of a whole sequence without a cache, f32[length, V]."""
    import torch

    with torch.no_grad():
        rows = torch.tensor([[int(token) for token in sequence]])
        return model(rows, use_cache=False).logits[0].float().numpy()


def _random_prompts() -> list[np.ndarray]:
    """Return the unequal random prompts, the same on every machine."""
    generator = np.random.default_rng(7)
    return [generator.integers(0, VOCAB_SIZE, length) for length in PROMPT_LENGTHS]


def _pydoc_prompts() -> list[np.ndarray]:
    """Return prompts of the bundled model, tokenized."""
    tokenizer = tokenizers.Tokenizer.from_file(str(PYDOC / "tokenizer.json"))
    return [np.asarray(tokenizer.encode(text).ids) for text in PYDOC_PROMPTS]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def _scaled(name: str, drawn: Any, case: Case) -> Any:
    """Scale normal numbers so that every part of the model affects the logits."""
    if name.endswith(("norm.weight", "norm_f.weight")):
        around_0 = "gemma2", "gemma3", "qwen3_next", "qwen3_5"
        lies_around_0 = case.model_type.startswith(around_0)
        lies_around_0 |= case.model_type == "gemma"
        lies_around_0 |= case.model_type == "muse_glimmer" and "layernorm" in name
        is_own = "linear_attn" in name
        return (0 if lies_around_0 and not is_own else 1) + 0.3 * drawn
    scales = ".scale", "expert_scale", "layer_scalar", "_scale", "qk_norm.temp"
    if name.endswith(scales):
        return 1 + 0.3 * drawn
    if name.endswith("embed_tokens_per_layer.weight"):
        return 0.5 * drawn
    if name.endswith("A_log"):
        return 0.5 * drawn
    if name.endswith("dt_bias"):
        # A state that decays over some tens of tokens, like trained ones.
        return drawn - 3
    if name.endswith("sinks"):
        return 1 + drawn
    if name.endswith("balancing_biases"):
        # Of no expert it is -1 in transformers 5.24, for every file that it loads.
        biases = 0.1 * drawn - 1
        biases[-1] = -1
        return biases
    if "moe_statics" in name:
        return 0.1 * drawn  # next to softmaxes, not sigmoids
    if name.endswith(("states_bias", "residual_bias")):
        return 0.1 * drawn  # of all rows, which would be alike
    if name.endswith("bias"):
        return 0.5 * drawn
    if "embed_tokens" in name:
        return case.embedding_scale * drawn
    return 1.5 * drawn / drawn.shape[-1] ** 0.5


def _rewrite_config_in_old_form(path: Path) -> None:
    """Write config.json in the form of transformers 4, which most checkpoints have."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    per_kind = "sliding_attention" in rope
    if per_kind:
        if config["model_type"] == "gemma3_text":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    key = "rope_type" if per_kind else "type"
    config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _store_mxfp4(folder: Path) -> None:
    """Store experts like gpt-oss: 4-bit elements, a scale for every 32."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = np.asarray([*values, *(-value for value in values)], np.float32)

    def store(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
        if "experts" not in name or name.endswith("bias"):
            return {name: tensor}
        groups = tensor.astype(np.float32).swapaxes(1, 2)
        groups = groups.reshape(*groups.shape[:2], -1, 32)
        exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
        scaled = groups / np.exp2(exponents)[..., None]
        codes = np.abs(scaled[..., None] - values).argmin(-1).astype(np.uint8)
        return {
            f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4,
            f"{name}_scales": (exponents + 127).astype(np.uint8),
        }

    _rewrite_tensors(folder, store, dict(quant_method="mxfp4"))


def _store_fp8(folder: Path) -> None:
    """Store matrices like DeepSeek-V3: float8 elements, blocks with a scale."""
    import ml_dtypes

    block = 8

    def store(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
        if not re.search(r"proj|\.w[123]\.", name):
            return {name: tensor}
        padding = [(0, -size % block) for size in tensor.shape]
        padded = np.pad(tensor.astype(np.float32), padding)
        rows, columns = (size // block for size in padded.shape)
        blocks = padded.reshape(rows, block, columns, block)
        scales = np.abs(blocks).max((1, 3)) / 448
        scaled = (blocks / scales[:, None, :, None]).reshape(padded.shape)
        cut = scaled[: tensor.shape[0], : tensor.shape[1]]
        return {
            name: cut.astype(ml_dtypes.float8_e4m3fn),
            f"{name}_scale_inv": scales,
        }

    settings = dict(quant_method="fp8", weight_block_size=[block, block])
    _rewrite_tensors(folder, store, settings | dict(activation_scheme="dynamic"))


def _rename_tensors(path: Path, patterns: Sequence[tuple[str, str]]) -> None:
    """Rename tensors to the names of published checkpoints."""
    from safetensors.numpy import load_file, save_file

    tensors = {}
    for name, tensor in load_file(path).items():
        for pattern, replacement in patterns:
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


QUANTIZERS = {"mxfp4": _store_mxfp4, "fp8": _store_fp8}


def _rewrite_tensors(
    folder: Path,
    store: Callable[[str, np.ndarray], dict[str, np.ndarray]],
    settings: dict[str, Any],
) -> None:
    """Rewrite each tensor, and update config.json."""
    from safetensors.numpy import load_file, save_file

    path, config_path = folder / "model.safetensors", folder / "config.json"
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in load_file(path).items():
        tensors |= store(name, tensor)
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, path)
    config = json.loads(config_path.read_text()) | {"quantization_config": settings}
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main(names: Sequence[str]) -> None:
    for name in names or [*CASES, "pydoc"]:
        folder = FIXTURES / name
        folder.mkdir(parents=True, exist_ok=True)
        if name in CASES:
            write_checkpoint(name, folder)
        result = expected(name, checkpoint_folder(name), COMMITTED_STEPS)
        np.savez(folder / "expected.npz", **result)
        size = sum(path.stat().st_size for path in folder.iterdir())
        distinct = [len(set(row)) for row in result["generated"].tolist()]
        print(
            f"{name}: {size / 1024:.0f} KiB, distinct tokens {distinct}, "
            f"|logit| up to {abs(result['prefill']).max():.1f}, least lead of a greedy "
            f"token {result['margin']:.4f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
