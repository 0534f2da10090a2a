"""A checkpoint with settings alone."""

import json

# Expected sizes of well-known models, by hand.
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
    """A checkpoint's folder with nothing but these settings."""
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path
