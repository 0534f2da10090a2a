"""Log-probabilities of texts that share what they begin with: trees of segments."""
