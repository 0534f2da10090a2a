"""Blocks of pools, one kind of part of a model: plans, copies and contents."""
