"""Model types: defaults of transformers and kinds of layers, in `FAMILIES`.

A config.json omits fields with transformers' default values, and often the kind of each
layer: transformers writes `layer_types`, while older files, and files of the models'
authors, imply it by the model type.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

from jkv.config import state_readings as states
from jkv.config.layers import LayerState

Model: TypeAlias = Mapping[str, Any]  # settings of a language model in config.json
# Returns the kind of each layer, or None if unknown.
Namer: TypeAlias = Callable[[Model, range], list[str] | None]

# Kinds of layers, with the names of `layer_types`.
FULL, WINDOWED = "full_attention", "sliding_attention"
# Recurrent-state layers without and with attention.
STATE, BOTH = "linear_attention", "attention_and_state"
BOTH_WINDOWED = "windowed_attention_and_state"

# Keys of a nested language model, as used by the models' authors.
PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


def full_first_of(step: int) -> Namer:
    """Return a namer for full attention in the first of every `step` layers."""
    return lambda _, layers: _mark(layers, layers[::step])


def all_windowed(_: Model, layers: range) -> list[str]:
    """Name all layers as windowed."""
    return _mark(layers, ())


def all_full(_: Model, layers: range) -> list[str]:
    """Name all layers as without a window."""
    return _mark(layers, layers)


def late_windowed(model: Model, layers: range) -> list[str]:
    """Name the layers from `max_window_layers` on as windowed."""
    return _mark(layers, layers[: model.get("max_window_layers") or 0])


def early_windowed(model: Model, layers: range) -> list[str]:
    """Name every other layer before `max_window_layers` as windowed."""
    last = model.get("max_window_layers") or 0
    return _mark(layers, {*layers} - {*layers[:last:2]})


def turned_windowed(is_turned: bool) -> Namer:
    """Return a namer for windows in layers with, or without, rotary embeddings."""

    def name(model: Model, layers: range) -> list[str]:
        every = model.get("no_rope_layer_interval") or 4
        turned = model.get("no_rope_layers") or [(i + 1) % every for i in layers]
        return [WINDOWED if bool(each) is is_turned else FULL for each in turned]

    return name


def attending_every(step: int) -> Namer:
    """Return a namer for attention in every `step`-th layer and states elsewhere."""

    def name(model: Model, layers: range) -> list[str]:
        every = model.get("full_attention_interval") or step
        return _mark(layers, layers[every - 1 :: every], STATE)

    return name


def all_states(_: Model, layers: range) -> list[str]:
    """Name all layers as recurrent-state layers."""
    return _mark(layers, (), STATE)


def all_both(_: Model, layers: range) -> list[str]:
    """Name all layers as having attention and a state."""
    return [BOTH for _ in layers]


def _bailing_hybrid(model: Model, layers: range) -> list[str]:
    step = model.get("layer_group_size") or 6
    return _mark(layers, layers[step - 1 :: step], STATE)


def _bamba(model: Model, layers: range) -> list[str]:
    return _mark(layers, model.get("attn_layer_indices") or (), STATE)


def _cohere2_moe(model: Model, layers: range) -> list[str]:
    # The first layers, without experts, count their windows by themselves.
    first = model.get("first_k_dense_replace") or 0
    patterns = (
        (layers[:first], model.get("prefix_dense_sliding_window_pattern") or 1),
        (layers[: len(layers) - first], model.get("sliding_window_pattern") or 4),
    )
    return [
        WINDOWED if (layer + 1) % every else FULL
        for part, every in patterns
        for layer in part
    ]


def _lfm3(_: Model, layers: range) -> list[str]:
    kinds = [WINDOWED, "conv", FULL, "conv"]
    return ["conv" if layer == 0 else kinds[layer % 4] for layer in layers]


def _muse_glimmer(_: Model, layers: range) -> list[str]:
    # Every fourth layer, counted from the last.
    return _mark(layers, layers[::-4])


def _jamba(model: Model, layers: range) -> list[str]:
    period = model.get("attn_layer_period") or 8
    return _mark(layers, layers[model.get("attn_layer_offset", 4) :: period], STATE)


def _kimi_linear(model: Model, layers: range) -> list[str]:
    named = (model.get("linear_attn_config") or {}).get("full_attn_layers")
    # `full_attn_layers` counts from one.
    attending = layers[4::4] if named is None else [layer - 1 for layer in named]
    return _mark(layers, attending, STATE)


def _nemotron_h(model: Model, _: range) -> list[str] | None:
    letters = {"M": "mamba", "*": FULL, "-": "mlp", "E": "moe"}
    pattern = model.get("hybrid_override_pattern")
    return [letters.get(each, each) for each in pattern] if pattern else None


def _mark(layers: range, full: Collection[int], other: str = WINDOWED) -> list[str]:
    return [FULL if layer in full else other for layer in layers]


class Sizes(NamedTuple):
    """Sizes of a language model nested in a multimodal one."""

    layers: int
    heads: int
    kv_heads: int
    hidden: int
    context: int

    @property
    def settings(self) -> dict[str, int]:
        """The sizes by their names in config.json."""
        return {
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "hidden_size": self.hidden,
            "max_position_embeddings": self.context,
        }


class Family(NamedTuple):
    """Defaults of a model type, and the kinds of its layers."""

    # Defaults of transformers, also for models that are not nested.
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    more: Mapping[str, Any] = {}
    sizes: Sizes | None = None  # further defaults in a multimodal model
    # Names the kind of each layer. Without it, every `full_every`-th layer has full
    # attention, unless config.json has another number.
    kinds: Namer | None = None
    state: Callable[[Model], LayerState] | None = None  # of recurrent-state layers
    # The kinds of layers, by names of the model type's own in `layer_types`.
    own_kinds: Mapping[str, str] = {}
    full_every: int | None = None
    first_is_full: bool = False  # the first (last) layer has full attention, too
    last_is_full: bool = False
    # Head dim of layers with full attention, which may have kv heads of their own in
    # config.json: only if the key `gate` is set, where there is a gate.
    global_head_dim: int | None = None
    gate: str | None = None
    window_heads: int = 1  # factor on the kv heads of windowed layers
    # `sliding_window_size` excludes the token itself.
    counts_past: bool = False

    @property
    def usual(self) -> dict[str, Any]:
        """The defaults, under their names in config.json."""
        named = {
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "sliding_window": self.window,
        }
        known = {name: value for name, value in named.items() if value is not None}
        return known | {**self.more}


# Multi-head latent attention (MLA).
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
# Windows that are off by default, and the first layer that would have one.
OFF = {"use_sliding_window": False}
OFF_AND_LATE = OFF | {"max_window_layers": 28}

# Keys are model types of transformers; tests compare with the installed version.
FAMILIES: dict[str, Family] = {
    "afmoe": Family(full_every=4),
    "bailing_hybrid": Family(
        kv_heads=32,
        more=LATENT,
        kinds=_bailing_hybrid,
        state=states.read_ling3,
    ),
    "bamba": Family(kv_heads=8, kinds=_bamba, state=states.read_bamba),
    "cohere2": Family(
        window=4096,
        sizes=Sizes(layers=40, heads=64, kv_heads=64, hidden=8192, context=8192),
        full_every=4,
    ),
    "cohere2_moe": Family(head_dim=128, window=4096, kinds=_cohere2_moe),
    "cwm": Family(kinds=full_first_of(4)),
    "deepseek_v2": Family(
        more=LATENT,
        sizes=Sizes(layers=32, heads=32, kv_heads=32, hidden=4096, context=2048),
    ),
    "deepseek_v3": Family(
        more=LATENT,
        sizes=Sizes(layers=61, heads=128, kv_heads=128, hidden=7168, context=4096),
    ),
    "ernie4_5": Family(kv_heads=2, head_dim=128),
    "ernie4_5_moe": Family(kv_heads=4),
    "exaone4": Family(
        kv_heads=32,
        window=4096,
        sizes=Sizes(layers=32, heads=32, kv_heads=32, hidden=4096, context=2048),
        full_every=4,
    ),
    "falcon_h1": Family(kv_heads=8, kinds=all_both, state=states.read_falcon_h1),
    "falcon_mamba": Family(kinds=all_states, state=states.read_plain_mamba1),
    "gemma": Family(
        head_dim=256,
        sizes=Sizes(layers=28, heads=16, kv_heads=16, hidden=3072, context=8192),
    ),
    "gemma2": Family(
        kv_heads=4,
        head_dim=256,
        window=4096,
        sizes=Sizes(layers=26, heads=8, kv_heads=4, hidden=2304, context=8192),
        full_every=2,
    ),
    "gemma3_text": Family(
        kv_heads=4,
        head_dim=256,
        window=4096,
        sizes=Sizes(layers=26, heads=8, kv_heads=4, hidden=2304, context=131_072),
        full_every=6,
    ),
    "gemma3n_text": Family(kv_heads=2, head_dim=256, window=512, full_every=5),
    "gemma4_text": Family(
        kv_heads=4,
        head_dim=256,
        window=512,
        sizes=Sizes(layers=30, heads=8, kv_heads=4, hidden=2304, context=131_072),
        full_every=6,
        last_is_full=True,
        global_head_dim=512,
        gate="attention_k_eq_v",
    ),
    "gemma4_unified_text": Family(
        kv_heads=4,
        head_dim=256,
        window=1024,
        full_every=6,
        last_is_full=True,
        global_head_dim=512,
    ),
    "glm": Family(kv_heads=2, head_dim=128),
    "glm4": Family(kv_heads=2, head_dim=128),
    "glm4_moe": Family(kv_heads=8),
    "glm4_moe_lite": Family(more=LATENT),
    "gpt_oss": Family(
        kv_heads=8,
        head_dim=64,
        window=128,
        sizes=Sizes(layers=36, heads=64, kv_heads=8, hidden=2880, context=131_072),
        full_every=2,
    ),
    "granite": Family(
        sizes=Sizes(layers=32, heads=32, kv_heads=32, hidden=4096, context=2048)
    ),
    "granite_swa": Family(kinds=full_first_of(4)),
    "granitemoe_swa": Family(kinds=full_first_of(4)),
    "granitemoehybrid": Family(kinds=all_states, state=states.read_bamba),
    "jamba": Family(kv_heads=8, kinds=_jamba, state=states.read_jamba),
    "kimi_linear": Family(more=LATENT, kinds=_kimi_linear, state=states.read_kimi),
    "laguna": Family(kv_heads=8, head_dim=128, window=512, kinds=all_full),
    "lfm2": Family(kv_heads=8, state=states.read_lfm2),
    "lfm2_moe": Family(kv_heads=8, state=states.read_lfm2),
    "lfm3": Family(
        kv_heads=4, head_dim=128, window=256, kinds=_lfm3, state=states.read_lfm3
    ),
    "llama": Family(
        sizes=Sizes(layers=32, heads=32, kv_heads=32, hidden=4096, context=2048)
    ),
    "llama4_text": Family(
        sizes=Sizes(layers=48, heads=40, kv_heads=8, hidden=5120, context=131_072),
        kinds=turned_windowed(True),
    ),
    "mamba": Family(kinds=all_states, state=states.read_plain_mamba1),
    "mamba2": Family(kinds=all_states, state=states.read_plain_mamba2),
    "mellum": Family(kv_heads=4, head_dim=128, window=1024, kinds=all_full),
    "mimo_v2_flash": Family(
        kv_heads=4,
        head_dim=192,
        more={"v_head_dim": 128},
        full_every=6,
        first_is_full=True,
        window_heads=2,
        counts_past=True,
    ),
    "minimax_m2": Family(kv_heads=8, head_dim=128),
    "ministral3": Family(
        kv_heads=8,
        head_dim=128,
        sizes=Sizes(layers=34, heads=32, kv_heads=8, hidden=4096, context=262_144),
        kinds=all_windowed,
    ),
    "mistral": Family(
        kv_heads=8,
        window=4096,
        sizes=Sizes(layers=32, heads=32, kv_heads=8, hidden=4096, context=131_072),
        kinds=all_windowed,
    ),
    "mistral4": Family(
        more={"kv_lora_rank": 256, "qk_rope_head_dim": 64},
        sizes=Sizes(layers=36, heads=32, kv_heads=32, hidden=4096, context=1_048_576),
    ),
    "mixtral": Family(
        kv_heads=8,
        sizes=Sizes(layers=32, heads=32, kv_heads=8, hidden=4096, context=131_072),
        kinds=all_windowed,
    ),
    "muse_glimmer_text": Family(
        kv_heads=2,
        head_dim=128,
        window=2048,
        sizes=Sizes(layers=52, heads=32, kv_heads=2, hidden=6656, context=131_072),
        kinds=_muse_glimmer,
    ),
    "nemotron_h": Family(
        kv_heads=8, head_dim=128, kinds=_nemotron_h, state=states.read_nemotron_h
    ),
    "olmo2": Family(
        sizes=Sizes(layers=32, heads=32, kv_heads=32, hidden=4096, context=2048)
    ),
    "olmo3": Family(window=4096, full_every=4),
    "olmo_hybrid": Family(kinds=attending_every(4), state=states.read_olmo_hybrid),
    "phi": Family(
        sizes=Sizes(layers=24, heads=32, kv_heads=32, hidden=2048, context=2048)
    ),
    "phi3": Family(
        sizes=Sizes(layers=32, heads=32, kv_heads=32, hidden=3072, context=4096),
        kinds=all_windowed,
    ),
    "phimoe": Family(kv_heads=8, kinds=all_windowed),
    "qwen2": Family(
        window=4096,
        more=OFF_AND_LATE,
        sizes=Sizes(layers=32, heads=32, kv_heads=32, hidden=4096, context=32_768),
        kinds=late_windowed,
    ),
    "qwen2_5_vl_text": Family(
        more=OFF,
        sizes=Sizes(layers=80, heads=64, kv_heads=8, hidden=8192, context=32_768),
    ),
    "qwen2_moe": Family(
        kv_heads=16, window=4096, more=OFF_AND_LATE, kinds=early_windowed
    ),
    "qwen2_vl_text": Family(
        more=OFF,
        sizes=Sizes(layers=80, heads=64, kv_heads=8, hidden=8192, context=32_768),
    ),
    "qwen3": Family(
        head_dim=128,
        window=4096,
        more=OFF_AND_LATE,
        sizes=Sizes(layers=32, heads=32, kv_heads=32, hidden=4096, context=32_768),
        kinds=late_windowed,
    ),
    "qwen3_5_moe_text": Family(
        kv_heads=2, head_dim=256, kinds=attending_every(4), state=states.read_qwen3_next
    ),
    "qwen3_5_text": Family(
        kv_heads=4, head_dim=256, kinds=attending_every(4), state=states.read_qwen3_next
    ),
    "qwen3_moe": Family(
        kv_heads=4,
        window=4096,
        more=OFF,
        sizes=Sizes(layers=24, heads=32, kv_heads=4, hidden=2048, context=32_768),
        kinds=all_windowed,
    ),
    "qwen3_next": Family(
        kv_heads=2, head_dim=256, kinds=attending_every(4), state=states.read_qwen3_next
    ),
    "qwen3_vl_text": Family(
        sizes=Sizes(layers=32, heads=32, kv_heads=32, hidden=4096, context=128_000)
    ),
    "seed_oss": Family(kv_heads=8, head_dim=128),
    "smollm3": Family(
        kv_heads=4,
        more=OFF,
        sizes=Sizes(layers=36, heads=16, kv_heads=4, hidden=2048, context=32_768),
        kinds=turned_windowed(False),
    ),
    "vaultgemma": Family(full_every=2),
    "zaya": Family(
        kv_heads=2,
        head_dim=128,
        kinds=all_both,
        state=states.read_zaya,
        own_kinds={"hybrid": BOTH, "hybrid_sliding": BOTH_WINDOWED},
    ),
}


def find_family(model: Model) -> Family:
    """Return the entry of a model's type, empty for unknown types."""
    return FAMILIES.get(str(model.get("model_type")), Family())


class TextPart(NamedTuple):
    """The settings of a language model and of the models around it."""

    model: dict[str, Any]
    around: list[dict[str, Any]]  # enclosing settings, innermost first
    notes: list[str]


def find_text_part(raw: dict[str, Any]) -> TextPart:
    """Return the settings of the (possibly nested) language model."""
    model, name = raw, ""
    around: list[dict[str, Any]] = []
    while inner := next((p for p in PARTS if isinstance(model.get(p), dict)), None):
        around.insert(0, model)
        model, name = model[inner], inner
    if not around:
        return TextPart(model, around, [])
    sizes = find_family(model).sizes
    defaults = {} if sizes is None else sizes.settings
    # Without a default of their own, kv heads equal the query heads.
    has_heads = "num_attention_heads" in model
    filled = {
        size: value
        for size, value in defaults.items()
        if size not in model and not (has_heads and size == "num_key_value_heads")
    }
    notes = [f"the cache is that of the language model, {name} in config.json"]
    if filled:
        settings = ", ".join(f"{size} {value}" for size, value in filled.items())
        notes.append(f"{name} leaves out {settings}: taken from transformers")
    return TextPart(filled | model, around, notes)
