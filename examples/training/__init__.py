"""Parts of the training examples: draft models, EAGLE-3 heads, and RL with tunix."""
