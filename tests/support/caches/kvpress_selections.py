"""Write `tests/fixtures/kvpress.npz`: selections of kvpress in a tiny random Llama.

Run by hand in a separate environment with kvpress 0.5.5 and transformers 5.2 (later
versions fail):

    python tests/support/caches/kvpress_selections.py

The file holds each layer's keys, values, newest rotated queries, moments of its
unrotated queries, and the tokens that five kvpress methods keep by layer and kv head.
"""

import pathlib

import numpy as np
import torch
from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    SnapKVPress,
    StreamingLLMPress,
)
from kvpress.utils import get_prerope_query_states
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

FILE = pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "kvpress.npz"
NUM_TOKENS, NUM_KEPT, SINKS, WINDOW, FUTURE, THETA = 60, 36, 4, 8, 32, 10_000.0


def main():
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        rope_theta=THETA,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    ratio = 1 - NUM_KEPT / NUM_TOKENS
    presses = {
        "streaming_llm": StreamingLLMPress(ratio, n_sink=SINKS),
        "knorm": KnormPress(ratio),
        "key_diff": KeyDiffPress(ratio),
        "snap_kv": SnapKVPress(ratio, window_size=WINDOW, kernel_size=5),
        "expected_attention": ExpectedAttentionPress(
            ratio, n_future_positions=FUTURE, n_sink=SINKS
        ),
    }
    seen = []
    for layer in model.model.layers:
        # kvpress hooks the attention and needs the model's rotary embedding there.
        layer.self_attn.rotary_emb = model.model.rotary_emb
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((module, args, kwargs)),
            with_kwargs=True,
        )
    # Repeated tokens would have keys of equal norm in the first layer.
    tokens = torch.randperm(64)[None, :NUM_TOKENS]
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    found = {name: [] for name in presses}
    arrays = {name: [] for name in ("keys", "values", "queries", "mean", "covariance")}
    with torch.no_grad():
        for index, (module, args, kwargs) in enumerate(seen):
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            keys, values = cache.layers[index].keys, cache.layers[index].values
            plain = get_prerope_query_states(module, hidden)  # [1, H, N, D]
            cos, sin = (each[:, None] for each in kwargs["position_embeddings"])
            rotated = plain * cos + rotate_half(plain) * sin
            later = plain[:, :, SINKS:]
            mean = later.mean(2, keepdim=True)
            centred = later - mean
            covariance = torch.einsum("bnsi,bnsj->bnij", centred, centred)
            arrays["keys"].append(keys[0].transpose(0, 1))
            arrays["values"].append(values[0].transpose(0, 1))
            arrays["queries"].append(rotated[0, :, -WINDOW:].transpose(0, 1))
            arrays["mean"].append(mean[0, :, 0])
            arrays["covariance"].append(covariance[0] / later.shape[2])
            for name, press in presses.items():
                scores = press.score(module, hidden, keys, values, None, kwargs)
                kept = scores.topk(NUM_KEPT, dim=-1).indices
                found[name].append(kept[0].sort(dim=-1).values)
    stacked = {name: torch.stack(each).numpy() for name, each in arrays.items()}
    kept = {f"kept_{name}": torch.stack(each).numpy() for name, each in found.items()}
    kept = {name: each.astype(np.uint8) for name, each in kept.items()}
    np.savez_compressed(FILE, **stacked, **kept)


if __name__ == "__main__":
    main()
