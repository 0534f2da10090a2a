"""From logits to tokens: options, filters, draws, and what ends a text."""
