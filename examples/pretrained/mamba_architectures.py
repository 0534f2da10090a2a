"""Architectures with Mamba 2 layers or short convolutions.

`architectures.py` has the others, and describes how to add one.
"""

import dataclasses
from collections.abc import Mapping

from . import mamba_readings
from .architecture import Architecture


def name_mamba(mixer: str) -> dict[str, str]:
    """Return the tensor names of Mamba 2 layers, with the mixer's prefix."""
    projected = (f"mamba_{name}" for name in ("gate", "x", "b", "c", "step"))
    return (
        dict.fromkeys(projected, f"{mixer}.in_proj.weight")
        | {f"mamba_{name}_taps": f"{mixer}.conv1d.weight" for name in "xbc"}
        | dict(
            mamba_rate=f"{mixer}.A_log",
            mamba_offset=f"{mixer}.dt_bias",
            mamba_skip=f"{mixer}.D",
            mamba_norm=f"{mixer}.norm.weight",
            mamba_output=f"{mixer}.out_proj.weight",
        )
    )


# Defaults of models with Bamba's names for Mamba 2 sizes.
BAMBA_SIZES = dict(
    mamba_n_heads=128,
    mamba_n_groups=1,
    mamba_d_state=256,
    mamba_d_conv=4,
    mamba_conv_bias=True,
)

FEED_FORWARD = {
    name: f"feed_forward.{name}_proj.weight" for name in ("gate", "up", "down")
} | dict(mlp_norm="pre_ff_layernorm.weight", final_norm="final_layernorm.weight")

# Tensor names of models with the prefix "backbone.".
BACKBONE = dict(
    embedding="embeddings.weight",
    final_norm="norm_f.weight",
    attention_norm="norm.weight",
    mlp_norm="norm.weight",
)

LFM2 = Architecture(
    defaults=dict(
        max_position_embeddings=128_000,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        tie_word_embeddings=True,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=True,
        block_ffn_dim_multiplier=1.0,
        block_multiple_of=256,
    ),
    aliases=dict(rms_norm_eps="norm_eps"),
    choices=dict(qk_norm="head"),
    tensors=dict(
        attention_norm="operator_norm.weight",
        mlp_norm="ffn_norm.weight",
        final_norm="embedding_norm.weight",
        output="self_attn.out_proj.weight",
        query_norm="self_attn.q_layernorm.weight",
        key_norm="self_attn.k_layernorm.weight",
        gate="feed_forward.w1.weight",
        up="feed_forward.w3.weight",
        down="feed_forward.w2.weight",
        short_taps="conv.conv.weight",
        short_output="conv.out_proj.weight",
        router="feed_forward.gate.weight",
        choice_bias="feed_forward.expert_bias",
        expert_gate="feed_forward.experts.{}.w1.weight",
        expert_up="feed_forward.experts.{}.w3.weight",
        expert_down="feed_forward.experts.{}.w2.weight",
    )
    | {f"short_{name}": "conv.in_proj.weight" for name in ("first", "second", "x")},
    read=mamba_readings.read_lfm2,
    biases="none",
)

MAMBA_ARCHITECTURES: Mapping[str, Architecture] = {
    "bamba": Architecture(
        defaults=BAMBA_SIZES
        | dict(
            max_position_embeddings=262_144,
            rms_norm_eps=1e-5,
            partial_rotary_factor=0.5,
        ),
        tensors=name_mamba("mamba") | FEED_FORWARD,
        read=mamba_readings.read_bamba,
        can_turn_partly=True,
    ),
    "falcon_h1": Architecture(
        defaults=BAMBA_SIZES
        | dict(
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            mamba_norm_before_gate=True,
            mlp_multipliers=[1.0, 1.0],
            ssm_multipliers=[1.0] * 5,
        )
        | {
            f"{part}_multiplier": 1.0
            for part in (
                "attention_in",
                "attention_out",
                "embedding",
                "key",
                "lm_head",
                "ssm_in",
                "ssm_out",
            )
        },
        tensors=name_mamba("mamba") | FEED_FORWARD,
        read=mamba_readings.read_falcon_h1,
    ),
    "granitemoehybrid": Architecture(
        defaults=BAMBA_SIZES
        | dict(
            max_position_embeddings=2048,
            attention_multiplier=1.0,
            embedding_multiplier=1.0,
            residual_multiplier=1.0,
            logits_scaling=1.0,
            num_local_experts=8,
            num_experts_per_tok=2,
            shared_intermediate_size=1024,
        ),
        tensors=name_mamba("mamba")
        | dict.fromkeys(
            ("gate", "up", "shared_gate", "shared_up"), "shared_mlp.input_linear.weight"
        )
        | dict.fromkeys(("down", "shared_down"), "shared_mlp.output_linear.weight")
        | dict.fromkeys(
            ("expert_gate", "expert_up"), "block_sparse_moe.input_linear.weight"
        )
        | dict(
            expert_down="block_sparse_moe.output_linear.weight",
            router="block_sparse_moe.router.layer.weight",
        ),
        read=mamba_readings.read_granite_hybrid,
        fused_experts="rows",
    ),
    "lfm2": LFM2,
    "lfm2_moe": dataclasses.replace(
        LFM2,
        defaults=LFM2.defaults
        | dict(
            block_auto_adjust_ff_dim=False,
            moe_intermediate_size=1792,
            num_dense_layers=2,
            num_experts=32,
            num_experts_per_tok=4,
            routed_scaling_factor=1.0,
            norm_topk_prob=True,
            use_expert_bias=True,
        ),
        read=mamba_readings.read_lfm2_moe,
    ),
    "lfm3": Architecture(
        defaults=dict(
            max_position_embeddings=128_000,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            conv_L_cache=7,
            use_sandwich_norm=True,
            use_attention_gate=True,
        ),
        aliases=LFM2.aliases,
        choices=dict(qk_norm="head"),
        tensors={
            name: stored
            for name, stored in LFM2.tensors.items()
            if name not in ("output", "query_norm", "key_norm")
        }
        | dict(
            attention_post_norm="post_operator_norm.weight",
            mlp_post_norm="post_ffn_norm.weight",
            query_gate="self_attn.gate_proj.weight",
        ),
        read=mamba_readings.read_lfm3,
    ),
    "mamba2": Architecture(
        defaults=dict(
            # Without positions there is no limit.
            max_position_embeddings=2**20,
            rms_norm_eps=1e-5,
            intermediate_size=1,
            num_attention_heads=128,
            head_dim=64,
            mamba_n_groups=8,
            mamba_d_state=128,
            mamba_d_conv=4,
            mamba_conv_bias=True,
        ),
        aliases=dict(
            rms_norm_eps="layer_norm_epsilon",
            num_attention_heads="num_heads",
            mamba_n_heads="num_heads",
            mamba_d_head="head_dim",
            mamba_n_groups="n_groups",
            mamba_d_state="state_size",
            mamba_d_conv="conv_kernel",
            mamba_conv_bias="use_conv_bias",
            mamba_proj_bias="use_bias",
        ),
        tensors=name_mamba("mixer") | BACKBONE,
        read=mamba_readings.read_mamba2,
        prefix="backbone.",
    ),
    "nemotron_h": Architecture(
        defaults=dict(
            hidden_act="relu2",
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            mamba_n_heads=128,
            mamba_d_head=64,
            mamba_n_groups=8,
            mamba_d_state=128,
            mamba_d_conv=4,
            mamba_conv_bias=True,
            time_step_min=0.001,
            n_routed_experts=8,
            moe_intermediate_size=7688,
            moe_shared_expert_intermediate_size=7688,
            num_experts_per_tok=2,
            routed_scaling_factor=1.0,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
        ),
        aliases=dict(
            rms_norm_eps="layer_norm_epsilon",
            hidden_act="mlp_hidden_act",
            layer_types="layers_block_type",
            mamba_n_heads="mamba_num_heads",
            mamba_d_head="mamba_head_dim",
            mamba_n_groups="n_groups",
            mamba_d_state="ssm_state_size",
            mamba_d_conv="conv_kernel",
            mamba_conv_bias="use_conv_bias",
        ),
        choices=dict(is_gated=False, has_qkv_bias=False, has_output_bias=False),
        tensors=name_mamba("mixer")
        | BACKBONE
        | {
            name: f"mixer.{short}_proj.weight"
            for name, short in dict(
                query="q", key="k", value="v", output="o", up="up", down="down"
            ).items()
        }
        | dict(
            router="mixer.gate.weight",
            choice_bias="mixer.gate.e_score_correction_bias",
            expert_up="mixer.experts.{}.up_proj.weight",
            expert_down="mixer.experts.{}.down_proj.weight",
            shared_up="mixer.shared_experts.up_proj.weight",
            shared_down="mixer.shared_experts.down_proj.weight",
            routed_in="mixer.fc1_latent_proj.weight",
            routed_out="mixer.fc2_latent_proj.weight",
        ),
        read=mamba_readings.read_nemotron_h,
        prefix="backbone.",
        ignored=("mtp.",),
    ),
}
