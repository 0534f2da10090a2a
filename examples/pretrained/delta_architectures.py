"""Architectures with a gated delta rule.

`architectures.py` has the others, and describes how to add one.
"""

import dataclasses

from . import delta_readings
from .architecture import Architecture
from .parts import OutputGate

# Tensor names of layers with the gated delta rule, by parameter.
DELTA_RULE_TENSORS = {
    "delta_query": "linear_attn.q_proj.weight",
    "delta_key": "linear_attn.k_proj.weight",
    "delta_value": "linear_attn.v_proj.weight",
    "delta_gate": "linear_attn.g_proj.weight",
    "delta_strength": "linear_attn.b_proj.weight",
    "delta_decay": "linear_attn.a_proj.weight",
    "delta_offset": "linear_attn.dt_bias",
    "delta_rate": "linear_attn.A_log",
    "delta_query_taps": "linear_attn.q_conv1d.weight",
    "delta_key_taps": "linear_attn.k_conv1d.weight",
    "delta_value_taps": "linear_attn.v_conv1d.weight",
    "delta_norm": "linear_attn.o_norm.weight",
    "delta_output": "linear_attn.o_proj.weight",
}

SHARED_EXPERT_TENSORS = {
    f"shared_{name}": f"mlp.shared_expert.{name}_proj.weight"
    for name in ("gate", "up", "down")
}

# Kimi Linear's names of sizes, shared by Ling 3.
KIMI_ALIASES = dict(
    max_position_embeddings="model_max_length",
    n_routed_experts="num_experts",
    n_shared_experts="num_shared_experts",
    n_group="num_expert_group",
    norm_topk_prob="moe_renormalize",
    num_experts_per_tok="num_experts_per_token",
)

# Ling 3: tensors of both kinds of layers have the same prefix.
LING3_TENSORS = {
    name: stored.replace("linear_attn.", "attention.")
    for name, stored in DELTA_RULE_TENSORS.items()
} | dict(
    embedding="word_embeddings.weight",
    delta_decay="attention.f_proj.weight",
    delta_output="attention.dense.weight",
    query="attention.q_proj.weight",
    query_down="attention.q_a_proj.weight",
    query_down_norm="attention.q_a_layernorm.weight",
    query_up="attention.q_b_proj.weight",
    query_gate="attention.g_proj.weight",
    latent="attention.kv_a_proj_with_mqa.weight",
    latent_norm="attention.kv_a_layernorm.weight",
    key_up="attention.kv_b_proj.weight",
    value_up="attention.kv_b_proj.weight",
    output="attention.dense.weight",
    choice_bias="mlp.gate.expert_bias",
)

QWEN3_NEXT = Architecture(
    defaults=dict(
        max_position_embeddings=32_768,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        decoder_sparse_step=1,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts_per_tok=10,
        num_experts=512,
        norm_topk_prob=True,
    ),
    choices=dict(
        qk_norm="head",
        norm_offset=1.0,
        output_gate=OutputGate(is_beside_queries=True),
    ),
    tensors=DELTA_RULE_TENSORS
    | SHARED_EXPERT_TENSORS
    | dict.fromkeys(
        ("delta_query", "delta_key", "delta_value", "delta_gate"),
        "linear_attn.in_proj_qkvz.weight",
    )
    | dict.fromkeys(("delta_strength", "delta_decay"), "linear_attn.in_proj_ba.weight")
    | dict.fromkeys(
        ("delta_query_taps", "delta_key_taps", "delta_value_taps"),
        "linear_attn.conv1d.weight",
    )
    | dict(
        delta_norm="linear_attn.norm.weight",
        delta_output="linear_attn.out_proj.weight",
    ),
    ignored=("mtp.",),
    read=delta_readings.read_qwen3_next,
    can_turn_partly=True,
)

QWEN3_5 = dataclasses.replace(
    QWEN3_NEXT,
    defaults=QWEN3_NEXT.defaults | dict(num_experts=256, num_experts_per_tok=8),
    tensors=QWEN3_NEXT.tensors
    | dict.fromkeys(
        ("delta_query", "delta_key", "delta_value"), "linear_attn.in_proj_qkv.weight"
    )
    | dict(
        delta_gate="linear_attn.in_proj_z.weight",
        delta_strength="linear_attn.in_proj_b.weight",
        delta_decay="linear_attn.in_proj_a.weight",
    ),
    read=delta_readings.read_qwen3_5,
)

DELTA_ARCHITECTURES: dict[str, Architecture] = {
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": dataclasses.replace(
        QWEN3_5,
        defaults=QWEN3_5.defaults,
        read=delta_readings.read_qwen3_5_moe,
    ),
    "olmo_hybrid": Architecture(
        defaults=dict(
            max_position_embeddings=65_536,
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
        ),
        choices=dict(norms="after", state_norms="before", qk_norm="all"),
        tensors=DELTA_RULE_TENSORS
        | dict(
            attention_norm="attention_layer_norm.weight",
            mlp_norm="feedforward_layer_norm.weight",
        ),
        read=delta_readings.read_olmo_hybrid,
    ),
    "kimi_linear": Architecture(
        defaults=dict(
            qk_nope_head_dim=128,
            v_head_dim=128,
            max_position_embeddings=1_048_576,
            rms_norm_eps=1e-5,
            linear_head_dim=128,
            linear_num_heads=32,
            linear_conv_kernel_dim=4,
            first_k_dense_replace=1,
            moe_intermediate_size=1024,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            n_group=1,
            topk_group=1,
            topk_method="noaux_tc",
            routed_scaling_factor=2.446,
            norm_topk_prob=True,
        ),
        aliases=KIMI_ALIASES,
        tensors={
            name: stored.replace("linear_attn.", "self_attn.")
            for name, stored in DELTA_RULE_TENSORS.items()
        }
        | dict(
            delta_gate_down="self_attn.g_a_proj.weight",
            delta_gate="self_attn.g_b_proj.weight",
            delta_decay_down="self_attn.f_a_proj.weight",
            delta_decay="self_attn.f_b_proj.weight",
            router="block_sparse_moe.gate.weight",
            choice_bias="block_sparse_moe.gate.e_score_correction_bias",
            expert_gate="block_sparse_moe.experts.{}.w1.weight",
            expert_up="block_sparse_moe.experts.{}.w3.weight",
            expert_down="block_sparse_moe.experts.{}.w2.weight",
            shared_gate="block_sparse_moe.shared_experts.gate_proj.weight",
            shared_up="block_sparse_moe.shared_experts.up_proj.weight",
            shared_down="block_sparse_moe.shared_experts.down_proj.weight",
        ),
        read=delta_readings.read_kimi_linear,
        biases="none",
    ),
    "bailing_hybrid": Architecture(
        defaults=dict(
            head_dim=128,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            v_head_dim=128,
            max_position_embeddings=262_144,
            rope_theta=6e6,
            rope_interleave=True,
            short_conv_kernel_size=4,
            kda_safe_gate=True,
            kda_lower_bound=-5.0,
            first_k_dense_replace=2,
            moe_intermediate_size=768,
            n_routed_experts=512,
            n_shared_experts=1,
            num_experts_per_tok=8,
            n_group=8,
            topk_group=4,
            topk_method="noaux_tc",
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
            num_nextn_predict_layers=1,
        ),
        aliases=KIMI_ALIASES,
        choices=dict(output_gate=OutputGate(of_heads=True)),
        tensors=LING3_TENSORS,
        read=delta_readings.read_ling3,
        biases="none",
    ),
}
