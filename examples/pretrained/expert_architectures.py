"""Architectures GLM 4, Hunyuan, ERNIE 4.5, Qwen2-MoE, MiniMax M2 and PhiMoE.

Most are MoE models; some have a dense sibling. `architectures.py` has the others, and
describes how to add one.
"""

import dataclasses

from . import expert_readings, readings
from .architecture import Architecture
from .delta_architectures import SHARED_EXPERT_TENSORS

GLM = Architecture(
    defaults=dict(
        max_position_embeddings=131_072,
        rms_norm_eps=1.5625e-07,
        partial_rotary_factor=0.5,
        rope_interleave=True,
        attention_bias=True,
    ),
    choices=dict(has_output_bias=False),
    tensors=dict.fromkeys(("gate", "up"), "mlp.gate_up_proj.weight"),
    can_turn_partly=True,
)

GLM4_MOE = Architecture(
    defaults=dict(
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        num_nextn_predict_layers=1,
    ),
    choices=dict(has_output_bias=False),
    read=expert_readings.read_glm4_moe,
    can_turn_partly=True,
)

HUNYUAN = Architecture(
    defaults=dict(max_position_embeddings=2048, rms_norm_eps=1e-5),
    aliases=dict(head_dim="attention_head_dim"),
    choices=dict(qk_norm="turned"),
    tensors=dict(
        query_norm="self_attn.query_layernorm.weight",
        key_norm="self_attn.key_layernorm.weight",
    ),
    read=expert_readings.read_hunyuan,
)

ERNIE = Architecture(
    defaults=dict(
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_interleave=True,
        tie_word_embeddings=True,
    ),
    aliases=dict(attention_bias="use_bias", mlp_bias="use_bias"),
)

EXPERT_ARCHITECTURES: dict[str, Architecture] = {
    "glm": GLM,
    "glm4": dataclasses.replace(
        GLM,
        choices=GLM.choices | dict(norms="both"),
        tensors={
            **GLM.tensors,
            "attention_post_norm": "post_self_attn_layernorm.weight",
            "mlp_norm": "post_attention_layernorm.weight",
            "mlp_post_norm": "post_mlp_layernorm.weight",
        },
    ),
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": Architecture(
        defaults=GLM4_MOE.defaults
        | dict(
            num_key_value_heads=20,
            max_position_embeddings=202_752,
            partial_rotary_factor=1.0,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            v_head_dim=256,
            rope_interleave=True,
            moe_intermediate_size=1536,
            n_routed_experts=64,
            num_experts_per_tok=4,
            routed_scaling_factor=1.8,
        ),
        read=readings.read_deepseek,
        biases="none",
    ),
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": dataclasses.replace(
        HUNYUAN,
        tensors={
            **HUNYUAN.tensors,
            "router": "mlp.gate.wg.weight",
            "shared_gate": "mlp.shared_mlp.gate_proj.weight",
            "shared_up": "mlp.shared_mlp.up_proj.weight",
            "shared_down": "mlp.shared_mlp.down_proj.weight",
        },
        read=expert_readings.read_hunyuan_moe,
    ),
    "ernie4_5": ERNIE,
    "ernie4_5_moe": dataclasses.replace(
        ERNIE,
        defaults=ERNIE.defaults
        | dict(
            moe_intermediate_size=1536,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_end_index=-1,
            moe_layer_interval=1,
            moe_norm_min=1e-12,
            num_experts=64,
            num_experts_per_tok=6,
        ),
        aliases=dict(
            **ERNIE.aliases,
            num_experts="moe_num_experts",
            num_experts_per_tok="moe_k",
        ),
        tensors=dict(choice_bias="mlp.moe_statics.e_score_correction_bias"),
        # Multi-token prediction layers.
        ignored=("model.mtp_",),
        read=expert_readings.read_ernie_moe,
    ),
    "qwen2_moe": Architecture(
        defaults=dict(
            max_position_embeddings=32_768,
            decoder_sparse_step=1,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts_per_tok=4,
            num_experts=60,
            qkv_bias=True,
        ),
        tensors=SHARED_EXPERT_TENSORS,
        read=expert_readings.read_qwen2_moe,
        has_windows=True,
        biases="none",
    ),
    "minimax_m2": Architecture(
        defaults=dict(
            max_position_embeddings=196_608,
            rope_theta=5e6,
            num_experts_per_tok=8,
            num_local_experts=256,
        ),
        choices=dict(qk_norm="all"),
        tensors=dict(
            router="block_sparse_moe.gate.weight",
            choice_bias="block_sparse_moe.e_score_correction_bias",
            expert_gate="block_sparse_moe.experts.{}.w1.weight",
            expert_up="block_sparse_moe.experts.{}.w3.weight",
            expert_down="block_sparse_moe.experts.{}.w2.weight",
        ),
        read=expert_readings.read_minimax_m2,
        biases="none",
    ),
    "phimoe": Architecture(
        defaults=dict(
            max_position_embeddings=131_072,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            num_experts_per_tok=2,
            num_local_experts=16,
            router_jitter_noise=0.01,
        ),
        choices=dict(has_centred_norms=True, has_norm_bias=True),
        tensors=dict(
            router="block_sparse_moe.gate.weight",
            expert_gate="block_sparse_moe.experts.{}.w1.weight",
            expert_up="block_sparse_moe.experts.{}.w3.weight",
            expert_down="block_sparse_moe.experts.{}.w2.weight",
        ),
        read=expert_readings.read_phimoe,
        has_windows=True,
    ),
}
