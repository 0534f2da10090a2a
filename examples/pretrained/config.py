"""The model's configuration, read from a checkpoint's config.json and validated.

``DecoderConfig`` is frozen and hashable and holds every static setting of the model, so
that jit can close over it. Settings that the forward pass does not support raise an
error by name, instead of producing fluent but wrong text later.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jkv.config import FAMILIES, Family, LayerState

from .architecture import Architecture
from .architectures import ARCHITECTURES
from .gguf_reading import find_folder
from .kept_by_layers import read_state, read_windows
from .parts import (
    Convolution,
    ConvolvedHeads,
    DeltaRule,
    Experts,
    Latent,
    LayerInputs,
    OutputGate,
    StateSpace,
)
from .quantized import Quantization, read_quantization
from .rope import Rope, fix_length
from .rope_settings import read_rope
from .settings import Settings, read_json, read_tokenizer_settings
from .text_part import TEXT_PARTS, find_text_part

ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh", "relu2")


# Known model types that are not supported, with the reason.
CHUNKED = (
    "its layers attend in chunks, so that a token sees those since the last multiple "
    "of attention_chunk_size: a window that differs by row, which jkv.attend has not"
)
DENOISES = "it denoises blocks of tokens: run examples/diffusion.py"
REFUSED = {"diffusion_gemma": DENOISES, "llama4": CHUNKED, "llama4_text": CHUNKED}

ATTENTION = "attention"
# Limits the lists that a damaged file makes us allocate.
MOST_LAYERS = 10_000


class Run(NamedTuple):
    """One layer, or adjacent layers with equal parameter shapes in one scan or loop."""

    start: int
    stop: int
    mixers: tuple[str, ...]  # token mixers: "attention", names in `MIXERS`
    feeds: Literal["perceptron", "experts"] | None  # MLP, MoE or neither

    @property
    def has_attention(self) -> bool:
        """True if attention is one of the token mixers."""
        return ATTENTION in self.mixers

    @property
    def state_mixers(self) -> tuple[str, ...]:
        """The mixers with a recurrent state, at most one."""
        return tuple(name for name in self.mixers if name != ATTENTION)


def _per_layer(**options: Any) -> Any:
    """Return a dataclass field with an entry per layer (`DecoderConfig.take_layer`)."""
    return dataclasses.field(metadata={"is_per_layer": True}, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a model. Fields "per layer" are tuples of `L` entries.

    Sizes:
    architecture: key of ``ARCHITECTURES``, the model type.
    vocab_size, hidden_size, intermediate_size: ints, `V`, `E` and the MLP's `F`.
    num_layers, num_heads, num_kv_heads, head_dim: ints, `L`, `H`, `K`, `D`.
    layer_heads: per layer, (`K`, `D`); empty: `num_kv_heads` and `head_dim` in all.
    query_heads: per layer, `H`; empty: `num_heads` in all.
    inner_sizes: per layer, `F`; empty: `intermediate_size` in all.
    max_context_length: int, number of positions the model was trained for.

    Embeddings and logits:
    tied: the output projection is the embedding matrix.
    has_head_bias: bias of the output projection.
    has_embedding_norm: RMSNorm of embeddings, without weights.
    embedding_scale, logit_scale: floats, factors of embeddings and logits.
    logit_cap: float, tanh bound of the logits; None: no bound.
    layer_inputs: sizes of per-layer embeddings (Gemma 4); None: no such embeddings.

    Norms and residuals:
    norms: position of the norms of attention and MLP: "before", "after" or "both".
    state_norms: `norms` of layers with a recurrent state; None: the same.
    norm_epsilon: float, added to the mean square in RMSNorm.
    post_norm_epsilon: float, `norm_epsilon` of norms after a part; None: the same.
    norm_offset: float, added to the norms' weights.
    final_norm_offset: float, `norm_offset` of the final norm; None: the same.
    has_centred_norms, has_norm_bias: subtraction of the mean in norms; their biases.
    is_parallel: attention and MLP share one normed input and one residual sum.
    residual_scale: float, factor of the outputs of attention and MLP.
    has_residual_scales: learnt biases and scales, in float32, of embeddings and of both
        terms of each residual sum.
    has_layer_scales: learnt factor of each layer's output.

    Attention:
    ropes: per layer, RoPE settings; None: no rotary embedding.
    windows: per layer, int, sliding window in tokens, including the token itself;
        None: full attention.
    key_layers: per layer, index of the layer with its keys and values, its own or an
        earlier one; empty: its own in all. Layers with their own precede all others.
    span_layers: per layer, True if tokens of a prompt's span attend to each other;
        empty: True in all.
    values_of_keys: per layer, True if values use the key projection; empty: False.
    has_qkv_bias, has_output_bias: biases of the attention projections.
    qk_norm: RMSNorm of queries and keys: of each "head" with weights [D], of the
        "heads" with weights [heads, D], of "all" heads as one vector, of each head
        once it is rotated ("turned"), or of each without weights ("unit"); None: none.
    has_value_norm: RMSNorm of each value head, without weights.
    scale: float, factor of the scores; None: ``1 / sqrt(D)``.
    attention_scales: floats, factors of attention's input and output.
    query_growth: (float b, int n): queries at position p are multiplied by
        ``1 + b log(1 + p // n)``; None: by 1.
    soft_cap: float, tanh bound of the scores; None: no bound.
    has_sinks: attention sinks: each head has a learnt logit without a value.
    output_gate: gate of attention's output; None: no gate.
    latent: sizes of multi-head latent attention (MLA); None: keys and values per head.
    hides_first: no token attends to the first of a sequence, for draft layers
        (`jkv.drafters.hide_first`).

    MLP and experts:
    activation: one of ``ACTIVATIONS``.
    is_gated: MLPs and experts compute ``activation(gate(x)) * up(x)``.
    swiglu_limits: floats, for gpt-oss: slope of the sigmoid, bound of gate and up;
        None: plain gates.
    has_mlp_bias: biases of the MLP's projections.
    mlp_scales: floats, factors of the MLP's gate projection and its output.
    experts: sizes of MoE layers; None: no experts.
    expert_layers: per layer, True if it has experts; empty: False in all.

    Token mixers:
    mixers: per layer, its token mixers: "attention", a name in ``MIXERS``, both, or
        none; empty: attention in all.
    fed_layers: per layer, True if it has an MLP or experts; empty: True in all.
    delta_rule, state_space, convolution, convolved_heads: sizes of layers with these
        mixers; None: no such layer.
    state: recurrent state of a layer, in jkv's form; None: no layer has one.

    Programs and files:
    scan_layers: adjacent layers with equal shapes share a ``lax.scan``: deep models
        compile faster, and each step copies the weights.
    loop_layers: such layers share a loop that reads weights in place, for CPUs; its
        derivative is slow.
    num_guessing_layers: int, multi-token prediction (MTP) layers that a checkpoint may
        have after the last layer; `drafters` reads them.
    stop_tokens: ids that end a generation; empty if the checkpoint has none.
    dtype_name: dtype of the weights, by the checkpoint.
    quantization: storage format of matrices, which are dequantized when read; None:
        not quantized.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_length: int
    norm_epsilon: float
    ropes: tuple[Rope | None, ...] = _per_layer()
    windows: tuple[int | None, ...] = _per_layer()
    layer_heads: tuple[tuple[int, int], ...] = _per_layer(default=())
    query_heads: tuple[int, ...] = _per_layer(default=())
    key_layers: tuple[int, ...] = _per_layer(default=())
    span_layers: tuple[bool, ...] = _per_layer(default=())
    values_of_keys: tuple[bool, ...] = _per_layer(default=())
    inner_sizes: tuple[int, ...] = _per_layer(default=())
    tied: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_head_bias: bool = False
    norms: Literal["before", "after", "both"] = "before"
    state_norms: Literal["before", "after", "both"] | None = None
    post_norm_epsilon: float | None = None
    norm_offset: float = 0.0
    final_norm_offset: float | None = None
    has_embedding_norm: bool = False
    has_centred_norms: bool = False
    has_norm_bias: bool = False
    is_parallel: bool = False
    qk_norm: Literal["head", "heads", "all", "turned", "unit"] | None = None
    has_value_norm: bool = False
    scale: float | None = None
    query_growth: tuple[float, int] | None = None
    soft_cap: float | None = None
    logit_cap: float | None = None
    has_sinks: bool = False
    output_gate: OutputGate | None = None
    activation: str = "silu"
    is_gated: bool = True
    swiglu_limits: tuple[float, float] | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    has_residual_scales: bool = False
    attention_scales: tuple[float, float] = (1.0, 1.0)
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    layer_inputs: LayerInputs | None = None
    has_layer_scales: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    expert_layers: tuple[bool, ...] = _per_layer(default=())
    mixers: tuple[tuple[str, ...], ...] = _per_layer(default=())
    fed_layers: tuple[bool, ...] = _per_layer(default=())
    delta_rule: DeltaRule | None = None
    state_space: StateSpace | None = None
    convolution: Convolution | None = None
    convolved_heads: ConvolvedHeads | None = None
    state: LayerState | None = None
    hides_first: bool = False
    scan_layers: bool = False
    loop_layers: bool = False
    num_guessing_layers: int = 0
    stop_tokens: tuple[int, ...] = ()
    dtype_name: str = "float32"
    quantization: Quantization | None = dataclasses.field(default=None, compare=False)

    @property
    def layer_mixers(self) -> tuple[tuple[str, ...], ...]:
        """Token mixers of each layer."""
        return self.mixers or ((ATTENTION,),) * self.num_layers

    @property
    def has_loops(self) -> bool:
        """True if equal layers share a loop; shared keys need a static layer index."""
        is_varied = self.key_layers or self.layer_heads or self.turns_differ
        return self.loop_layers and not (self.scan_layers or is_varied)

    @property
    def has_states(self) -> bool:
        """True if a layer has another token mixer than attention, or none."""
        return any(mixers != (ATTENTION,) for mixers in self.layer_mixers)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers in order, grouped by scan.

        Models with recurrent states, or with different heads or rotated dims, run
        layers one by one.
        """
        kinds = [self._list_parts(layer) for layer in range(self.num_layers)]
        alone = self.has_states or self.layer_heads or self.turns_differ
        alike = self._find_kind if self.scan_layers and not alone else None
        layers = (tuple(run) for _, run in itertools.groupby(range(len(kinds)), alike))
        return tuple(Run(run[0], run[-1] + 1, *kinds[run[0]]) for run in layers)

    def _find_kind(self, layer: int) -> tuple[Any, int]:
        """Return the properties that all layers of a scan share."""
        return self._list_parts(layer), self.find_query_heads(layer)

    def _list_parts(self, layer: int) -> tuple[Any, Any]:
        """Return a layer's token mixers, and its MLP or experts."""
        is_fed = not self.fed_layers or self.fed_layers[layer]
        has_experts = bool(self.expert_layers) and self.expert_layers[layer]
        feeds = ("experts" if has_experts else "perceptron") if is_fed else None
        return self.layer_mixers[layer], feeds

    def has_spans(self, layer: int) -> bool:
        """Return True if tokens of a span attend to each other in a layer."""
        return not self.span_layers or self.span_layers[layer]

    @property
    def num_cached_layers(self) -> int:
        """Number of attention layers with their own keys and values."""
        return len(set(self.key_layers)) or self.num_layers

    def find_heads(self, layer: int) -> tuple[int, int]:
        """Return the number of key-value heads of a layer, and their dim."""
        return (self.layer_heads or ((self.num_kv_heads, self.head_dim),))[
            layer if self.layer_heads else 0
        ]

    def find_query_heads(self, layer: int) -> int:
        """Return the number of query heads of a layer."""
        return self.query_heads[layer] if self.query_heads else self.num_heads

    def find_inner_size(self, layer: int) -> int:
        """Return the hidden units of a layer's MLP."""
        return self.inner_sizes[layer] if self.inner_sizes else self.intermediate_size

    def take_layer(self, layer: int) -> "DecoderConfig":
        """Return the configuration of a model of one layer, with keys of its own."""
        entries = {
            field.name: getattr(self, field.name)[layer : layer + 1]
            for field in dataclasses.fields(self)
            if field.metadata.get("is_per_layer")
        }
        num_kv_heads, head_dim = self.find_heads(layer)
        # Sizes that differ by layer are the model's own in a model of one layer.
        sizes = dict(
            num_layers=1,
            num_heads=self.find_query_heads(layer),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=self.find_inner_size(layer),
        )
        folded = dict(query_heads=(), layer_heads=(), inner_sizes=(), key_layers=())
        return dataclasses.replace(self, **sizes, **(entries | folded))

    @property
    def turns_differ(self) -> bool:
        """True if layers differ in the number of rotated components of a head."""
        return len({rope.dim for rope in self.ropes if rope}) > 1

    @property
    def turn_kinds(self) -> tuple[int, ...]:
        """Index of each layer's rope among the different ones."""
        kinds = list(dict.fromkeys(self.ropes))
        return tuple(kinds.index(rope) for rope in self.ropes)

    @property
    def turns_neighbours(self) -> bool:
        """True if rotated pairs are adjacent components of a head."""
        return any(rope is not None and rope.is_interleaved for rope in self.ropes)

    @property
    def turned_dim(self) -> int:
        """Number of rotated components of a head, in the first layer with RoPE."""
        return next((rope.dim for rope in self.ropes if rope), 0)


def fix_context(config: DecoderConfig, longest: int) -> DecoderConfig:
    """Return the configuration for sequences of at most `longest` tokens.

    Longrope then uses the factors of that length in all sequences (`rope.fix_length`).

    Raises:
        ValueError: if `longest` is not in 1..`max_context_length`.
    """
    if not 1 <= longest <= config.max_context_length:
        raise ValueError(
            f"max_context_length {longest} must be from 1 to "
            f"{config.max_context_length}, the positions that the model was trained for"
        )
    ropes = tuple(rope and fix_length(rope, longest) for rope in config.ropes)
    return dataclasses.replace(config, max_context_length=longest, ropes=ropes)


def read_config(folder: str | Path) -> DecoderConfig:
    """Read the config.json (and generation_config.json) of a checkpoint folder.

    Raises:
        FileNotFoundError: if there is no config.json.
        ValueError: for settings that are invalid or not supported.
    """
    path = find_folder(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: a checkpoint is a folder with config.json, "
            "*.safetensors and tokenizer.json, or a GGUF file"
        )
    config = parse_config(read_json(path))

    # Chat models list further stop tokens in generation_config.json.
    generation = path.with_name("generation_config.json")
    stop: tuple[int, ...] = ()
    if generation.is_file():
        settings = Settings(read_json(generation), file=generation.name)
        stop = settings.token_ids("eos_token_id")
    stop = dict.fromkeys((*(stop or config.stop_tokens), *_find_end(path.parent)))
    return dataclasses.replace(config, stop_tokens=tuple(stop))


def _find_end(folder: Path) -> tuple[int, ...]:
    """Return the tokenizer's end-of-sequence id in a tuple; empty without one."""
    settings = read_tokenizer_settings(folder)
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    added = settings.get("added_tokens_decoder")
    if not isinstance(token, str):
        return ()
    tokenizer = folder / "tokenizer.json"
    if not isinstance(added, Mapping) and tokenizer.is_file():
        listed = read_json(tokenizer).get("added_tokens")
        listed = listed if isinstance(listed, list) else []
        entries = (each for each in listed if isinstance(each, Mapping))
        added = {str(each.get("id")): each for each in entries}
    if not isinstance(added, Mapping):
        return ()
    return tuple(
        int(number)
        for number, each in added.items()
        if str(number).isdecimal()
        and isinstance(each, Mapping)
        and each.get("content") == token
    )


def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Convert the contents of a config.json to a ``DecoderConfig``.

    Raises:
        ValueError: for settings that are invalid or not supported.
    """
    raw = find_text_part(raw)
    model_type = _supported_model_type(raw)
    row = ARCHITECTURES[model_type]
    settings = Settings(raw, find_defaults(model_type), row.aliases)
    # The list of layers also gives their number.
    listed = settings.names("layer_types")
    if listed == []:
        name = settings.name("layer_types")
        raise ValueError(f"config.json: {name!r} must name one or more layers, got []")
    num_layers = settings.count("num_hidden_layers", listed and len(listed))
    if num_layers > MOST_LAYERS:
        raise ValueError(
            f"config.json: num_hidden_layers must be at most {MOST_LAYERS}, got "
            f"{num_layers}"
        )
    head_dim = _read_head_dim(settings)
    fields = _read_biases(settings, row) | dict(
        num_heads=settings.count("num_attention_heads"),
        num_kv_heads=_read_kv_heads(settings),
        head_dim=head_dim,
        windows=(None,) * num_layers,
    )
    if row.has_windows:
        fields["windows"] = read_windows(settings, num_layers)
    fields |= row.choices | row.read(settings)
    if "mixers" in fields:
        fields["state"] = read_state(settings, fields.get("num_layers", num_layers))
    if "ropes" not in fields:
        dim = settings.count("qk_rope_head_dim", head_dim)
        rope = read_rope(settings, dim, can_be_partial=row.can_turn_partly)
        fields["ropes"] = (rope,) * num_layers
    general = dict(
        architecture=model_type,
        vocab_size=settings.count("vocab_size"),
        hidden_size=settings.count("hidden_size"),
        num_layers=num_layers,
        max_context_length=settings.count("max_position_embeddings"),
        norm_epsilon=settings.number("rms_norm_eps", 1e-6),
        tied=settings.flag("tie_word_embeddings"),
        stop_tokens=settings.token_ids("eos_token_id"),
        dtype_name=_read_dtype(settings),
        quantization=read_quantization(settings),
    )
    if "activation" not in fields:
        general["activation"] = _read_activation(settings)
    if "intermediate_size" not in fields:
        # Models with experts in all layers may lack the MLP's size.
        general["intermediate_size"] = settings.count(
            settings.first("intermediate_size", "moe_intermediate_size")
        )
    return DecoderConfig(**general | fields)


def _read_head_dim(settings: Settings) -> int:
    hidden, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    head_dim = settings.count("head_dim", hidden // heads)
    if head_dim % 2:
        raise ValueError(
            "config.json: head_dim must be even, by default hidden_size / "
            f"num_attention_heads, got {head_dim}"
        )
    return head_dim


def _read_kv_heads(settings: Settings) -> int:
    num_heads = settings.count("num_attention_heads")
    num_kv_heads = settings.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: {num_heads} query heads cannot share {num_kv_heads} "
            "key-value heads (num_key_value_heads) evenly"
        )
    return num_kv_heads


def _read_biases(settings: Settings, row: Architecture) -> dict[str, Any]:
    """Return the fields for biases of the projections."""
    has_bias, has_mlp_bias = settings.flag("attention_bias"), settings.flag("mlp_bias")
    if has_mlp_bias and row.biases != "configured":
        raise ValueError("config.json: mlp_bias is not supported for this architecture")
    return dict(
        has_qkv_bias=row.biases == "qkv" or (row.biases == "configured" and has_bias),
        has_output_bias=row.biases == "configured" and has_bias,
        has_mlp_bias=has_mlp_bias,
    )


def _read_activation(settings: Settings) -> str:
    key = (
        "hidden_activation"
        if "hidden_activation" in settings.defaults
        else "hidden_act"
    )
    name = settings.get(key, "silu")
    if name not in ACTIVATIONS:
        raise ValueError(
            f"config.json: {settings.name(key)} {name!r} is not supported, only "
            + ", ".join(ACTIVATIONS)
        )
    return str(name)


def _read_dtype(settings: Settings) -> str:
    """Return the name of the weights' dtype; the default is float32."""
    key = settings.first("dtype", "torch_dtype")
    value = settings.get(key, "float32")
    if not isinstance(value, str):
        raise ValueError(f"config.json: {key!r} must be a name, got {value!r}")
    return value


def find_defaults(model_type: str) -> dict[str, Any]:
    """Return transformers' defaults for keys missing from a config.json.

    jkv's ``FAMILIES`` holds defaults of the cache's size, ``ARCHITECTURES`` the others.
    """
    family = FAMILIES.get(model_type, Family())
    context = family.sizes and {"max_position_embeddings": family.sizes.context}
    return {**(context or {}), **family.usual, **ARCHITECTURES[model_type].defaults}


def _supported_model_type(raw: Mapping[str, Any]) -> str:
    """Return the model type; raise ValueError if it is not supported."""
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in REFUSED:
        raise ValueError(
            f"config.json: model_type names the architecture {model_type!r}, which is "
            f"not supported: {REFUSED[model_type]}"
        )
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ValueError(
            f"config.json: model_type names the architecture {model_type!r}; supported "
            "are " + ", ".join([*ARCHITECTURES, *TEXT_PARTS])
        )
    for name in Settings(raw).names("architectures") or ():
        if not name.endswith("ForCausalLM"):
            raise ValueError(
                f"config.json: architectures names a {name}, which does not predict "
                "tokens; a ...ForCausalLM checkpoint is needed"
            )
    return model_type
