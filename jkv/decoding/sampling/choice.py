"""How tokens are chosen: what steers a text, then sampling from what that leaves."""

from typing import NamedTuple

from jkv.decoding.sampling.options import Sampling
from jkv.steering import Steering


class Choice(NamedTuple):
    """How the tokens of N sequences are chosen."""

    sampling: Sampling
    steering: Steering | None = None
