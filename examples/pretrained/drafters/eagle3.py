"""EAGLE-3 heads, in the formats of speculators and SGLang.

One layer of Llama or Qwen 3. Its attention reads two concatenated rows: the normed
embedding of a token, and the normed hidden state of the token before it.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jkv
from jkv.drafters import Eagle3

from ..attention import attend
from ..config import DecoderConfig, parse_config
from ..layers import multiply, norm, perceptron, scale_to_unit
from ..model import stack_turns
from ..settings import Settings
from ..tensors import layer_tensors
from .draft_vocabulary import spread_logits
from .sizes import Target
from .tensors import Checkpoint

NUM_TOKENS = 4

# Parameters of a layer of Llama or Qwen 3.
PARTS = {"attention_norm", "query", "key", "value", "output"}
PARTS |= {"mlp_norm", "gate", "up", "down"}
QK_NORMS = {"query_norm", "key_norm"}

# Copies of the target's tensors, in some checkpoints.
OF_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")


@dataclasses.dataclass(frozen=True)
class Eagle3Head:
    """The layer of an EAGLE-3 head, a `jkv.drafters.Head`.

    config: its configuration, with one layer.
    norms_residual: attention's residual is the normed hidden state.
    returns_normed: the next row reads the normed hidden state.
    vocab_size: int, the target's.
    """

    config: DecoderConfig
    norms_residual: bool
    returns_normed: bool
    vocab_size: int

    def __call__(
        self,
        params: dict[str, Any],
        tokens: jax.Array,
        hidden: jax.Array,
        cache: jkv.Cache,
        batch: jkv.Batch,
    ) -> tuple[jax.Array, jax.Array, jkv.Cache]:
        """Return logits f32[R, V], hidden states [R, E] and the cache."""
        config, layer = self.config, params["layer"]
        embedding = params["embedding"]
        embedded = jnp.take(embedding, tokens, axis=0, mode="clip")
        hidden = hidden.astype(embedded.dtype)
        normed = norm(config, hidden, layer, "hidden_norm")
        residual = normed if self.norms_residual else hidden
        embedded = norm(config, embedded, layer, "attention_norm")
        both = jnp.concatenate([embedded, normed], axis=-1)
        turns = tuple(each[0] for each in stack_turns(config, batch))
        window = config.windows[0]
        mixed, cache = attend(config, layer, both, turns, cache, 0, batch, window)
        hidden = residual + mixed
        fed = perceptron(config, norm(config, hidden, layer, "mlp_norm"), layer)
        hidden = hidden + fed
        normed = norm(config, hidden, params, "final_norm")
        logits = multiply(normed, params["head"], jnp.float32)
        logits = spread_logits(params, logits, self.vocab_size)
        return logits, normed if self.returns_normed else hidden, cache


@dataclasses.dataclass(frozen=True)
class Eagle3Projection:
    """Projection of auxiliary hidden states, [R, A], to f32[R, E].

    epsilon: float, added to the mean square in the norms.
    """

    epsilon: float

    def __call__(self, params: dict[str, Any], hidden: jax.Array) -> jax.Array:
        """Return the head's input hidden states, f32[R, E]."""
        matrix = params["join"]
        rows = hidden.astype(matrix.dtype)
        if "aux_norm" in params:  # [A], one norm; or [layers, E], one per layer
            scale = params["aux_norm"]
            parts = rows.reshape(rows.shape[0], -1, scale.shape[-1])
            wide = scale_to_unit(parts.astype(jnp.float32), self.epsilon)
            scale = scale.reshape(1, -1, scale.shape[-1])
            rows = (wide.astype(rows.dtype) * scale).reshape(rows.shape)
        return multiply(rows, matrix).astype(jnp.float32)


def read_eagle3(
    folder: Path, raw: Mapping[str, Any], target: Target, num_tokens: int | None
) -> Eagle3:
    """Read an EAGLE-3 head for its target.

    Raises:
        ValueError: for an invalid checkpoint, or a drafter of another target.
    """
    own = target.model.config
    settings = Settings(raw)
    config = parse_config(target.find_own_layers(settings))
    if config.num_layers != 1:
        raise ValueError(
            "config.json: num_hidden_layers of an EAGLE-3 head must be 1, got "
            f"{config.num_layers}"
        )
    config = dataclasses.replace(config, hides_first=True)
    tensors = layer_tensors(config, config.runs[0])
    if {name.removesuffix("_bias") for name in tensors} - QK_NORMS != PARTS:
        raise ValueError(
            f"config.json: an EAGLE-3 head with a layer of model_type "
            f"{config.architecture!r} is not supported; supported are llama and qwen3"
        )
    target.check_hidden_size(settings.count("target_hidden_size", config.hidden_size))
    settings = Settings({**raw, **settings.part("eagle_config", {})})
    count = own.num_layers
    usual = 2, count // 2, count - 3
    aux_layers = target.read_layers(settings, "eagle_aux_hidden_state_layer_ids", usual)
    num_drafted = _find_num_tokens(settings)
    files = Checkpoint(folder, target.params["embedding"].dtype)
    files.ignore(*OF_TARGET)
    params = _read_weights(files, config, settings, target, len(aux_layers))
    files.finish()
    head = Eagle3Head(
        config=config,
        norms_residual=settings.flag("norm_before_residual"),
        returns_normed=settings.flag("norm_output"),
        vocab_size=own.vocab_size,
    )
    return Eagle3(
        head=head,
        project=Eagle3Projection(config.norm_epsilon),
        params=params,
        config=target.size_layers(config),
        aux_layers=aux_layers,
        num_tokens=num_tokens or num_drafted,
    )


def _find_num_tokens(settings: Settings) -> int:
    """Return the draft tokens per step in speculators' config.json, or the default."""
    methods = settings.part("speculators_config", {}).get("proposal_methods")
    if methods is None:
        return NUM_TOKENS
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        raise ValueError(
            f"config.json: proposal_methods must be a list of objects, got {methods!r}"
        )
    return Settings(methods[0]).count("speculative_tokens", NUM_TOKENS)


def _read_weights(
    files: Checkpoint,
    config: DecoderConfig,
    settings: Settings,
    target: Target,
    num_aux: int,
) -> dict[str, Any]:
    """Return the head's parameters."""
    hidden = config.hidden_size
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in files else "layers.0."
    (run,) = config.runs
    layer = {}
    for name, source in layer_tensors(config, run).items():
        *rest, inner = source.stored
        # Queries, keys and values read two concatenated rows.
        doubled = name in ("query", "key", "value")
        shape = (*rest, 2 * inner) if doubled else source.stored
        layer[name] = files.read(prefix + source.name, shape)
    layer["hidden_norm"] = files.read(f"{prefix}hidden_norm.weight", (hidden,))
    params: dict[str, Any] = {"layer": layer}
    params["final_norm"] = files.read("norm.weight", (hidden,))
    params["join"] = files.read("fc.weight", (hidden, num_aux * hidden))
    if settings.flag("norm_before_fc"):
        norms = files.read("input_norm.weight", (num_aux * hidden,))
        params["aux_norm"] = norms
    elif settings.flag("fc_norm"):
        each = [files.read(f"fc_norm.{i}.weight", (hidden,)) for i in range(num_aux)]
        params["aux_norm"] = jnp.stack(each)
    params["embedding"] = target.params["embedding"]
    if "embed_tokens.weight" in files:
        shape = (config.vocab_size, hidden)
        params["embedding"] = files.read("embed_tokens.weight", shape)
    num_tokens = settings.count("draft_vocab_size", config.vocab_size)
    is_drafted = num_tokens != config.vocab_size or "d2t" in files
    if is_drafted:
        vocabulary = num_tokens, config.vocab_size
        params["draft_tokens"] = files.read_draft_tokens(*vocabulary)
    if is_drafted or "lm_head.weight" in files:
        params["head"] = files.read("lm_head.weight", (num_tokens, hidden))
    else:
        own = target.model.config
        params["head"] = target.params["embedding" if own.tied else "head"]
    return params
