"""Blocks of pools, one kind of part of a model: their plans, copies and contents."""
