"""What kind each layer of a model is, where a config.json does not list it.

transformers writes `layer_types`. Older files, and those of the models' authors, name
the layers by keys of their own, or leave it to the model type.
"""

from collections.abc import Collection, Mapping
from typing import Any

FULL, WINDOWED = "full_attention", "sliding_attention"

# A layer with a state instead of keys and values, and one with both.
STATE, BOTH = "linear_attention", "attention_and_state"

# Kinds of layers, as `layer_types` and its forerunners name them.
ATTENDING = {FULL, WINDOWED, "chunked_attention", "attention", BOTH}

WITH_STATE = {STATE, "mamba", "mamba2", "conv", "recurrent", BOTH}

# Those of perceptrons or experts alone.
FEEDING = {"mlp", "moe"}

# Every how many-th layer sees everything, the others a window, where the model type
# alone says it: counted from the first layer of the model, or so that the first does.
FULL_EVERY = {
    **dict.fromkeys(("gemma2", "gpt_oss", "vaultgemma"), 2),
    **dict.fromkeys(("afmoe", "cohere2", "exaone4", "olmo3"), 4),
    "gemma3n_text": 5,
    **dict.fromkeys(("gemma3_text", "gemma4_text", "gemma4_unified_text"), 6),
    "mimo_v2_flash": 6,
}

FULL_FIRST_OF = {"cwm": 4, "granite_swa": 4, "granitemoe_swa": 4}

# Models whose first, or last, layer sees everything besides.
FIRST_IS_FULL = {"mimo_v2_flash"}

LAST_IS_FULL = {"gemma4_text", "gemma4_unified_text"}

# Every how many-th layer attends, the others have a state.
ATTENDING_EVERY = {
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"), 4),
    "qwen3_next": 4,
}

# Models all of whose layers have a state, unless something else is said.
ALL_WITH_STATE = {"falcon_mamba", "granitemoehybrid", "mamba", "mamba2"}

# The letters of Nemotron-H's layers.
LETTERS = {"M": "mamba", "*": FULL, "-": "mlp", "E": "moe"}

# Models whose layers all have the window that config.json speaks of.
ALL_HAVE_WINDOW = {"ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe"}

# Models whose layers have the window from `max_window_layers` on, and those of which
# every other one before it has.
LATE_HAVE_WINDOW = {"qwen2", "qwen3"}

EARLY_HAVE_WINDOW = {"qwen2_moe"}

# Models in which positions turn the keys of some layers: whether those have the window.
TURNED_HAVE_WINDOW = {"llama4_text": True, "smollm3": False}


def name_layers(model: dict[str, Any], num_layers: int) -> list[str] | None:
    """Return the kind of each layer as `layer_types` has it, None if nothing tells."""
    model_type = str(model.get("model_type"))
    layers = range(num_layers)
    kinds = model.get("layer_types") or model.get("layers_block_type")
    if isinstance(kinds, list):
        return _end_full(model_type, kinds)
    if (with_state := _name_with_state(model_type, model, layers)) is not None:
        return with_state
    if isinstance(attending := model.get("full_attn_idxs"), list):
        return [FULL if layer in attending else "conv" for layer in layers]
    if isinstance(types := model.get("attn_type_list"), list):
        # MiniMax: 1 attends, 0 is lightning attention.
        return [FULL if attends == 1 else STATE for attends in types]
    if model_type in ALL_HAVE_WINDOW:
        return [WINDOWED for _ in layers]
    if model_type in LATE_HAVE_WINDOW:
        first = model.get("max_window_layers") or 0
        return [WINDOWED if layer >= first else FULL for layer in layers]
    if model_type in EARLY_HAVE_WINDOW:
        last = model.get("max_window_layers") or 0
        return [WINDOWED if i % 2 == 0 and i < last else FULL for i in layers]
    if isinstance(pattern := model.get("hybrid_layer_pattern"), list):
        return [WINDOWED if has_window else FULL for has_window in pattern]
    if model_type in TURNED_HAVE_WINDOW:
        which = TURNED_HAVE_WINDOW[model_type]
        turned = model.get("no_rope_layers") or [
            (layer + 1) % (model.get("no_rope_layer_interval") or 4) for layer in layers
        ]
        return [WINDOWED if bool(each) is which else FULL for each in turned]
    if model_type in FULL_FIRST_OF:
        step = FULL_FIRST_OF[model_type]
        return [WINDOWED if layer % step else FULL for layer in layers]
    every = (
        model.get("sliding_window_pattern")
        or model.get("global_attn_every_n_layers")
        or FULL_EVERY.get(model_type)
    )
    if not isinstance(every, int):
        return None
    kinds = [WINDOWED if (layer + 1) % every else FULL for layer in layers]
    if kinds and model_type in FIRST_IS_FULL:
        kinds[0] = FULL
    return _end_full(model_type, kinds)


def _name_with_state(
    model_type: str, model: Mapping[str, Any], layers: range
) -> list[str] | None:
    """Return the kinds of a model some of whose layers have a state."""
    if model_type == "falcon_h1":
        return [BOTH for _ in layers]
    if model_type == "nemotron_h":
        pattern = model.get("hybrid_override_pattern")
        return [LETTERS.get(each, each) for each in pattern] if pattern else None
    attending = _find_attending(model_type, model, layers)
    if attending is None:
        return None
    return [FULL if layer in attending else STATE for layer in layers]


def _find_attending(
    model_type: str, model: Mapping[str, Any], layers: range
) -> Collection[int] | None:
    """Return which layers attend, the others having a state; None if nothing tells."""
    if model_type in ALL_WITH_STATE:
        return ()
    if model_type == "bamba":
        return model.get("attn_layer_indices") or ()
    if model_type == "jamba":
        period = model.get("attn_layer_period") or 8
        return layers[model.get("attn_layer_offset", 4) :: period]
    if model_type == "kimi_linear":
        # Counted from one.
        named = (model.get("linear_attn_config") or {}).get("full_attn_layers")
        return layers[4::4] if named is None else [layer - 1 for layer in named]
    if model_type in ATTENDING_EVERY:
        every = model.get("full_attention_interval") or ATTENDING_EVERY[model_type]
        return layers[every - 1 :: every]
    return None


def _end_full(model_type: str, kinds: list[str]) -> list[str]:
    """Return the kinds with that of the last layer, where the model type decides it."""
    if kinds and model_type in LAST_IS_FULL:
        return [*kinds[:-1], FULL]
    return kinds
