"""Log-probabilities of completions and trajectory trees with shared prefixes."""
