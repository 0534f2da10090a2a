"""GGUF files: a file is unpacked into a folder like any other checkpoint's.

The folder holds the files of a Hugging Face checkpoint beside its weights (config.json,
tokenizer.json, the chat template), made of the file's own metadata, and names the
tensors' places; they stay in the file and are dequantized one at a time, when they are
read. So no reader of a folder depends on GGUF but `pretrained/files.py`.
"""

from .folders import find_folder

__all__ = ["find_folder"]
