"""Architectures of the Gemma family.

`architectures.py` has the others, and describes how to add one.
"""

import dataclasses

from . import gemma_readings
from .architecture import Architecture

GEMMA = Architecture(
    defaults=dict(
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        tie_word_embeddings=True,
    ),
    choices=dict(norms="both", norm_offset=1.0),
    tensors=dict(mlp_norm="pre_feedforward_layernorm.weight"),
)

GEMMA_ARCHITECTURES: dict[str, Architecture] = {
    "gemma": Architecture(
        defaults=dict(
            hidden_act="gelu_pytorch_tanh",
            # Keys missing from the text part of PaliGemma.
            vocab_size=257_152,
            hidden_size=2048,
            intermediate_size=16_384,
            num_hidden_layers=18,
            num_attention_heads=8,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
        choices=dict(norm_offset=1.0),
        read=gemma_readings.read_gemma1,
    ),
    "gemma2": dataclasses.replace(
        GEMMA,
        defaults=GEMMA.defaults
        | dict(
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        ),
        read=gemma_readings.read_gemma,
        has_windows=True,
    ),
    "gemma3_text": dataclasses.replace(
        GEMMA,
        defaults=GEMMA.defaults
        | dict(
            # Keys missing from the text parts of larger models.
            vocab_size=262_208,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
        ),
        choices=GEMMA.choices | dict(qk_norm="head"),
        read=gemma_readings.read_gemma3,
        has_windows=True,
    ),
    "gemma4_text": Architecture(
        defaults=dict(
            # Keys that may be missing from the text parts of multimodal models.
            vocab_size=262_144,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=30,
            num_attention_heads=8,
            global_head_dim=512,
            hidden_activation="gelu_pytorch_tanh",
            tie_word_embeddings=True,
            vocab_size_per_layer_input=262_144,
            hidden_size_per_layer_input=256,
            num_kv_shared_layers=0,
        ),
        choices=dict(
            norms="both",
            qk_norm="head",
            has_value_norm=True,
            has_layer_scales=True,
            scale=1.0,
        ),
        tensors=dict(
            mlp_norm="pre_feedforward_layernorm.weight",
            routed_norm="pre_feedforward_layernorm_2.weight",
            routed_post_norm="post_feedforward_layernorm_2.weight",
            shared_post_norm="post_feedforward_layernorm_1.weight",
            shared_gate="mlp.gate_proj.weight",
            shared_up="mlp.up_proj.weight",
            shared_down="mlp.down_proj.weight",
            router="router.proj.weight",
            router_scale="router.scale",
            routed_scale="router.per_expert_scale",
            expert_gate="experts.gate_up_proj",
            expert_up="experts.gate_up_proj",
            expert_down="experts.down_proj",
        ),
        read=gemma_readings.read_gemma4,
        fused_experts="rows",
        has_windows=True,
    ),
}
