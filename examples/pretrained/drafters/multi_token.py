"""Multi-token prediction (MTP) layers of DeepSeek V3, GLM 4.5 and Qwen3-Next.

The target's own checkpoint has a layer like its last one. The layer's input is a
projection of two normed rows: the embedding of a token, and the target's last hidden
state of the token before it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jkv
from jkv.drafters import MultiToken

from ..architectures import ARCHITECTURES
from ..checkpoint import read_layer
from ..config import ATTENTION, DecoderConfig
from ..files import Tensors, find_tensors
from ..gguf_reading import find_folder
from ..layers import multiply, norm
from ..model import Decoder, find_logits
from .sizes import Target

NUM_TOKENS = 2


@dataclasses.dataclass(frozen=True)
class MultiTokenHead:
    """An MTP layer, a `jkv.drafters.Head`.

    decoder: a model of this layer only.
    """

    decoder: Decoder

    def __call__(
        self,
        params: dict[str, Any],
        tokens: jax.Array,
        hidden: jax.Array,
        cache: jkv.Cache,
        batch: jkv.Batch,
    ) -> tuple[jax.Array, jax.Array, jkv.Cache]:
        """Return logits f32[R, V], hidden states [R, E] and the cache."""
        config = self.decoder.config
        embedded = jnp.take(params["embedding"], tokens, axis=0, mode="clip")
        embedded = embedded * config.embedding_scale
        hidden = hidden.astype(embedded.dtype)
        rows = [
            norm(config, embedded, params, "token_norm"),
            norm(config, hidden, params, "hidden_norm"),
        ]
        rows = multiply(jnp.concatenate(rows, axis=-1), params["join"])
        rows, cache, _ = self.decoder.run_layers(params, rows, cache, batch)
        after = norm(config, rows, params, "after_norm")
        return find_logits(config, params, after), after, cache


def read_multi_token(
    folder: Path, target: Target, num_tokens: int | None
) -> MultiToken:
    """Read the MTP layer of a target's checkpoint.

    Raises:
        ValueError: if there is none.
    """
    own = target.model.config
    config = _describe_layer(own)
    tensors = Tensors(find_tensors(find_folder(folder)), own.quantization)
    hidden, dtype = own.hidden_size, target.params["embedding"].dtype
    past = f"{ARCHITECTURES[own.architecture].prefix}layers.{own.num_layers}."
    if f"{past}eh_proj.weight" in tensors.paths:
        prefix = past
        names = dict(
            token_norm=f"{past}enorm.weight",
            hidden_norm=f"{past}hnorm.weight",
            join=f"{past}eh_proj.weight",
            after_norm=f"{past}shared_head.norm.weight",
        )
    elif "mtp.fc.weight" in tensors.paths:
        prefix = "mtp.layers.0."
        names = dict(
            token_norm="mtp.pre_fc_norm_embedding.weight",
            hidden_norm="mtp.pre_fc_norm_hidden.weight",
            join="mtp.fc.weight",
            after_norm="mtp.norm.weight",
        )
    else:
        raise ValueError(
            f"{folder} holds no MTP layer: neither {past}eh_proj.weight nor "
            f"mtp.fc.weight; pass the folder of a drafter"
        )
    shapes = dict.fromkeys(names, (hidden,)) | {"join": (hidden, 2 * hidden)}
    params: dict[str, Any] = {
        name: jnp.asarray(tensors.read(names[name], shape).astype(dtype))
        for name, shape in shapes.items()
    }
    params["layers"] = [read_layer(tensors, config, config.runs[0], prefix, dtype)]
    for name in ("embedding", "head", "head_bias"):
        if name in target.params:
            params[name] = target.params[name]
    return MultiToken(
        head=MultiTokenHead(Decoder(config)),
        params=params,
        config=target.size_layers(config),
        last=own.num_layers,
        num_tokens=num_tokens or NUM_TOKENS,
    )


def _describe_layer(own: DecoderConfig) -> DecoderConfig:
    """Return the configuration of one layer like the target's last attention layer."""
    attending = [i for i, each in enumerate(own.layer_mixers) if each == (ATTENTION,)]
    if not attending:
        raise ValueError("the target has no attention layer, and no MTP layer is read")
    # The MTP layer has experts if any layer has.
    return dataclasses.replace(
        own.take_layer(attending[-1]),
        state=None,
        fed_layers=(),
        expert_layers=(True,) if own.experts else (),
        hides_first=True,
        scan_layers=False,
        loop_layers=False,
    )
