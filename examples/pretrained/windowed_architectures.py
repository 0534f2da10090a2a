"""Architectures with some sliding windows: Mellum 2, Laguna, Command A+, Muse Glimmer.

`architectures.py` has the others, and describes how to add one.
"""

from . import windowed_readings
from .architecture import Architecture
from .parts import OutputGate

WINDOWED_ARCHITECTURES: dict[str, Architecture] = {
    "mellum": Architecture(
        defaults=dict(
            max_position_embeddings=131_072,
            first_k_dense_replace=0,
            decoder_sparse_step=1,
            moe_intermediate_size=896,
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
        choices=dict(qk_norm="head"),
        # Multi-token prediction layers.
        ignored=("mtp.",),
        read=windowed_readings.read_mellum,
        has_windows=True,
    ),
    "laguna": Architecture(
        defaults=dict(
            max_position_embeddings=131_072,
            first_k_dense_replace=1,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=256,
            num_experts_per_tok=8,
            moe_routed_scaling_factor=1.0,
            gating=True,
        ),
        choices=dict(qk_norm="head"),
        tensors=dict(
            query_gate="self_attn.g_proj.weight",
            choice_bias="mlp.experts.e_score_correction_bias",
            shared_gate="mlp.shared_expert.gate_proj.weight",
            shared_up="mlp.shared_expert.up_proj.weight",
            shared_down="mlp.shared_expert.down_proj.weight",
        ),
        read=windowed_readings.read_laguna,
        has_windows=True,
    ),
    "cohere2_moe": Architecture(
        defaults=dict(
            max_position_embeddings=8192,
            layer_norm_eps=1e-5,
            rope_theta=10_000.0,
            rope_interleave=True,
            logit_scale=0.0625,
            tie_word_embeddings=True,
            first_k_dense_replace=0,
            prefix_dense_sliding_window_pattern=1,
            num_experts=8,
            num_experts_per_tok=2,
            num_shared_experts=0,
            shared_expert_combination_strategy="average",
            expert_selection_fn="softmax",
            norm_topk_prob=True,
        ),
        choices=dict(is_parallel=True),
        read=windowed_readings.read_cohere2_moe,
        has_windows=True,
    ),
    "muse_glimmer_text": Architecture(
        defaults=dict(
            # Keys that may be missing from the text part of the multimodal model.
            vocab_size=202_048,
            hidden_size=6656,
            intermediate_size=19_968,
            num_hidden_layers=52,
            num_attention_heads=32,
            hidden_activation="silu",
            rms_norm_eps=1e-5,
            post_norm_eps=1e-8,
            qk_scale_factor=3.87,
            output_multiplier=0.19611613513818404,
            final_logit_softcapping=20.0,
        ),
        choices=dict(
            norms="both",
            norm_offset=1.0,
            final_norm_offset=0.0,
            has_embedding_norm=True,
            qk_norm="unit",
            output_gate=OutputGate(),
        ),
        tensors=dict(
            mlp_norm="pre_feedforward_layernorm.weight",
            query_gate="self_attn.gate_proj.weight",
        ),
        read=windowed_readings.read_muse_glimmer,
        has_windows=True,
    ),
}
