"""What a trainer compares: log-probabilities of the rollout, and of its own pass."""
