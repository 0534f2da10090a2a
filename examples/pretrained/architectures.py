"""Table of architectures: one row each, with its differences from Llama.

To add an architecture, add a row; for config.json keys of its own, a function in
`readings.py` that returns fields of `DecoderConfig`; and a tiny checkpoint in
`tests/support/checkpoints/checkpoint_fixtures.py`, to compare logits with transformers.
`docs/how-to/architectures.md` describes the steps. Rows with Mamba 2 or short
convolutions are in `mamba_architectures.py`, rows with a gated delta rule in
`delta_architectures.py`, GLM, Hunyuan, ERNIE and others with experts in
`expert_architectures.py`, models of 2026 with sliding windows in
`windowed_architectures.py`, and Gemma, Mistral and ZAYA in files of their own.
"""

import dataclasses

from . import readings
from .architecture import Architecture
from .delta_architectures import DELTA_ARCHITECTURES
from .expert_architectures import EXPERT_ARCHITECTURES
from .gemma_architectures import GEMMA_ARCHITECTURES
from .mamba_architectures import MAMBA_ARCHITECTURES
from .mistral_architectures import MISTRAL_ARCHITECTURES
from .windowed_architectures import WINDOWED_ARCHITECTURES
from .zaya_architectures import ZAYA_ARCHITECTURES

COHERE = Architecture(
    defaults=dict(
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_interleave=True,
        logit_scale=0.0625,
        tie_word_embeddings=True,
    ),
    aliases=dict(rms_norm_eps="layer_norm_eps"),
    choices=dict(has_centred_norms=True, is_parallel=True),
    read=readings.read_cohere,
)

DEEPSEEK = Architecture(
    defaults=dict(
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        v_head_dim=128,
        routed_scaling_factor=1.0,
        rope_interleave=True,
    ),
    read=readings.read_deepseek,
    biases="none",
)

GPT_OSS_ROPE = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(
        has_windows=True,
        biases="none",
    ),
    "qwen2": Architecture(has_windows=True, biases="qkv"),
    "qwen3": Architecture(
        choices=dict(qk_norm="head"),
        has_windows=True,
    ),
    "phi3": Architecture(
        defaults=dict(
            original_max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        tensors=dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj.weight")
        | dict.fromkeys(("gate", "up"), "mlp.gate_up_proj.weight"),
        has_windows=True,
        biases="none",
        can_turn_partly=True,
    ),
    "olmo2": Architecture(
        defaults=dict(rms_norm_eps=1e-5),
        choices=dict(norms="after", qk_norm="all"),
    ),
    "olmo3": Architecture(
        defaults=dict(
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            rope_theta=500_000.0,
        ),
        choices=dict(norms="after", qk_norm="all"),
        read=readings.read_olmo3,
        has_windows=True,
    ),
    "exaone4": Architecture(
        defaults=dict(rms_norm_eps=1e-5),
        choices=dict(norms="after", qk_norm="head"),
        read=readings.read_exaone4,
        has_windows=True,
        biases="none",
    ),
    "smollm3": Architecture(
        defaults=dict(
            no_rope_layer_interval=4,
            rope_theta=2_000_000.0,
            tie_word_embeddings=True,
        ),
        read=readings.read_smollm3,
        has_windows=True,
    ),
    "granite": Architecture(
        defaults=dict(
            attention_multiplier=1.0,
            embedding_multiplier=1.0,
            residual_multiplier=1.0,
            logits_scaling=1.0,
        ),
        read=readings.read_granite,
    ),
    "seed_oss": Architecture(
        defaults=dict(
            max_position_embeddings=524_288,
            attention_bias=True,
        ),
        read=readings.read_seed_oss,
    ),
    "cohere": COHERE,
    "cohere2": dataclasses.replace(
        COHERE,
        defaults=COHERE.defaults | dict(rope_theta=10_000.0),
        read=readings.read_cohere2,
        has_windows=True,
    ),
    "mixtral": Architecture(
        defaults=dict(
            rope_theta=1e6,
            rms_norm_eps=1e-5,
            num_experts_per_tok=2,
            num_local_experts=8,
        ),
        tensors=dict(
            router="block_sparse_moe.gate.weight",
            expert_gate="block_sparse_moe.experts.{}.w1.weight",
            expert_up="block_sparse_moe.experts.{}.w3.weight",
            expert_down="block_sparse_moe.experts.{}.w2.weight",
        ),
        read=readings.read_mixtral,
        has_windows=True,
        biases="none",
    ),
    "qwen3_moe": Architecture(
        defaults=dict(
            decoder_sparse_step=1,
            moe_intermediate_size=768,
            num_experts_per_tok=8,
            num_experts=128,
        ),
        choices=dict(qk_norm="head"),
        read=readings.read_qwen3_moe,
        has_windows=True,
    ),
    "gpt_oss": Architecture(
        defaults=dict(
            rms_norm_eps=1e-5,
            rope_theta=150_000.0,
            rope_parameters=GPT_OSS_ROPE,
            attention_bias=True,
            num_local_experts=128,
            num_experts_per_tok=4,
            swiglu_alpha=1.702,
            swiglu_limit=7.0,
        ),
        choices=dict(has_sinks=True),
        tensors=dict(
            router="mlp.router.weight",
            router_bias="mlp.router.bias",
            expert_gate="mlp.experts.gate_up_proj",
            expert_up="mlp.experts.gate_up_proj",
            expert_down="mlp.experts.down_proj",
            expert_gate_bias="mlp.experts.gate_up_proj_bias",
            expert_up_bias="mlp.experts.gate_up_proj_bias",
            expert_down_bias="mlp.experts.down_proj_bias",
        ),
        read=readings.read_gpt_oss,
        has_windows=True,
    ),
    "deepseek_v2": dataclasses.replace(
        DEEPSEEK,
        defaults=DEEPSEEK.defaults
        | dict(
            first_k_dense_replace=0,
            moe_intermediate_size=1407,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=None,
        ),
    ),
    "deepseek_v3": dataclasses.replace(
        DEEPSEEK,
        defaults=DEEPSEEK.defaults
        | dict(
            first_k_dense_replace=3,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            n_group=8,
            topk_group=4,
            topk_method="noaux_tc",
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
            num_nextn_predict_layers=1,
        ),
    ),
}
ARCHITECTURES |= GEMMA_ARCHITECTURES | MISTRAL_ARCHITECTURES | EXPERT_ARCHITECTURES
ARCHITECTURES |= DELTA_ARCHITECTURES | MAMBA_ARCHITECTURES
ARCHITECTURES |= WINDOWED_ARCHITECTURES | ZAYA_ARCHITECTURES
