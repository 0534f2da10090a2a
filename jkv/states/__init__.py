"""States of fixed size, the other kind of part: plans, moves, and verbs of its own."""
