"""The decoder of `llama.py` in torch: a decode step over a contiguous cache.

A peer, as in torch's guide: static shapes, `scaled_dot_product_attention`, and the step
captured as a CUDA graph, so that the host launches once per step. All sequences are
equally long. Weights are bfloat16 in all runs.
"""

from collections.abc import Callable
from typing import Any

from gpu_torch import import_torch
from llama import Llama

REPLAYS = 10  # per sample


def make_torch_step(model: Llama, batch: int, context: int) -> Callable[[], None]:
    """Return a function that replays the captured step `REPLAYS` times and waits.

    Raises:
      NotImplementedError: torch is not installed, or has no GPU here.
    """
    torch = import_torch()
    step = make_step(model, batch, context, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        step()

    def replay() -> None:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()

    return replay


def make_step(model: Llama, batch: int, context: int, device: str) -> Callable[[], Any]:
    """Return a function that computes the token after `context`, i64[batch]."""
    import torch
    from torch.nn import functional

    def draw(*shape: int) -> Any:
        rows = torch.randn(*shape, device=device, dtype=torch.bfloat16)
        return rows * shape[0] ** -0.5

    layers = [
        {name: draw(*shape) for name, shape in model.matrices.items()}
        for _ in range(model.num_layers)
    ]
    shape = batch, model.num_kv_heads, context, model.head_dim
    caches = [(draw(*shape), draw(*shape)) for _ in layers]
    embedding = draw(model.vocabulary, model.width)
    head = draw(model.width, model.vocabulary)
    norm = torch.ones(model.width, device=device, dtype=torch.bfloat16)
    tokens = torch.zeros(batch, device=device, dtype=torch.int64)
    half = model.head_dim // 2
    powers = torch.arange(half, device=device, dtype=torch.float32) / half
    angles = (context - 1) * model.rope_base**-powers
    cos, sin = angles.cos(), angles.sin()

    def rotate(heads: Any) -> Any:
        first, second = heads.float().chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned, dim=-1).to(heads.dtype)

    def normalise(rows: Any) -> Any:
        return functional.rms_norm(rows, (model.width,), norm, 1e-5)

    def step() -> Any:
        hidden = embedding[tokens]
        for weights, (keys, values) in zip(layers, caches, strict=True):
            normed = normalise(hidden)
            query, key, value = (
                (normed @ weights[name]).view(batch, -1, 1, model.head_dim)
                for name in ("queries", "keys", "values")
            )
            keys[:, :, -1:], values[:, :, -1:] = rotate(key), value
            mixed = functional.scaled_dot_product_attention(
                rotate(query), keys, values, enable_gqa=True
            )
            hidden = hidden + mixed.reshape(batch, -1) @ weights["output"]
            normed = normalise(hidden)
            gate = functional.silu(normed @ weights["gate"])
            hidden = hidden + (gate * (normed @ weights["up"])) @ weights["down"]
        tokens.copy_((normalise(hidden) @ head).argmax(dim=-1))
        return tokens

    return step
