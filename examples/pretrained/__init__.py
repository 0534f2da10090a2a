"""Checkpoints of many architectures in plain JAX, on a paged cache.

    model, params = pretrained.load("path/to/checkpoint")
    tokenizer = pretrained.load_tokenizer("path/to/checkpoint")
    cache = jkv.init(model.cache_config(4096, max_sequences=8))

``model(params, tokens, cache, batch)`` is a ``jkv.Model``. Hugging Face folders
(config.json, safetensors files, tokenizer.json) and GGUF files (``gguf_reading``) are
loaded unchanged.

In reading order: ``architecture.py`` and ``architectures.py`` (the table: each one's
differences from Llama; ``*_architectures.py`` and ``*_readings.py`` for families),
``config.py`` (config.json, with ``settings.py``, ``readings.py``, ``rope_settings.py``,
``parts.py``, ``kept_by_layers.py`` and, for multimodal models, ``text_part.py``),
``model.py`` (the forward pass, with ``layers.py``, ``attention.py``, ``rope.py``,
``experts.py``, and ``mixers`` for recurrent-state layers), ``caches.py`` (cache
configurations), ``tensors.py`` and ``checkpoint.py`` (weights, with ``files.py``,
``quantized.py``, and ``spreading.py`` for tensor parallelism), ``tokenizer.py``,
``chat_template.py``, ``sampling.py`` (generation_config.json), and ``keeping.py``
(compiled programs).
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
    """Return True if `load` should use `loop_layers=True`: on a CPU, in one process."""
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
    """Load a checkpoint.

    Args:
        folder: a Hugging Face checkpoint (config.json and safetensors) or a GGUF file.
        dtype: dtype of weights and activations; None means float32 on a CPU, and the
            checkpoint's own elsewhere.
        mesh: devices; the weights are sharded over its axis "tp" while they are read.
        scan_layers: compile faster and run slower, for models with many layers
            (`DecoderConfig`).
        loop_layers: compile faster and run equally fast on a CPU (`prefers_loops`);
            matrices with the same input are joined (`layers.JOINED`). Not for
            training, and not with ``scan_layers``.
        max_context_length: maximum tokens of a sequence, at most the model's limit.
            With longrope (Phi-3) it selects the factors of all sequences: short ones up
            to the original context length, else long ones. None selects them by the
            current length of each sequence; then a sequence that exceeds the original
            context length depends on how its tokens were split into steps.

    Returns:
        The model, a callable with static settings, and its parameters.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the checkpoint is damaged or not supported, or its context is
            shorter than `max_context_length`.
    """
    loops = dict(scan_layers=scan_layers, loop_layers=loop_layers)
    config = dataclasses.replace(read_config(folder), **loops)
    if max_context_length is not None:
        config = fix_context(config, max_context_length)
    put = put_whole if mesh is None else spread_over(mesh, config)
    joined = config.has_loops and mesh is None
    return Decoder(config), read_params(folder, config, dtype, put, joined=joined)
