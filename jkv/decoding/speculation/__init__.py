"""Speculative decoding: tokens are guessed, and checked several at a time."""
