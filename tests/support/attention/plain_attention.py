"""Textbook attention, the reference for the implementations."""

import numpy as np


def attend_loop(operands, layer, *, scale=None, window=None, soft_cap=None, sinks=None):
    """Compute attention in float64 by row, head and token, without blocks."""
    num_heads, head_dim = operands.queries.shape[2:]
    scale = head_dim**-0.5 if scale is None else scale
    outputs, logs = [], []
    row = 0
    for request, length in enumerate(operands.query_lengths):
        keys = operands.keys[request][layer].astype(np.float64)
        values = operands.values[request][layer].astype(np.float64)
        context, num_kv_heads = keys.shape[:2]
        for position in range(context - length, context):
            for head in range(num_heads):
                if position < 0:  # sees no token
                    outputs.append(np.zeros(values.shape[-1]))
                    logs.append(-np.inf)
                    continue
                kv_head = head // (num_heads // num_kv_heads)
                first = 0 if window is None else max(0, position - window + 1)
                query = operands.queries[layer, row, head].astype(np.float64)
                scores = keys[first : position + 1, kv_head] @ query * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores)
                total = weights.sum()
                if sinks is not None:
                    total += np.exp(float(sinks[head]))
                outputs.append(weights @ values[first : position + 1, kv_head] / total)
                logs.append(np.log(total))
            row += 1
    value_dim = operands.values[0].shape[-1]
    return (
        np.array(outputs).reshape(row, num_heads, value_dim),
        np.array(logs).reshape(row, num_heads),
    )
