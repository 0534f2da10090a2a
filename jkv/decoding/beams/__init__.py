"""Beam search inside one jit."""
