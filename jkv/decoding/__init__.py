"""Decoding loops over a model and a cache, each inside one jit.

Start with `generation.generate` and `scheduler.step.advance`, the step that all loops
share: it admits and preempts sequences (`scheduler`), calls the model (`model`), draws
the next tokens (`sampling`) under logits processors, and verifies draft
tokens (`speculation`). `sequences` has prompts and results, `scoring` and `beams` the
loops of their own.
"""

from typing import TYPE_CHECKING

from jkv.lazy import imports_later

if TYPE_CHECKING:  # imported on first use
    from jkv.decoding.arguments.loop_arguments import DecodingOptions
    from jkv.decoding.beams.search import beam_search
    from jkv.decoding.exactness import ExactDifference, ExactReport, check_exact
    from jkv.decoding.extension import extend
    from jkv.decoding.format_accuracy import FormatAccuracy, measure_formats
    from jkv.decoding.generation import begin, decode, generate, prefill
    from jkv.decoding.model.drafter import Drafter
    from jkv.decoding.model.runner import spread_row_counts
    from jkv.decoding.model.steps import GenerationConfig, Model, Roll
    from jkv.decoding.sampling.best_of import select_best
    from jkv.decoding.sampling.draws import (
        Sampling,
        filter_logits,
        sample,
        spread_seeds,
    )
    from jkv.decoding.scheduler.admission import add_prompts
    from jkv.decoding.scheduler.release import cancel, preempt
    from jkv.decoding.scheduler.state import GenerationState
    from jkv.decoding.scoring.scores import score
    from jkv.decoding.sequences.prompts import Prompts
    from jkv.decoding.sequences.results import (
        BeamSearch,
        BeamStatistics,
        FinishReason,
        Generation,
        Statistics,
    )
    from jkv.decoding.sequences.trajectory_tree import TrajectoryTree
    from jkv.decoding.speculation.draft_model import DraftModel
    from jkv.decoding.speculation.draft_step import DraftStep
    from jkv.decoding.speculation.prompt_lookup import PromptLookup

__getattr__ = imports_later(
    __name__,
    {
        "jkv.decoding.arguments.loop_arguments": "DecodingOptions",
        "jkv.decoding.beams.search": "beam_search",
        "jkv.decoding.exactness": "ExactDifference ExactReport check_exact",
        "jkv.decoding.extension": "extend",
        "jkv.decoding.format_accuracy": "FormatAccuracy measure_formats",
        "jkv.decoding.generation": "begin decode generate prefill",
        "jkv.decoding.model.drafter": "Drafter",
        "jkv.decoding.model.runner": "spread_row_counts",
        "jkv.decoding.model.steps": "GenerationConfig Model Roll",
        "jkv.decoding.sampling.best_of": "select_best",
        "jkv.decoding.sampling.draws": "Sampling filter_logits sample spread_seeds",
        "jkv.decoding.scheduler.admission": "add_prompts",
        "jkv.decoding.scheduler.release": "cancel preempt",
        "jkv.decoding.scheduler.state": "GenerationState",
        "jkv.decoding.scoring.scores": "score",
        "jkv.decoding.speculation.draft_model": "DraftModel",
        "jkv.decoding.speculation.draft_step": "DraftStep",
        "jkv.decoding.speculation.prompt_lookup": "PromptLookup",
        "jkv.decoding.sequences.prompts": "Prompts",
        "jkv.decoding.sequences.results": (
            "BeamSearch BeamStatistics FinishReason Generation Statistics"
        ),
        "jkv.decoding.sequences.trajectory_tree": "TrajectoryTree",
    },
)

__all__ = [
    "BeamSearch",
    "BeamStatistics",
    "DraftModel",
    "DraftStep",
    "Drafter",
    "ExactDifference",
    "ExactReport",
    "FinishReason",
    "FormatAccuracy",
    "Generation",
    "GenerationState",
    "DecodingOptions",
    "Model",
    "PromptLookup",
    "Prompts",
    "Roll",
    "Sampling",
    "Statistics",
    "GenerationConfig",
    "TrajectoryTree",
    "add_prompts",
    "beam_search",
    "begin",
    "cancel",
    "check_exact",
    "decode",
    "extend",
    "filter_logits",
    "generate",
    "measure_formats",
    "preempt",
    "prefill",
    "sample",
    "score",
    "select_best",
    "spread_row_counts",
    "spread_seeds",
]
