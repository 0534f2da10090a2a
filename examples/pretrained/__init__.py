"""Checkpoints of many architectures in plain JAX, on a paged cache.

    model, params = pretrained.load("path/to/checkpoint")
    tokenizer = pretrained.load_tokenizer("path/to/checkpoint")
    cache = jkv.init(model.cache_config(4096, max_sequences=8))

``model(params, tokens, cache, batch)`` then is a ``jkv.Model``. A Hugging Face folder
is read as it is: config.json, one or many safetensors files, tokenizer.json. So is a
GGUF file (``gguf_reading``).

Files in reading order: ``architecture.py`` and ``architectures.py`` (the table: the
differences of each from Llama; some with experts in ``expert_architectures.py``,
Gemma's in ``gemma_architectures.py``, Mistral's newer ones in
``mistral_architectures.py``, models with a state in ``delta_architectures.py`` and
``mamba_architectures.py``, with readings of their own), ``config.py`` (a config.json;
``settings.py``, ``readings.py``, ``windows.py``, ``rope_settings.py``, ``parts.py``
and, of models that also see, ``text_part.py`` are for parts of it), ``model.py`` (the
forward pass; ``layers.py``, ``attention.py``, ``rope.py``, ``experts.py``, and
``mixers`` for layers with a state), ``caches.py`` (the cache), ``tensors.py`` and
``checkpoint.py`` (weights; ``files.py``, ``quantized.py``, and ``spreading.py`` for
several devices), ``tokenizer.py`` (texts), ``chat_template.py`` (chats),
``sampling.py`` (generation_config.json), ``keeping.py`` (compiled programs).
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from .architecture import Architecture
from .architectures import ARCHITECTURES
from .chat_template import (
    OWN_VARIABLES,
    can_show_tools,
    has_chat_template,
    render_chat,
)
from .checkpoint import Params, random_params, read_params
from .config import DecoderConfig, fix_context, parse_config, read_config
from .gguf_reading import find_folder
from .keeping import keep_programs
from .model import Decoder
from .rope import Rope
from .sampling import read_sampling
from .spreading import find_divided_axis, make_mesh, put_whole, spread_over
from .tokenizer import load_tokenizer

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Decoder",
    "DecoderConfig",
    "OWN_VARIABLES",
    "Params",
    "Rope",
    "can_show_tools",
    "find_divided_axis",
    "find_folder",
    "has_chat_template",
    "keep_programs",
    "load",
    "load_tokenizer",
    "make_mesh",
    "parse_config",
    "random_params",
    "read_config",
    "read_params",
    "read_sampling",
    "render_chat",
]


def prefers_loops(mesh: jax.sharding.Mesh | None = None) -> bool:
    """Tell whether ``load(loop_layers=True)`` is for here: one process, on a CPU."""
    return mesh is None and jax.default_backend() == "cpu"


def load(
    folder: str | Path,
    dtype: jnp.dtype | None = None,
    mesh: jax.sharding.Mesh | None = None,
    *,
    scan_layers: bool = False,
    loop_layers: bool = False,
    max_context_length: int | None = None,
) -> tuple[Decoder, Params]:
    """Read a checkpoint.

    Args:
        folder: a Hugging Face checkpoint, config.json and safetensors, or a GGUF file.
        dtype: type of weights and activations; float32 on a CPU and the checkpoint's
            own elsewhere when it is None.
        mesh: devices; the weights are sharded over its axis "tp" as they are read.
        scan_layers: for many layers: programs compile faster, and tokens take longer
            (`DecoderConfig`).
        loop_layers: for many layers on a CPU (`prefers_loops`): programs compile faster
            and tokens take as long, and matrices that multiply the same rows are one
            (`layers.JOINED`). Not for training, nor beside ``scan_layers``.
        max_context_length: most tokens that a text will have, at most the model's.
            With longrope (Phi-3) it chooses the factors of all texts: the short ones
            up to the length before scaling, else the long ones. None takes them for
            the length that each text has so far, so that a text which passes the
            length before scaling depends on how it came in pieces.

    Returns:
        The model, a callable with static settings, and its parameters.

    Raises:
        FileNotFoundError: when a file is missing.
        ValueError: when the checkpoint is damaged or of a kind not supported here, or
            trained for shorter texts.
    """
    loops = dict(scan_layers=scan_layers, loop_layers=loop_layers)
    config = dataclasses.replace(read_config(folder), **loops)
    if max_context_length is not None:
        config = fix_context(config, max_context_length)
    put = put_whole if mesh is None else spread_over(mesh, config)
    joined = config.has_loops and mesh is None
    return Decoder(config), read_params(folder, config, dtype, put, joined=joined)
