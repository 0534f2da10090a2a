"""Token mixers with a recurrent state.

`mixer.py` defines their interface; `MIXERS` lists them.
"""

from .convolved_heads import CONVOLVED_HEADS
from .delta_layer import DELTA_RULE
from .mamba2 import MAMBA2
from .mixer import Mixer
from .short_convolution import SHORT_CONVOLUTION

__all__ = ["MIXERS", "Mixer"]

# By their names in `DecoderConfig.mixers`.
MIXERS: dict[str, Mixer] = {
    "convolved_heads": CONVOLVED_HEADS,
    "delta_rule": DELTA_RULE,
    "mamba2": MAMBA2,
    "short_convolution": SHORT_CONVOLUTION,
}
