"""Mistral's architectures since Ministral 3: queries are scaled by position.

`architectures.py` has the others, and describes how to add one.
"""

from . import mistral_readings
from .architecture import Architecture

# For all layers: yarn extends the context of pretraining.
YARN = dict(
    rope_type="yarn",
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)

MISTRAL_ARCHITECTURES: dict[str, Architecture] = {
    "ministral3": Architecture(
        defaults=dict(
            rms_norm_eps=1e-5,
            rope_parameters=YARN
            | dict(
                rope_theta=1e6,
                factor=16.0,
                original_max_position_embeddings=16_384,
            ),
        ),
        read=mistral_readings.read_ministral3,
        has_windows=True,
        biases="none",
    ),
    "mistral4": Architecture(
        defaults=dict(
            q_lora_rank=1024,
            qk_nope_head_dim=64,
            v_head_dim=128,
            rope_interleave=True,
            rope_parameters=YARN
            | dict(
                rope_theta=10_000.0,
                factor=128.0,
                original_max_position_embeddings=8192,
            ),
            first_k_dense_replace=0,
            moe_intermediate_size=2048,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=4,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
        tensors=dict.fromkeys(("expert_gate", "expert_up"), "mlp.experts.gate_up_proj")
        | dict(expert_down="mlp.experts.down_proj"),
        read=mistral_readings.read_mistral4,
        fused_experts="rows",
        biases="none",
    ),
}
