"""GGUF files: a file is unpacked into a folder like any other checkpoint's.

The folder holds what a Hugging Face checkpoint has beside its weights (config.json,
tokenizer.json, the chat template), made of the file's own metadata, and says where the
tensors lie; they stay in the file and are dequantized one at a time, when they are
asked for. So nothing that reads a folder knows of GGUF but `pretrained/files.py`.
"""

from .folders import find_folder

__all__ = ["find_folder"]
