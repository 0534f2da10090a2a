"""What formats cost in perplexity; what they give follows from their bytes.

`benchmarks/accuracy.py` measures it. Other models and texts differ:
`jkv.measure_formats` tells of yours.
"""

MODELS = ("SmolLM2 135M", "Gemma 3 270M")

# By the dtypes of keys and values: per cent of each model's perplexity in float32.
COSTS = {
    ("int8", "int8"): (0.1, 0.4),
    ("float8_e4m3fn", "float8_e4m3fn"): (0.8, 0.3),
    ("int8", "int4"): (1.0, 0.7),
    ("int4", "int4"): (7.7, 13.3),
}


def tell_cost(dtype: str, value_dtype: str) -> str:
    """Say what they cost, such as "+1.0% on SmolLM2 135M, +0.5% on Gemma 3 270M"."""
    costs = zip(COSTS[dtype, value_dtype], MODELS, strict=True)
    return ", ".join(f"{cost:+.1f}% on {model}" for cost, model in costs)
