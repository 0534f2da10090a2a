"""Block diffusion with DiffusionGemma: `checkpoint.py` reads it, `loop.py` denoises."""
