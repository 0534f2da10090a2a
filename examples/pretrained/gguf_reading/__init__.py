"""GGUF files, read as Hugging Face checkpoints.

A GGUF file is unpacked once into a folder with config.json, tokenizer.json and the chat
template, made from its metadata, and an index of its tensors. The weights stay in the
file; each tensor is dequantized when it is read. So only `pretrained/files.py` depends
on GGUF.
"""

from .folders import find_folder

__all__ = ["find_folder"]
