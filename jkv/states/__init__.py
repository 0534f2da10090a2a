"""States of fixed size, the other kind of part: their plans, moves and copies."""
