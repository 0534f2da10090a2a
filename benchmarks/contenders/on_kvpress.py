"""Perplexity of kvpress's presses, run by `pruning.py --kvpress` in its environment.

Requires kvpress 0.5.5 and transformers 5.2 with gguf. JSON on stdin has the model's
GGUF file, the tokens, and the number of tokens to prune to half.
"""

import functools
import json
import pathlib
import sys

import torch
from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    SnapKVPress,
    StreamingLLMPress,
)
from transformers import AutoModelForCausalLM, DynamicCache

RATIO = 0.5
PRESSES = {
    "streaming_llm": StreamingLLMPress(RATIO, n_sink=4),
    "knorm": KnormPress(RATIO),
    "key_diff": KeyDiffPress(RATIO),
    "snap_kv": SnapKVPress(RATIO, window_size=64, kernel_size=5),
    "expected_attention": ExpectedAttentionPress(
        RATIO, n_future_positions=512, n_sink=4
    ),
}


def make_masks(model, cache, positions):
    """Return the masks of the next tokens, as layers have different lengths."""
    num, masks = len(positions), {}
    for kind in ("full_attention", "sliding_attention"):
        kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
        if kind in kinds:
            cached = cache.layers[kinds.index(kind)].keys.shape[2]
            first = int(positions[0]) - cached
            distance = positions[:, None] - torch.arange(first, first + cached + num)
            visible = distance >= 0
            if kind == "sliding_attention":
                visible &= distance < model.config.sliding_window
            masks[kind] = torch.where(visible, 0.0, -torch.inf)[None, None]
    return masks if len(masks) > 1 else masks["full_attention"]


def measure(model, tokens, num_pruned, press):
    """Return the perplexity of the tokens after the pruned ones."""
    cache, hooks = DynamicCache(config=model.config), []
    press.post_init_from_model(model)
    for layer in model.model.layers:
        attention = layer.self_attn
        rotary = model.model.rotary_emb
        kinds = getattr(model.config, "layer_types", None)
        if kinds is None or not hasattr(rotary, "layer_types"):
            attention.rotary_emb = rotary
        else:  # Gemma's rotary embeddings differ by kind of layer
            kind = kinds[attention.layer_idx]
            attention.rotary_emb = functools.partial(rotary, layer_type=kind)
        if getattr(attention, "is_sliding", False):
            continue  # a sliding window is not pruned
        hooks.append(
            attention.register_forward_hook(press.forward_hook, with_kwargs=True)
        )
    found = model(tokens[None, :num_pruned], past_key_values=cache).logits[0, -1:]
    for hook in hooks:
        hook.remove()
    positions = torch.arange(num_pruned, len(tokens) - 1)
    given = dict(past_key_values=cache, position_ids=positions[None])
    masks = make_masks(model, cache, positions)
    more = model(tokens[None, num_pruned:-1], attention_mask=masks, **given).logits[0]
    logprobs = torch.log_softmax(torch.cat([found, more]).float(), dim=-1)
    chosen = logprobs.gather(1, tokens[num_pruned:, None])
    return float(torch.exp(-chosen.mean()))


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    given = json.load(sys.stdin)
    path = pathlib.Path(given["path"])
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tokens = torch.tensor(given["tokens"])
    found = {}
    for name, press in PRESSES.items():
        found[name] = measure(model, tokens, given["prompt"], press)
        print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
