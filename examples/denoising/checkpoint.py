"""DiffusionGemma checkpoints: a causal encoder and a denoising decoder.

The encoder processes the prompt and finished blocks causally, the decoder denoises a
canvas. They share all weights except the scales of layer outputs. Both are Gemma 4 with
experts.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pretrained
from pretrained.files import find_tensors
from pretrained.settings import Settings, read_json
from safetensors import safe_open

# Settings of Gemma 4 that DiffusionGemma implies.
AS_GEMMA4 = dict(
    model_type="gemma4_text",
    attention_k_eq_v=True,
    enable_moe_block=True,
    hidden_size_per_layer_input=0,
)


class Denoiser(NamedTuple):
    """Model with the parameters of its two passes."""

    model: pretrained.Decoder
    encoder: pretrained.Params  # for causal passes
    decoder: pretrained.Params  # for canvases
    # MLP that adds the last step's prediction: "norm", "gate", "up", "down".
    conditioning: dict[str, jax.Array]
    canvas_length: int  # tokens per block, C


def load(folder: str | Path, dtype: Any = None) -> Denoiser:
    """Load a checkpoint folder.

    Raises:
        ValueError: if it is not a DiffusionGemma checkpoint.
    """
    raw = read_json(Path(folder) / "config.json")
    if raw.get("model_type") != "diffusion_gemma":
        raise ValueError(
            f"{folder} must hold a diffusion_gemma checkpoint, got "
            f"{raw.get('model_type')!r}; generate.py continues other models"
        )
    canvas_length = Settings(raw).count("canvas_length")
    config = pretrained.parse_config(read_text_settings(raw))
    # Canvases use bidirectional attention in all layers.
    config = dataclasses.replace(config, span_layers=())
    decoder = pretrained.read_params(folder, config, dtype)
    first = jax.tree.leaves(decoder)[0].dtype
    paths = find_tensors(Path(folder))

    def read(name: str) -> jax.Array:
        """Read a tensor that Gemma 4 does not have."""
        if f"model.{name}" not in paths:
            raise ValueError(f"tensor model.{name} is missing in {folder}")
        with safe_open(paths[f"model.{name}"], "flax") as file:
            return file.get_tensor(f"model.{name}").astype(first)

    layers = []
    for number, layer in enumerate(decoder["layers"]):
        scale = read(f"encoder.language_model.layers.{number}.layer_scalar")
        layers.append(layer | {"layer_scale": scale[None]})
    parts = {"norm": "pre_norm", "gate": "gate_proj", "up": "up_proj"}
    parts["down"] = "down_proj"
    return Denoiser(
        model=pretrained.Decoder(config),
        encoder=decoder | {"layers": layers},
        decoder=decoder,
        conditioning={
            name: read(f"decoder.self_conditioning.{part}.weight")
            for name, part in parts.items()
        },
        canvas_length=canvas_length,
    )


def read_text_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the text settings in Gemma 4's form.

    Raises:
        ValueError: for a missing or invalid setting.
    """
    settings = Settings(raw)
    own = Settings(settings.part("text_config"))
    kinds = own.names("layer_types") or []
    if "full_attention" not in kinds:
        raise ValueError(
            f"config.json: layer_types must name a full_attention layer, got {kinds}"
        )
    # Full-attention layers have other heads, given as overrides per layer.
    first = str(kinds.index("full_attention"))
    full = Settings(Settings(own.part("per_layer_config", {})).part(first, {}))
    heads = dict(
        global_head_dim=full.count("head_dim", own.get("head_dim")),
        num_global_key_value_heads=full.count(
            "num_key_value_heads", own.get("num_key_value_heads")
        ),
        tie_word_embeddings=settings.flag("tie_word_embeddings"),
    )
    text = {key: value for key, value in own.raw.items() if key != "per_layer_config"}
    return text | AS_GEMMA4 | heads
