"""What mixes the tokens of a layer that keeps a state instead of keys and values.

`mixer.py` says what each of them tells; `MIXERS` names them.
"""

from .delta_layer import DELTA_RULE
from .mixer import Arrays, Mixer

__all__ = ["MIXERS", "Arrays", "Mixer"]

# By the names that `DecoderConfig.mixers` has.
MIXERS: dict[str, Mixer] = {"delta_rule": DELTA_RULE}
