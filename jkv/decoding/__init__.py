"""Loops that turn a model and a cache into text, each inside one jit."""

from jkv.decoding.beams.progress import BeamSearch, BeamStatistics
from jkv.decoding.beams.search import beam_search
from jkv.decoding.extension import extend
from jkv.decoding.generation import generate
from jkv.decoding.interventions import add_prompts, cancel
from jkv.decoding.model import Model
from jkv.decoding.options import Sampling
from jkv.decoding.progress import GenerationState
from jkv.decoding.results import FinishReason, Generation, Statistics
from jkv.decoding.sampling import filter_logits, sample
from jkv.decoding.scheduling.rows import spread_row_counts
from jkv.decoding.scoring import score
from jkv.decoding.selection import select_best
from jkv.decoding.speculation.options import DraftModel, PromptLookup
from jkv.decoding.windows import begin, decode, prefill

__all__ = [
    "BeamSearch",
    "BeamStatistics",
    "DraftModel",
    "FinishReason",
    "Generation",
    "GenerationState",
    "Model",
    "PromptLookup",
    "Sampling",
    "Statistics",
    "add_prompts",
    "beam_search",
    "begin",
    "cancel",
    "decode",
    "extend",
    "filter_logits",
    "generate",
    "prefill",
    "sample",
    "score",
    "select_best",
    "spread_row_counts",
]
