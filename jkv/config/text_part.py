"""The part of a config.json that describes the language model.

Models that also see or hear keep it apart. What is written there is only what differs
from the class that reads it: a part that says "llama" and nothing else means the sizes
that transformers gives a Llama.
"""

from typing import Any, NamedTuple

# Where the language model's settings lie, as the models' authors name it.
PARTS = ("text_config", "llm_config", "language_config", "thinker_config")

SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "max_position_embeddings",
)

# In the order of SIZES; tests compare them with the installed transformers.
LEFT_OUT: dict[str, tuple[int, ...]] = {
    "cohere2": (40, 64, 64, 8192, 8192),
    "deepseek_v2": (32, 32, 32, 4096, 2048),
    "deepseek_v3": (61, 128, 128, 7168, 4096),
    "exaone4": (32, 32, 32, 4096, 2048),
    "gemma": (28, 16, 16, 3072, 8192),
    "gemma2": (26, 8, 4, 2304, 8192),
    "gemma3_text": (26, 8, 4, 2304, 131_072),
    "gemma4_text": (30, 8, 4, 2304, 131_072),
    "gpt_oss": (36, 64, 8, 2880, 131_072),
    "granite": (32, 32, 32, 4096, 2048),
    "llama": (32, 32, 32, 4096, 2048),
    "llama4_text": (48, 40, 8, 5120, 131_072),
    "ministral3": (34, 32, 8, 4096, 262_144),
    "mistral": (32, 32, 8, 4096, 131_072),
    "mistral4": (36, 32, 32, 4096, 1_048_576),
    "mixtral": (32, 32, 8, 4096, 131_072),
    "olmo2": (32, 32, 32, 4096, 2048),
    "phi": (24, 32, 32, 2048, 2048),
    "phi3": (32, 32, 32, 3072, 4096),
    "qwen2": (32, 32, 32, 4096, 32_768),
    "qwen2_5_vl_text": (80, 64, 8, 8192, 32_768),
    "qwen2_vl_text": (80, 64, 8, 8192, 32_768),
    "qwen3": (32, 32, 32, 4096, 32_768),
    "qwen3_moe": (24, 32, 4, 2048, 32_768),
    "qwen3_vl_text": (32, 32, 32, 4096, 128_000),
    "smollm3": (36, 16, 4, 2048, 32_768),
}

# Models with one latent vector a token, and those with eight kv heads.
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear")
EIGHT_KV_HEADS = (
    *("bamba", "falcon_h1", "glm4_moe", "jamba", "lfm2", "lfm2_moe", "mixtral"),
    "phimoe",
)

# Windows of layers from `max_window_layers` on, which are off.
LATE_WINDOW = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

# What transformers assumes when a config.json of this model type leaves a key out, of
# a plain model as well.
DEFAULTS: dict[str, dict[str, int]] = {
    **dict.fromkeys(LATENT, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    **dict.fromkeys(EIGHT_KV_HEADS, {"num_key_value_heads": 8}),
    "cohere2": {"sliding_window": 4096},
    "ernie4_5": {"head_dim": 128, "num_key_value_heads": 2},
    "ernie4_5_moe": {"num_key_value_heads": 4},
    "exaone4": {"sliding_window": 4096, "num_key_value_heads": 32},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
    "gemma3_text": {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
    "gemma3n_text": {"sliding_window": 512, "head_dim": 256, "num_key_value_heads": 2},
    "gemma4_text": {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 512},
    "gemma4_unified_text": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
    },
    "glm": {"head_dim": 128, "num_key_value_heads": 2},
    "glm4": {"head_dim": 128, "num_key_value_heads": 2},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    "mimo_v2_flash": {"head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4},
    "minimax_m2": {"head_dim": 128, "num_key_value_heads": 8},
    "ministral3": {"head_dim": 128, "num_key_value_heads": 8},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mistral4": {"kv_lora_rank": 256, "qk_rope_head_dim": 64},
    "nemotron_h": {"head_dim": 128, "num_key_value_heads": 8},
    "olmo3": {"sliding_window": 4096},
    "qwen2": LATE_WINDOW,
    "qwen2_moe": LATE_WINDOW | {"num_key_value_heads": 16},
    "qwen3": LATE_WINDOW | {"head_dim": 128},
    "qwen3_5_moe_text": {"head_dim": 256, "num_key_value_heads": 2},
    "qwen3_5_text": {"head_dim": 256, "num_key_value_heads": 4},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    "qwen3_next": {"head_dim": 256, "num_key_value_heads": 2},
    "seed_oss": {"head_dim": 128, "num_key_value_heads": 8},
    "smollm3": {"num_key_value_heads": 4, "use_sliding_window": False},
}


class TextPart(NamedTuple):
    """The settings of a language model, and those of what it is a part of."""

    model: dict[str, Any]
    around: list[dict[str, Any]]  # the parts that hold it, innermost first
    notes: list[str]


def find_text_part(raw: dict[str, Any]) -> TextPart:
    """Return the language model's settings; of a plain model, all there are."""
    model, name = raw, ""
    around: list[dict[str, Any]] = []
    while inner := next((p for p in PARTS if isinstance(model.get(p), dict)), None):
        around.insert(0, model)
        model, name = model[inner], inner
    if not around:
        return TextPart(model, around, [])
    defaults = LEFT_OUT.get(str(model.get("model_type")), ())
    # Heads that are not named are as many as the queries', if those are.
    has_heads = "num_attention_heads" in model
    filled = {
        size: value
        for size, value in zip(SIZES, defaults, strict=False)
        if size not in model and not (has_heads and size == "num_key_value_heads")
    }
    notes = [f"the cache is that of the language model, {name} in config.json"]
    if filled:
        said = ", ".join(f"{size} {value}" for size, value in filled.items())
        notes.append(f"{name} leaves out {said}: taken from transformers")
    return TextPart(filled | model, around, notes)
