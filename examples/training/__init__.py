"""Log-probabilities for a trainer: of the rollout, and of its own pass."""
