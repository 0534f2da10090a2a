"""DFlash and DSpark drafters: Qwen 3 layers that draft a block in one pass.

Cached keys are projected from the target's hidden states. A block's rows are embeddings
of the newest token and of mask tokens, with bidirectional attention. DSpark adds a bias
that depends on the token before each draft token, a product of two matrices. Checkpoint
formats: z-lab's and SpecForge's, served by SGLang, and speculators'.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jkv
from jkv.drafters import Block

from ..attention import write_keys
from ..config import DecoderConfig, parse_config
from ..layers import multiply, norm
from ..model import Decoder, find_logits, stack_turns
from ..settings import Settings
from ..tensors import layer_tensors
from .draft_vocabulary import spread_logits
from .sizes import Target
from .tensors import Checkpoint

MARKOV = "markov_head.markov_w"


@dataclasses.dataclass(frozen=True)
class BlockRows:
    """The forward pass of a block, a `jkv.drafters.BlockReader`.

    decoder: the drafter's layers.
    target: configuration of the target, for its embeddings and output projection.
    """

    decoder: Decoder
    target: DecoderConfig

    def __call__(
        self,
        params: dict[str, Any],
        tokens: jax.Array,
        cache: jkv.Cache,
        batch: jkv.Batch,
    ) -> tuple[jax.Array, jkv.Cache]:
        """Return logits of the blocks' rows, f32[R, V], and the cache."""
        rows = jnp.take(params["target"]["embedding"], tokens, axis=0, mode="clip")
        rows = rows * self.target.embedding_scale
        rows, cache, _ = self.decoder.run_layers(params, rows, cache, batch)
        rows = norm(self.decoder.config, rows, params, "final_norm")
        if "draft_tokens" not in params:
            return find_logits(self.target, params["target"], rows), cache
        logits = multiply(rows, params["head"], jnp.float32)
        return spread_logits(params, logits, self.target.vocab_size), cache


def add_bias(params: dict[str, Any], logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Add DSpark's Markov head to logits, f32[R, V], of the tokens after `tokens`."""
    before = jnp.take(params["markov_in"], tokens, axis=0, mode="clip")
    biases = multiply(before, params["markov_out"], jnp.float32)
    if "draft_tokens" in params:
        return logits.at[:, params["draft_tokens"]].add(biases)
    return logits + biases


@dataclasses.dataclass(frozen=True)
class BlockKeys:
    """Writer of the keys of accepted rows, from the target's hidden states.

    config: the drafter's configuration.
    """

    config: DecoderConfig

    def __call__(
        self,
        params: dict[str, Any],
        hidden: jax.Array,
        cache: jkv.Cache,
        batch: jkv.Batch,
    ) -> jkv.Cache:
        """Write keys and values of hidden states [R, A] in every layer."""
        config, matrix = self.config, params["join"]
        rows = multiply(hidden.astype(matrix.dtype), matrix)
        rows = norm(config, rows, params, "join_norm")
        every = stack_turns(config, batch)
        for layer, weights in enumerate(params["layers"]):
            own = {name: array[0] for name, array in weights.items()}
            turns = tuple(each[config.turn_kinds[layer]] for each in every)
            cache = write_keys(config, own, rows, turns, cache, layer, batch)
        return cache


def read_block(
    folder: Path, raw: Mapping[str, Any], target: Target, num_tokens: int | None
) -> Block:
    """Read a DFlash or DSpark drafter for its target.

    Raises:
        ValueError: for an invalid checkpoint, or a drafter of another target.
    """
    own = target.model.config
    settings = Settings(raw)
    for name in ("dflash_config", "dspark_config"):
        settings = Settings({**settings.raw, **settings.part(name, {})})
    layer_config = target.find_own_layers(settings)
    if layer_config.get("model_type") not in ("llama", "qwen3"):
        layer_config["model_type"] = "qwen3"
    config = parse_config(layer_config)
    target.check_hidden_size(config.hidden_size)
    is_speculators = bool(
        {"speculators_model_type", "aux_hidden_state_layer_ids"} & settings.raw.keys()
    )
    if is_speculators:
        aux_layers = target.read_layers(settings, "aux_hidden_state_layer_ids")
        if any(config.windows) and not settings.flag("sliding_window_non_causal"):
            raise ValueError(
                "config.json: sliding_window_non_causal must be true, as rows of a "
                "block attend to each other both ways in every layer"
            )
    else:
        # The listed layers' outputs are inputs of the next ones.
        aux_layers = target.read_layers(settings, "target_layer_ids", shift=1)
    mask_token = settings.count("mask_token_id", least=0)
    if mask_token >= own.vocab_size:
        raise ValueError(
            f"config.json: mask_token_id {mask_token} is outside the vocabulary of "
            f"{own.vocab_size} tokens; take a drafter made for this target"
        )
    files = Checkpoint(folder, target.params["embedding"].dtype)
    files.ignore("embed_tokens.weight", "verifier_norm.weight", "t2d")
    files.ignore("verifier_lm_head.weight")
    files.ignore("confidence_head.proj.weight", "confidence_head.proj.bias")
    hidden = config.hidden_size
    names = ("fc.weight", "hidden_norm.weight")
    if "encoder.fc.weight" in files:
        names = ("encoder.fc.weight", "encoder.output_norm_enc.weight")
    params: dict[str, Any] = files.read_all(
        dict(
            join=(names[0], (hidden, len(aux_layers) * hidden)),
            join_norm=(names[1], (hidden,)),
            final_norm=("norm.weight", (hidden,)),
        )
    )
    params["layers"] = [
        {
            name: files.read(f"layers.{layer}.{source.name}", source.stored)[None]
            for name, source in layer_tensors(config, run).items()
        }
        for layer, run in enumerate(config.runs)
    ]
    num_drafted = settings.count("draft_vocab_size", own.vocab_size)
    if num_drafted != own.vocab_size:
        params["draft_tokens"] = files.read_draft_tokens(num_drafted, own.vocab_size)
        params["head"] = files.read("lm_head.weight", (num_drafted, hidden))
    else:
        files.ignore("lm_head.weight", "d2t")  # the target's
    follow = None
    if rank := _find_rank(settings, files):
        params["markov_in"] = files.read(f"{MARKOV}1.weight", (own.vocab_size, rank))
        params["markov_out"] = files.read(f"{MARKOV}2.weight", (num_drafted, rank))
        follow = add_bias
    files.finish()
    shared = ("embedding", "head", "head_bias")
    params["target"] = {n: target.params[n] for n in shared if n in target.params}
    # In DSpark's own format the newest token's row drafts, too; in speculators' a key
    # sets this.
    is_native = follow is not None and not is_speculators
    from_newest = settings.flag("sample_from_anchor", is_native)
    # The block's first row is the newest token's.
    size = settings.count("block_size", least=1 if from_newest else 2)
    return Block(
        reader=BlockRows(Decoder(config), own),
        write=BlockKeys(config),
        params=params,
        config=target.size_layers(config),
        aux_layers=aux_layers,
        mask_token=mask_token,
        num_tokens=num_tokens or size - (not from_newest),
        from_newest=from_newest,
        follow=follow,
    )


def _find_rank(settings: Settings, files: Checkpoint) -> int:
    """Return the rank of a Markov head; 0 without one.

    Raises:
        ValueError: for a kind that published drafters do not have.
    """
    if f"{MARKOV}1.weight" not in files:
        return 0
    kind = settings.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise ValueError(
            f"config.json: markov_head_type must be 'vanilla', the kind of published "
            f"drafters, got {kind!r}"
        )
    return settings.count("markov_rank")
