"""A request: what was asked, what came of it, and what its reader gets."""
