"""The config.json that a GGUF file's metadata amount to, for each architecture.

What the metadata do not say is known of the architecture: which layers have a window,
how far those are turned.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .files import GGUFile, dequantize


class Kind(NamedTuple):
    """An architecture of GGUF's: what transformers calls it, and its own keys."""

    model_type: str
    class_name: str
    read: Callable[[GGUFile], dict[str, Any]] | None = None
    says: Mapping[str, Any] = {}  # what no file of the architecture says
    is_permuted: bool = False  # rows of queries and keys: neighbours are turned
    norm_offset: float = 0.0  # added to norms when the file was written


def make_config(file: GGUFile) -> dict[str, Any]:
    """Return what the config.json of a model's checkpoint would say.

    Raises:
        ValueError: for an architecture that is not served, or missing metadata.
    """
    kind = find_kind(file)
    heads, hidden = file.need("attention.head_count"), file.need("embedding_length")
    if not isinstance(heads, int):
        raise ValueError(f"{file.paths[0]}: layers of different heads are not served")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    config = dict(
        model_type=kind.model_type,
        architectures=[kind.class_name],
        hidden_size=hidden,
        intermediate_size=file.need("feed_forward_length"),
        num_hidden_layers=file.need("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=file.get("attention.head_count_kv", heads),
        head_dim=file.get("attention.key_length", hidden // heads),
        max_position_embeddings=file.need("context_length"),
        rms_norm_eps=file.need("attention.layer_norm_rms_epsilon"),
        rope_theta=file.get("rope.freq_base", 10_000.0),
        # Of the tokens there are; the metadata may count others.
        vocab_size=len(tokens) if tokens else file.need("vocab_size"),
        tie_word_embeddings="output.weight" not in file.tensors,
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        torch_dtype="bfloat16",
    )
    scaling = _read_scaling(file)
    if scaling:
        config["rope_scaling"] = scaling
    return config | (kind.read(file) if kind.read else kind.says)


def find_kind(file: GGUFile) -> Kind:
    """Return the row of a file's architecture, or refuse it by name."""
    if file.architecture not in KINDS:
        raise ValueError(
            f"{file.paths[0]} holds a model of the architecture {file.architecture!r}; "
            f"of GGUF files {', '.join(KINDS)} are served: take the model's safetensors"
        )
    return KINDS[file.architecture]


def _read_scaling(file: GGUFile) -> dict[str, Any] | None:
    """Return how positions are scaled, None if they are not."""
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        # What Llama 3 makes of its settings, worked out: a factor a pair of components.
        each = [float(factor) for factor in np.ravel(dequantize(factors))]
        length = file.need("context_length")
        return dict(
            rope_type="longrope",
            short_factor=each,
            long_factor=each,
            attention_factor=1.0,
            original_max_position_embeddings=length,
        )
    scaling = file.get("rope.scaling.type")
    if scaling in (None, "none"):
        return None
    if scaling not in ("linear", "yarn"):
        raise ValueError(f"{file.paths[0]}: RoPE scaling {scaling!r} is not served")
    found = dict(rope_type=scaling, factor=file.need("rope.scaling.factor"))
    original = file.get("rope.scaling.original_context_length")
    if original is not None:
        found["original_max_position_embeddings"] = original
    return found


def _read_gemma2(file: GGUFile) -> dict[str, Any]:
    return _read_gemma(file, every=2) | dict(
        attn_logit_softcapping=file.get("attn_logit_softcapping", 50.0),
        final_logit_softcapping=file.get("final_logit_softcapping", 30.0),
    )


def _read_gemma3(file: GGUFile) -> dict[str, Any]:
    ropes = _read_gemma(file, every=6)
    # Only layers without a window are turned as the file says.
    full = dict(rope_theta=file.get("rope.freq_base", 1e6))
    ropes["rope_scaling"] = dict(
        full_attention=full | (_read_scaling(file) or dict(rope_type="default")),
        sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
    )
    return ropes


def _read_gemma(file: GGUFile, every: int) -> dict[str, Any]:
    """Read windows of all layers but one of so many, and the scale of scores."""
    layers, heads = file.need("block_count"), file.need("attention.head_count")
    head_dim = file.need("attention.key_length")
    # The largest of each generation divides by what a head has of the hidden size.
    is_largest = layers == {2: 46, 6: 62}[every]
    full, windowed = "full_attention", "sliding_attention"
    return dict(
        sliding_window=file.need("attention.sliding_window"),
        layer_types=[windowed if (i + 1) % every else full for i in range(layers)],
        query_pre_attn_scalar=file.need("embedding_length") // heads
        if is_largest
        else head_dim,
    )


NO_WINDOW = dict(use_sliding_window=False)
KINDS = {
    "llama": Kind("llama", "LlamaForCausalLM", is_permuted=True),
    "qwen2": Kind("qwen2", "Qwen2ForCausalLM", says=NO_WINDOW),
    "qwen3": Kind("qwen3", "Qwen3ForCausalLM", says=NO_WINDOW),
    "gemma2": Kind("gemma2", "Gemma2ForCausalLM", _read_gemma2, norm_offset=1.0),
    "gemma3": Kind("gemma3_text", "Gemma3ForCausalLM", _read_gemma3, norm_offset=1.0),
}
