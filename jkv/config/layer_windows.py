"""Which layers of a model look back over a window only.

The cache keeps all tokens of every layer. A layer with a window of 1,024 tokens would
need no more than those: the difference is what another layout could save.
"""

from typing import Any, NamedTuple

# Kinds of layers whose keys are needed only so far back.
WINDOWED = {"sliding_attention", "chunked_attention"}

# Every how many-th layer sees everything, where the model type alone says it.
FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "exaone4": 4, "gemma3_text": 6}


class Windows(NamedTuple):
    """How many layers have a window, and its tokens."""

    num_layers: int
    length: int

    def count_needed(self, num_layers: int, context_length: int) -> int:
        """Return the tokens that all layers need of one sequence, summed over layers.

        Args:
          num_layers: those that keep keys and values, those with a window among them.
          context_length: tokens of the sequence.
        """
        windowed = min(self.num_layers, num_layers)
        seen = min(context_length, self.length)
        return (num_layers - windowed) * context_length + windowed * seen


def find_windows(model: dict[str, Any], num_layers: int) -> Windows | None:
    """Return the windows of a model's layers, None if all see everything.

    Args:
      model: the language model's settings, from a config.json.
      num_layers: layers that keep keys and values, the first of the model's.
    """
    length = model.get("sliding_window") or model.get("attention_chunk_size")
    if not isinstance(length, int) or not model.get("use_sliding_window", True):
        return None
    kinds = model.get("layer_types")
    every = model.get("sliding_window_pattern") or FULL_EVERY.get(
        str(model.get("model_type"))
    )
    first = model.get("max_window_layers") or 0
    if isinstance(kinds, list):
        windowed = sum(kind in WINDOWED for kind in kinds[:num_layers])
    elif isinstance(every, int):
        windowed = num_layers - num_layers // every
    else:
        windowed = max(num_layers - first, 0)
    return Windows(windowed, length) if windowed else None
