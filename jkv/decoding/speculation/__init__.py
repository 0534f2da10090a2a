"""Speculative decoding: draft tokens, verified several per step."""
