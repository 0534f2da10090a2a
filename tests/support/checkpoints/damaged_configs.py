"""Damaged copies of a config.json: each key is removed, or has another type."""

REMOVED = object()
DAMAGES = ("?", REMOVED, None, -1, [])
# Keys whose default, without the key, contradicts another key or a tensor.
NAMED_INSTEAD = {
    "draft_vocab_size": "'d2t'",
    "head_dim": "q_proj",
    "hidden_size": "embed_tokens",
    "hidden_size_per_layer_input": "vocab_size_per_layer_input",
    "intermediate_size": "gate_proj",
    "layers_block_type": "num_hidden_layers",
    "n_group": "num_experts_per_tok",
    "n_routed_experts": "n_group",
    "num_attention_heads": "q_proj",
    "num_expert_group": "n_group",
    "num_experts": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_key_value_heads": "k_proj",
    "per_layer_config": "q_proj",
    "qk_nope_head_dim": "partial_rotary_factor",
    "rope_type": "partial_rotary_factor",
    "speculators_model_type": "model_type",
    "topk_group": "num_experts_per_tok",
}


def list_damaged(raw, damages=DAMAGES):
    """Yield a key, its new value or `REMOVED`, and the file; also for nested keys."""
    for key, value in raw.items():
        if isinstance(value, dict):
            for name, damage, part in list_damaged(value, damages):
                yield name, damage, {**raw, key: part}
        for damage in damages:
            rest = {name: value for name, value in raw.items() if name != key}
            yield key, damage, rest if damage is REMOVED else {**raw, key: damage}


def assert_explained(error, key, damage):
    """Assert that an error names the key, or without it the one in `NAMED_INSTEAD`."""
    names = [key]
    if damage is REMOVED or damage is None:
        names.append(NAMED_INSTEAD.get(key, key))
    assert any(name in str(error) for name in names), (key, str(error))
