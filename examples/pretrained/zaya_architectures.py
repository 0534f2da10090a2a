"""The architecture ZAYA: attention after convolutions, and MLP routers.

`architectures.py` has the others, and describes how to add one.
"""

from . import zaya_readings
from .architecture import Architecture

PROJECTION = "self_attn.qkv_proj"


def name_residuals(part: str, stored: str) -> dict[str, str]:
    """Return tensor names of the scales and biases of a part's output and residual."""
    return {
        f"{part}_{ours}_{kind}": f"{stored}_residual_scale.{theirs}_{kind}"
        for ours, theirs in (("mixed", "hidden_states"), ("kept", "residual"))
        for kind in ("scale", "bias")
    }


ZAYA_ARCHITECTURES: dict[str, Architecture] = {
    "zaya": Architecture(
        defaults=dict(
            max_position_embeddings=131_072,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            moe_intermediate_size=2048,
            num_experts=16,
            num_experts_per_tok=1,
            router_hidden_size=256,
            cca_time0=2,
            cca_time1=2,
        ),
        choices=dict(has_residual_scales=True),
        tensors={
            f"convolved_{name}_{ours}": f"{PROJECTION}.conv_qk_{theirs}.weight"
            for name in ("query", "key")
            for ours, theirs in (("taps", "depthwise"), ("mix", "grouped"))
        }
        | name_residuals("attention", "post_attention")
        | name_residuals("mlp", "post_mlp")
        | dict(
            input_scale="input_hidden_states_scale",
            input_bias="input_hidden_states_bias",
            convolved_query=f"{PROJECTION}.q_proj.weight",
            convolved_key=f"{PROJECTION}.k_proj.weight",
            convolved_newest=f"{PROJECTION}.v_proj_current.weight",
            convolved_late=f"{PROJECTION}.v_proj_delayed.weight",
            convolved_scale="self_attn.qk_norm.temp",
            router_down="mlp.gate.down_proj.weight",
            router_state_scale="mlp.gate.router_states_scale",
            router_norm="mlp.gate.router_mlp.norm.weight",
            router_first="mlp.gate.router_mlp.fc1.weight",
            router_second="mlp.gate.router_mlp.fc2.weight",
            router="mlp.gate.router_mlp.out_proj.weight",
            choice_bias="mlp.gate.balancing_biases",
            expert_gate="mlp.experts.gate_up_proj",
            expert_up="mlp.experts.gate_up_proj",
            expert_down="mlp.experts.down_proj",
        ),
        read=zaya_readings.read_zaya,
        fused_experts="rows",
    ),
}
