"""What is known of model types beside their config.json, a row for each: `FAMILIES`.

A file leaves out what transformers' classes assume, and often which of a model's layers
have a window or a state: transformers writes `layer_types`, older files and those of
the models' authors leave it to the model type.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

from jkv.config import state_readings as states
from jkv.config.layers import LayerState

Model: TypeAlias = Mapping[str, Any]  # a language model's settings, of a config.json
# Names the kind of each layer; returns None where nothing tells.
Namer: TypeAlias = Callable[[Model, range], list[str] | None]

# Kinds of layers, as `layer_types` has them.
FULL, WINDOWED = "full_attention", "sliding_attention"
# One with a state instead of keys and values, and one with both.
STATE, BOTH = "linear_attention", "attention_and_state"

# Where the language model's settings lie, as the models' authors name it.
PARTS = ("text_config", "llm_config", "language_config", "thinker_config")

SIZES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("hidden_size", "max_position_embeddings"),
)


def full_first_of(step: int) -> Namer:
    """The first of every so many layers sees everything, the others a window."""
    return lambda _, layers: _mark(layers, layers[::step])


def all_windowed(_: Model, layers: range) -> list[str]:
    """All layers have the window that config.json speaks of."""
    return _mark(layers, ())


def late_windowed(model: Model, layers: range) -> list[str]:
    """Layers have the window from `max_window_layers` on."""
    return _mark(layers, layers[: model.get("max_window_layers") or 0])


def early_windowed(model: Model, layers: range) -> list[str]:
    """Every other layer before `max_window_layers` has the window."""
    last = model.get("max_window_layers") or 0
    return _mark(layers, {*layers} - {*layers[:last:2]})


def turned_windowed(is_turned: bool) -> Namer:
    """Those layers have the window whose keys positions turn, or do not turn."""

    def name(model: Model, layers: range) -> list[str]:
        every = model.get("no_rope_layer_interval") or 4
        turned = model.get("no_rope_layers") or [(i + 1) % every for i in layers]
        return [WINDOWED if bool(each) is is_turned else FULL for each in turned]

    return name


def attending_every(step: int) -> Namer:
    """Every so many-th layer attends, the others have a state."""

    def name(model: Model, layers: range) -> list[str]:
        every = model.get("full_attention_interval") or step
        return _mark(layers, layers[every - 1 :: every], STATE)

    return name


def all_states(_: Model, layers: range) -> list[str]:
    """All layers have a state, unless something else is said."""
    return _mark(layers, (), STATE)


def _falcon_h1(_: Model, layers: range) -> list[str]:
    return [BOTH for _ in layers]


def _bamba(model: Model, layers: range) -> list[str]:
    return _mark(layers, model.get("attn_layer_indices") or (), STATE)


def _jamba(model: Model, layers: range) -> list[str]:
    period = model.get("attn_layer_period") or 8
    return _mark(layers, layers[model.get("attn_layer_offset", 4) :: period], STATE)


def _kimi_linear(model: Model, layers: range) -> list[str]:
    named = (model.get("linear_attn_config") or {}).get("full_attn_layers")
    # Counted from one.
    attending = layers[4::4] if named is None else [layer - 1 for layer in named]
    return _mark(layers, attending, STATE)


def _nemotron_h(model: Model, _: range) -> list[str] | None:
    letters = {"M": "mamba", "*": FULL, "-": "mlp", "E": "moe"}
    pattern = model.get("hybrid_override_pattern")
    return [letters.get(each, each) for each in pattern] if pattern else None


def _mark(layers: range, full: Collection[int], other: str = WINDOWED) -> list[str]:
    return [FULL if layer in full else other for layer in layers]


class Family(NamedTuple):
    """What is known of a model type."""

    # What transformers assumes of keys that are left out, of a plain model as well.
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    more: Mapping[str, Any] = {}
    # And what of `SIZES`, in a part of a model that also sees or hears.
    sizes: tuple[int, ...] = ()
    # Names the kind of each layer. Where there is nothing that does, every so many-th
    # layer sees everything, unless the file says how many-th.
    kinds: Namer | None = None
    state: Callable[[Model], LayerState] | None = None  # of layers that have one
    full_every: int | None = None
    first_is_full: bool = False  # the first, or the last, sees everything besides
    last_is_full: bool = False
    # The head dim of layers without a window, whose kv heads config.json may say; where
    # there is a gate, only if that key is set.
    global_head_dim: int | None = None
    gate: str | None = None
    window_heads: int = 1  # how many times the kv heads layers with a window have
    # `sliding_window_size` counts the tokens before the token itself.
    counts_past: bool = False

    @property
    def usual(self) -> dict[str, Any]:
        """The settings that are assumed, by the names in config.json."""
        names = "num_key_value_heads", "head_dim", "sliding_window"
        named = zip(names, self[:3], strict=True)
        return {key: value for key, value in named if value is not None} | {**self.more}


# Models with one latent vector a token.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
# Windows that are off, and the first of the layers that would have them.
OFF = {"use_sliding_window": False}
OFF_AND_LATE = OFF | {"max_window_layers": 28}
THIRTY_TWO, QWEN = (32, 32, 32, 4096, 2048), (32, 32, 32, 4096, 32_768)
QWEN3_NEXT: dict[str, Any] = dict(
    kinds=attending_every(4), state=states.read_qwen3_next
)

# By what transformers' classes leave out, which tests compare with those installed: kv
# heads, head dim, window, other settings, sizes; then the kinds of layers, the state.
FAMILIES: dict[str, Family] = {
    "afmoe": Family(full_every=4),
    "bamba": Family(8, kinds=_bamba, state=states.read_bamba),
    "cohere2": Family(None, None, 4096, {}, (40, 64, 64, 8192, 8192), full_every=4),
    "cwm": Family(kinds=full_first_of(4)),
    "deepseek_v2": Family(more=LATENT, sizes=THIRTY_TWO),
    "deepseek_v3": Family(more=LATENT, sizes=(61, 128, 128, 7168, 4096)),
    "ernie4_5": Family(2, 128),
    "ernie4_5_moe": Family(4),
    "exaone4": Family(32, None, 4096, {}, THIRTY_TWO, full_every=4),
    "falcon_h1": Family(8, kinds=_falcon_h1, state=states.read_falcon_h1),
    "falcon_mamba": Family(kinds=all_states, state=states.read_plain_mamba1),
    "gemma": Family(None, 256, sizes=(28, 16, 16, 3072, 8192)),
    "gemma2": Family(4, 256, 4096, {}, (26, 8, 4, 2304, 8192), full_every=2),
    "gemma3_text": Family(4, 256, 4096, {}, (26, 8, 4, 2304, 131_072), full_every=6),
    "gemma3n_text": Family(2, 256, 512, full_every=5),
    "gemma4_text": Family(
        *(4, 256, 512, {}, (30, 8, 4, 2304, 131_072)),
        full_every=6,
        last_is_full=True,
        global_head_dim=512,
        gate="attention_k_eq_v",
    ),
    "gemma4_unified_text": Family(
        4, 256, 1024, full_every=6, last_is_full=True, global_head_dim=512
    ),
    "glm": Family(2, 128),
    "glm4": Family(2, 128),
    "glm4_moe": Family(8),
    "glm4_moe_lite": Family(more=LATENT),
    "gpt_oss": Family(8, 64, 128, {}, (36, 64, 8, 2880, 131_072), full_every=2),
    "granite": Family(sizes=THIRTY_TWO),
    "granite_swa": Family(kinds=full_first_of(4)),
    "granitemoe_swa": Family(kinds=full_first_of(4)),
    "granitemoehybrid": Family(kinds=all_states, state=states.read_bamba),
    "jamba": Family(8, kinds=_jamba, state=states.read_jamba),
    "kimi_linear": Family(None, None, None, LATENT, (), _kimi_linear, states.read_kimi),
    "lfm2": Family(8, state=states.read_lfm2),
    "lfm2_moe": Family(8, state=states.read_lfm2),
    "llama": Family(sizes=THIRTY_TWO),
    "llama4_text": Family(
        sizes=(48, 40, 8, 5120, 131_072), kinds=turned_windowed(True)
    ),
    "mamba": Family(kinds=all_states, state=states.read_plain_mamba1),
    "mamba2": Family(kinds=all_states, state=states.read_plain_mamba2),
    "mimo_v2_flash": Family(
        *(4, 192, None, {"v_head_dim": 128}),
        full_every=6,
        first_is_full=True,
        window_heads=2,
        counts_past=True,
    ),
    "minimax_m2": Family(8, 128),
    "ministral3": Family(8, 128, None, {}, (34, 32, 8, 4096, 262_144), all_windowed),
    "mistral": Family(8, None, 4096, {}, (32, 32, 8, 4096, 131_072), all_windowed),
    "mistral4": Family(
        more={"kv_lora_rank": 256, "qk_rope_head_dim": 64},
        sizes=(36, 32, 32, 4096, 1_048_576),
    ),
    "mixtral": Family(8, sizes=(32, 32, 8, 4096, 131_072), kinds=all_windowed),
    "nemotron_h": Family(8, 128, kinds=_nemotron_h, state=states.read_nemotron_h),
    "olmo2": Family(sizes=THIRTY_TWO),
    "olmo3": Family(window=4096, full_every=4),
    "olmo_hybrid": Family(kinds=attending_every(4), state=states.read_olmo_hybrid),
    "phi": Family(sizes=(24, 32, 32, 2048, 2048)),
    "phi3": Family(sizes=(32, 32, 32, 3072, 4096), kinds=all_windowed),
    "phimoe": Family(8, kinds=all_windowed),
    "qwen2": Family(None, None, 4096, OFF_AND_LATE, QWEN, late_windowed),
    "qwen2_5_vl_text": Family(more=OFF, sizes=(80, 64, 8, 8192, 32_768)),
    "qwen2_moe": Family(16, None, 4096, OFF_AND_LATE, kinds=early_windowed),
    "qwen2_vl_text": Family(more=OFF, sizes=(80, 64, 8, 8192, 32_768)),
    "qwen3": Family(None, 128, 4096, OFF_AND_LATE, QWEN, late_windowed),
    "qwen3_5_moe_text": Family(2, 256, **QWEN3_NEXT),
    "qwen3_5_text": Family(4, 256, **QWEN3_NEXT),
    "qwen3_moe": Family(4, None, 4096, OFF, (24, 32, 4, 2048, 32_768), all_windowed),
    "qwen3_next": Family(2, 256, **QWEN3_NEXT),
    "qwen3_vl_text": Family(sizes=(32, 32, 32, 4096, 128_000)),
    "seed_oss": Family(8, 128),
    "smollm3": Family(
        4, more=OFF, sizes=(36, 16, 4, 2048, 32_768), kinds=turned_windowed(False)
    ),
    "vaultgemma": Family(full_every=2),
}


def find_family(model: Model) -> Family:
    """Return what is known of a model's type, which may be nothing."""
    return FAMILIES.get(str(model.get("model_type")), Family())


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
    defaults = find_family(model).sizes
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
