"""What each layer of a model keeps: keys and values, of a window, or a state."""

from collections.abc import Sequence
from typing import Any

from jkv.config.families import BOTH, FAMILIES, FULL, STATE, WINDOWED, find_family
from jkv.config.layer_states import LayerState

# Kinds of layers, as `layer_types` and its forerunners name them: those that keep keys
# only so far back, those that keep some, and those with a state.
WITH_WINDOW = {WINDOWED, "chunked_attention"}
ATTENDING = {FULL, *WITH_WINDOW, "attention", BOTH}
WITH_STATE = {STATE, "mamba", "mamba2", "conv", "recurrent", BOTH}
KNOWN = ATTENDING | WITH_STATE | {"mlp", "moe"}  # the last of perceptrons or experts


def name_layers(model: dict[str, Any], num_layers: int) -> list[str] | None:
    """Return the kind of each layer as `layer_types` has it, None if nothing tells."""
    family, layers = find_family(model), range(num_layers)
    kinds = model.get("layer_types") or model.get("layers_block_type")
    if isinstance(attending := model.get("full_attn_idxs"), list) and not kinds:
        kinds = [FULL if layer in attending else "conv" for layer in layers]
    elif isinstance(types := model.get("attn_type_list"), list) and not kinds:
        # MiniMax: 1 attends, 0 is lightning attention.
        kinds = [FULL if attends == 1 else STATE for attends in types]
    elif isinstance(pattern := model.get("hybrid_layer_pattern"), list) and not kinds:
        kinds = [WINDOWED if has_window else FULL for has_window in pattern]
    elif not isinstance(kinds, list):
        kinds = family.kinds(model, layers)
    return [*kinds[:-1], FULL] if kinds and family.last_is_full else kinds


def list_windows(
    model: dict[str, Any],  # the language model's settings, from a config.json
    # of all layers of the model, as `name_layers` returns them
    kinds: Sequence[str] | None,
    num_layers: int,  # layers that keep keys and values, the first of the model's
) -> tuple[int | None, ...]:
    """Return the window of each layer that keeps keys and values; None: all tokens."""
    length = model.get("sliding_window") or model.get("attention_chunk_size")
    if find_family(model).counts_past and model.get("sliding_window_size"):
        length = model["sliding_window_size"] + 1
    is_length = isinstance(length, int) and length > 0  # -1 is off
    if not is_length or not model.get("use_sliding_window", True):
        return (None,) * num_layers
    if kinds is None:
        first = model.get("max_window_layers") or 0
        windowed = [layer >= first for layer in range(num_layers)]
    else:
        kept = (kind for kind in kinds if kind in ATTENDING - {BOTH})
        windowed = [kind in WITH_WINDOW for kind in kept]
        windowed += [False] * (num_layers - len(windowed))
    return tuple(length if each else None for each in windowed[:num_layers])


def list_states(
    model: dict[str, Any],  # likewise
    kinds: Sequence[str] | None,
) -> tuple[LayerState | None, ...]:
    """Return what each layer of a model keeps, None where it has no state."""
    if kinds is None or WITH_STATE.isdisjoint(kinds):
        return (None,) * len(kinds or ())
    read = find_family(model).state
    if read is None:
        known = sorted(name for name, family in FAMILIES.items() if family.state)
        raise ValueError(
            f"layers of model type {str(model.get('model_type'))!r} have a state, and "
            f"jkv does not know its arrays; known are {', '.join(known)}. Give "
            f"num_layers for the layers with keys and values alone"
        )
    state = read(model)
    return tuple(state if kind in WITH_STATE else None for kind in kinds)
