"""The settings of a checkpoint's config.json, checked.

One frozen, hashable object holds every static setting of the model, so that it can be
closed over by jit. Settings that the forward pass would compute wrongly are refused
here, by name, instead of giving fluent nonsense later.
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


# Model types that are known, and why they are not computed.
CHUNKED = (
    "its layers attend in chunks, so that a token sees those since the last multiple "
    "of attention_chunk_size: a window that differs by row, which jkv.attend has not"
)
DENOISES = "it denoises blocks of tokens: run examples/diffusion.py"
REFUSED = {"diffusion_gemma": DENOISES, "llama4": CHUNKED, "llama4_text": CHUNKED}

ATTENTION = "attention"


class Run(NamedTuple):
    """A layer, or neighbours with the same parameters that one scan goes through."""

    start: int
    stop: int
    mixers: tuple[str, ...]  # token mixers: "attention", names in `MIXERS`
    feeds: Literal["perceptron", "experts"] | None  # part for every token

    @property
    def has_attention(self) -> bool:
        """True if the layers have keys and values."""
        return ATTENTION in self.mixers

    @property
    def state_mixers(self) -> tuple[str, ...]:
        """The mixers with a state, one at most."""
        return tuple(name for name in self.mixers if name != ATTENTION)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shapes and switches of a model.

    architecture: the row of ``ARCHITECTURES``.
    vocab_size, hidden_size, intermediate_size: ints, `V`, `E` and `F` below.
    num_layers, num_heads, num_kv_heads, head_dim: ints, `L`, `H`, `K`, `D`.
    layer_heads: per layer, key-value heads and head dim, where layers differ in them;
        empty where `num_kv_heads` and `head_dim` say it.
    query_heads: per layer, `H`, where layers differ in it.
    key_layers: per layer, the layer that holds its keys and values, itself or an
        earlier one that keeps some; empty for its own in all layers. The layers that
        keep some are the first ones.
    span_layers: per layer, whether tokens of a span of the prompt attend to each other;
        empty for all layers.
    values_of_keys: per layer, whether values are projected as keys are; empty for none.
    inner_sizes: per layer, `F`, where layers differ in it.
    max_context_length: int, positions that the model was trained for.
    norm_epsilon: float, added to the mean square in RMSNorm.
    ropes: per layer, how positions turn queries and keys; None if they do not.
    windows: per layer, how many tokens a token sees, itself counted; None is all.
    tied: the output projection is the embedding.
    has_qkv_bias, has_output_bias, has_mlp_bias: biases of the projections.
    has_head_bias: whether logits have biases.
    norms: whether attention and perceptron are normed before, after, or both.
    state_norms: the same of layers with a state; None if they are like the others.
    post_norm_epsilon: float, `norm_epsilon` of norms after a part; None for the same.
    norm_offset: float, added to the norms' weights.
    final_norm_offset: float, the same of the last norm; None if it is like the others.
    has_embedding_norm: embeddings are normed, without weights.
    has_centred_norms, has_norm_bias: norms subtract the mean first; they add biases.
    is_parallel: the perceptron takes attention's input, and both are added at once.
    qk_norm: queries and keys are normed: each "head", each of the "heads" by weights of
        its own, or "all" of them before they are turned, or each head after it is
        "turned", or each without weights to the length of a "unit".
    has_value_norm: values are normed by each head, without weights.
    scale: float, multiplies the scores; None is ``1 / sqrt(D)``.
    query_growth: float and int, `b` and `n`: a query at position p is
        ``1 + b log(1 + p // n)`` times as long; None if they do not grow.
    soft_cap, logit_cap: floats, bounds of the scores and the logits; None for none.
    has_sinks: each head has a logit that takes part in the softmax with no value.
    output_gate: how the heads' outputs are weighed; None if they are not.
    activation: one of ``ACTIVATIONS``.
    is_gated: perceptrons and experts multiply the activated product by a second one.
    swiglu_limits: of gpt-oss, the sigmoid's slope and the bound of its arguments.
    embedding_scale, residual_scale, logit_scale: floats that multiply embeddings, the
        output of each half of a layer, and logits.
    has_residual_scales: both sides of each sum of a layer, in float32, have learnt
        biases and scales, and so have embeddings.
    attention_scales: floats that multiply attention's input and its output.
    mlp_scales: floats that multiply gates of perceptrons and the outputs of these.
    layer_inputs: per-layer inputs about a token; None for nothing.
    has_layer_scales: a layer's output is multiplied by a learnt number.
    latent: the sizes of latent attention; None for keys and values of each head.
    experts: the sizes of expert layers; None if there are none.
    expert_layers: per layer, whether it has experts.
    mixers: per layer, its token mixers: "attention", a name in ``MIXERS``, both, or
        nothing; empty for attention in all layers.
    fed_layers: per layer, whether it has a perceptron or experts; empty for all layers.
    delta_rule, state_space, convolution, convolved_heads: the sizes of layers with
        these mixers; None without any.
    state: the state of a layer, as jkv reads it; None if no layer has one.
    hides_first: no token attends to the first one of a sequence, of layers that draft
        tokens (`jkv.drafters.hide_first`).
    scan_layers: neighbouring layers with the same parameters share a ``lax.scan``: a
        program of many layers compiles faster, and each step copies their weights.
    loop_layers: they share a loop that reads the weights where they lie, for CPUs;
        programs have no fast derivative.
    num_guessing_layers: int, layers past the last one that a checkpoint may hold, to
        draft more than one token; `drafters` reads them.
    stop_tokens: ids after which a generation ends; empty when none is named.
    dtype_name: the type the checkpoint says its weights have.
    quantization: how the checkpoint stores matrices; they are dequantized when read.
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
    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    layer_heads: tuple[tuple[int, int], ...] = ()
    query_heads: tuple[int, ...] = ()
    key_layers: tuple[int, ...] = ()
    span_layers: tuple[bool, ...] = ()
    values_of_keys: tuple[bool, ...] = ()
    inner_sizes: tuple[int, ...] = ()
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
    expert_layers: tuple[bool, ...] = ()
    mixers: tuple[tuple[str, ...], ...] = ()
    fed_layers: tuple[bool, ...] = ()
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
        """Per layer, its token mixers."""
        return self.mixers or ((ATTENTION,),) * self.num_layers

    @property
    def has_loops(self) -> bool:
        """True if layers alike share a loop; others' keys need a layer's own number."""
        is_varied = self.key_layers or self.layer_heads or self.turns_differ
        return self.loop_layers and not (self.scan_layers or is_varied)

    @property
    def has_states(self) -> bool:
        """True if layers are unlike in their cached data of a sequence."""
        return any(mixers != (ATTENTION,) for mixers in self.layer_mixers)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers in order, grouped by the scan that goes through them.

        Layers that keep unlike things of a sequence run one by one.
        """
        kinds = [self._list_parts(layer) for layer in range(self.num_layers)]
        alone = self.has_states or self.layer_heads or self.turns_differ
        alike = self._find_kind if self.scan_layers and not alone else None
        layers = (tuple(run) for _, run in itertools.groupby(range(len(kinds)), alike))
        return tuple(Run(run[0], run[-1] + 1, *kinds[run[0]]) for run in layers)

    def _find_kind(self, layer: int) -> tuple[Any, int]:
        """Return the common properties of layers of one scan."""
        return self._list_parts(layer), self.find_query_heads(layer)

    def _list_parts(self, layer: int) -> tuple[Any, Any]:
        """Return a layer's token mixers, and the part after them."""
        is_fed = not self.fed_layers or self.fed_layers[layer]
        has_experts = bool(self.expert_layers) and self.expert_layers[layer]
        feeds = ("experts" if has_experts else "perceptron") if is_fed else None
        return self.layer_mixers[layer], feeds

    def has_spans(self, layer: int) -> bool:
        """Return True if tokens of a span attend to each other in a layer."""
        return not self.span_layers or self.span_layers[layer]

    @property
    def num_cached_layers(self) -> int:
        """Number of attention layers that keep keys and values."""
        return len(set(self.key_layers)) or self.num_layers

    def find_heads(self, layer: int) -> tuple[int, int]:
        """Return the key-value heads of a layer, and their dim."""
        return (self.layer_heads or ((self.num_kv_heads, self.head_dim),))[
            layer if self.layer_heads else 0
        ]

    def find_query_heads(self, layer: int) -> int:
        """Return the query heads of a layer."""
        return self.query_heads[layer] if self.query_heads else self.num_heads

    @property
    def turns_differ(self) -> bool:
        """True if positions turn more components of a head in some layers."""
        return len({rope.dim for rope in self.ropes if rope}) > 1

    @property
    def turn_kinds(self) -> tuple[int, ...]:
        """Per layer, which of the different ropes it has."""
        kinds = list(dict.fromkeys(self.ropes))
        return tuple(kinds.index(rope) for rope in self.ropes)

    @property
    def turns_neighbours(self) -> bool:
        """True if the pairs that positions turn are neighbours in a head."""
        return any(rope is not None and rope.is_interleaved for rope in self.ropes)

    @property
    def turned_dim(self) -> int:
        """Components of a head that positions turn, in the layers where they do."""
        return next((rope.dim for rope in self.ropes if rope), 0)


def fix_context(config: DecoderConfig, longest: int) -> DecoderConfig:
    """Return the configuration for sequences of at most `longest` tokens.

    Longrope then has the factors for that length in every sequence (`rope.fix_length`).

    Raises:
        ValueError: for more tokens than the model was trained for.
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
        FileNotFoundError: when there is no config.json.
        ValueError: when it asks for something that this model does not compute.
    """
    path = find_folder(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: a checkpoint is a folder with config.json, "
            "*.safetensors and tokenizer.json, or a GGUF file"
        )
    config = parse_config(read_json(path))

    # Chat models name further stop tokens beside their config.
    generation = path.with_name("generation_config.json")
    stop: tuple[int, ...] = ()
    if generation.is_file():
        stop = Settings(read_json(generation)).token_ids("eos_token_id")
    stop = dict.fromkeys((*(stop or config.stop_tokens), *_find_end(path.parent)))
    return dataclasses.replace(config, stop_tokens=tuple(stop))


def _find_end(folder: Path) -> tuple[int, ...]:
    """Return the id of the token that the tokenizer ends texts with, if any."""
    settings = read_tokenizer_settings(folder)
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    added = settings.get("added_tokens_decoder")
    if not isinstance(token, str):
        return ()
    tokenizer = folder / "tokenizer.json"
    if not isinstance(added, Mapping) and tokenizer.is_file():
        listed = read_json(tokenizer).get("added_tokens") or ()
        added = {each.get("id"): each for each in listed if isinstance(each, Mapping)}
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
    """Turn the contents of a config.json into a ``DecoderConfig``.

    Raises:
        ValueError: when it asks for something that this model does not compute.
    """
    raw = find_text_part(raw)
    model_type = _supported_model_type(raw)
    row = ARCHITECTURES[model_type]
    settings = Settings(raw, find_defaults(model_type), row.aliases)
    # A list of layers tells their number as well.
    listed = settings.get("layer_types")
    num_layers = settings.count("num_hidden_layers", listed and len(listed))
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
        activation=_read_activation(settings),
        stop_tokens=settings.token_ids("eos_token_id"),
        dtype_name=_read_dtype(settings),
        quantization=read_quantization(settings),
    )
    if "intermediate_size" not in fields:
        # Models with experts in all layers name no other size.
        general["intermediate_size"] = settings.count(
            "intermediate_size", settings.get("moe_intermediate_size")
        )
    return DecoderConfig(**general | fields)


def _read_head_dim(settings: Settings) -> int:
    hidden, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    head_dim = settings.count("head_dim", hidden // heads)
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim must be even, got {head_dim}")
    return head_dim


def _read_kv_heads(settings: Settings) -> int:
    num_heads = settings.count("num_attention_heads")
    num_kv_heads = settings.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: {num_heads} query heads cannot share {num_kv_heads} "
            "key-value heads evenly"
        )
    return num_kv_heads


def _read_biases(settings: Settings, row: Architecture) -> dict[str, Any]:
    """Return which projections have biases."""
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
            f"config.json: {key} {name!r} is not supported, only "
            + ", ".join(ACTIVATIONS)
        )
    return str(name)


def _read_dtype(settings: Settings) -> str:
    """Return the name of the weights' type; float32 when none is named."""
    value = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    if not isinstance(value, str):
        raise ValueError(f"config.json: 'dtype' must be a name, got {value!r}")
    return value


def find_defaults(model_type: str) -> dict[str, Any]:
    """Return transformers' values for keys that a config.json leaves out.

    jkv's ``FAMILIES`` has the ones that decide the size of a cache, ``ARCHITECTURES``
    the others.
    """
    family = FAMILIES.get(model_type, Family())
    context = family.sizes and {"max_position_embeddings": family.sizes.context}
    return {**(context or {}), **family.usual, **ARCHITECTURES[model_type].defaults}


def _supported_model_type(raw: Mapping[str, Any]) -> str:
    """Return the model type, or reject one that this model does not compute."""
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in REFUSED:
        raise ValueError(
            f"config.json names the architecture {model_type!r}, which is not "
            f"supported: {REFUSED[model_type]}"
        )
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ValueError(
            f"config.json names the architecture {model_type!r}; supported are "
            + ", ".join([*ARCHITECTURES, *TEXT_PARTS])
        )
    names = raw.get("architectures") or ()
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: 'architectures' must be names, got {names!r}")
    for name in names:
        if not name.endswith("ForCausalLM"):
            raise ValueError(
                f"config.json says the checkpoint is a {name}, which does not predict "
                "tokens; a ...ForCausalLM checkpoint is needed"
            )
    return model_type
