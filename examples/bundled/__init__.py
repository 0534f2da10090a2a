"""The bundled model: corpus, forward pass, training and evaluation."""
