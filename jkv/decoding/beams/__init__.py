"""Beam search: several texts of a prompt, those that score best, inside one jit."""
