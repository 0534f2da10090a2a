"""Checkpoint folders that hold only config.json."""

import json

# Published sizes of well-known models.
LLAMA = dict(  # Llama 3.1 8B
    model_type="llama",
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    hidden_size=4096,
    max_position_embeddings=131_072,
    torch_dtype="bfloat16",
)


def folder(tmp_path, **settings):
    """Create a checkpoint folder with only this config.json."""
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path
