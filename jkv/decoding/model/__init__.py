"""The model: what it must be, and how rows of a step are run through it."""
