"""Recurrent states of fixed size, one kind of part: plans, moves and verbs."""
