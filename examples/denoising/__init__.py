"""Block diffusion with DiffusionGemma: `checkpoint.py` loads it, `loop.py` denoises."""
