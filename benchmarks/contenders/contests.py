"""Workloads of `rollouts.py` by size, with their contenders and targets."""

import dataclasses
import pathlib
from collections.abc import Callable

from contenders import workloads
from contenders.workloads import BUNDLED, Workload

SAMPLES = 8  # of each prompt of ShareGPT

# Module and class of each contender.
CONTENDERS = {
    "jkv": ("of_jkv", "Queue"),
    "jkv, refilled by the host": ("of_jkv", "Refilled"),
    "jkv, refilled more often": ("of_jkv", "RefilledOften"),
    "jkv, each sample reads the prompt": ("of_jkv", "Apart"),
    "jkv, engine": ("of_jkv", "Served"),
    "tunix, vanilla sampler": ("of_tunix", "Vanilla"),
    "transformers, padded": ("of_transformers", "Padded"),
    "transformers, continuous": ("of_transformers", "Continuous"),
    "transformers, static cache": ("of_transformers", "Static"),
    "transformers, static, one thread": ("of_transformers", "OneThread"),
    "transformers, static, compiled": ("of_transformers", "Compiled"),
}


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a run."""

    minutes: int  # of all workloads; no round starts that would exceed it
    rounds: int  # upper limit; at least one
    running: int  # sequences at one time
    prompts: int  # of ShareGPT
    shorten: int  # divisor of their lengths
    requests: int  # with nano-vllm's lengths
    shorten_requests: int
    alone: int  # prompt and new tokens of a single request
    long_prompts: int = 32
    long_tokens: int = 1000  # tokens per long prompt
    large: dict[str, int] = dataclasses.field(default_factory=dict)  # of the model


SIZES = {
    "whole": Size(58, 3, 64, 256, 8, 256, 16, 256),
    "quick": Size(12, 1, 64, 64, 8, 64, 16, 128, 16),
    # A smoke test; its figures are not written.
    "tiny": Size(
        *(12, 1, 16, 4, 16, 12, 32, 16),
        long_prompts=2,
        long_tokens=64,
        large=dict(num_hidden_layers=2, intermediate_size=512),
    ),
}


@dataclasses.dataclass(frozen=True)
class Contest:
    """A workload, and the targets of jkv: speedups over each contender."""

    title: str
    share: float  # share of the minutes
    draw: Callable[[Size, pathlib.Path], Workload]
    reach: dict[str, float | None]  # None for no target
    # Bounds on counts of any contender.
    counts: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


def _draw_sharegpt(size: Size, large: pathlib.Path) -> Workload:
    del large
    return workloads.draw_conversations(
        prompts=size.prompts,
        samples=SAMPLES,
        running=size.running,
        shorten=size.shorten,
    )


def _draw_random(size: Size, large: pathlib.Path) -> Workload:
    return workloads.draw_lengths(
        large,
        requests=size.requests,
        running=size.running,
        shorten=size.shorten_requests,
    )


ALONE: dict[str, float | None] = {
    "transformers, static cache": 1.0,
    "transformers, static, one thread": 1.0,
    "transformers, static, compiled": 1.0,
}
CONTESTS = {
    "sharegpt": Contest(
        "prompts of ShareGPT, 8 samples of each",
        0.47,
        _draw_sharegpt,
        {
            "jkv, refilled by the host": 1.3,
            "jkv, refilled more often": 1.3,
            "jkv, engine": None,
            "tunix, vanilla sampler": 3.0,
            "transformers, padded": 2.0,
            "transformers, continuous": 2.0,
        },
        {
            "busy while queued %": {"at_least": 95.0},
            "prompt computed": {"at_most": 1 / SAMPLES},
            "host % of a window": {"at_most": 5.0},
        },
    ),
    "long": Contest(
        "prompts of 1,000 tokens, 8 samples of each",
        0.15,
        lambda size, _: workloads.draw_long_prompts(
            prompts=size.long_prompts,
            samples=SAMPLES,
            running=size.running,
            num_tokens=size.long_tokens,
        ),
        {
            "jkv, each sample reads the prompt": None,
            "tunix, vanilla sampler": 8.0,
            "transformers, padded": None,
        },
    ),
    "random": Contest(
        "requests of nano-vllm's lengths, 69M parameters",
        0.2,
        _draw_random,
        {
            "tunix, vanilla sampler": 2.0,
            "transformers, padded": 2.0,
            "transformers, continuous": 2.0,
        },
    ),
    "alone": Contest(
        "one request alone, the bundled model",
        0.08,
        lambda size, _: workloads.ask_alone(BUNDLED, num_tokens=size.alone, repeats=5),
        ALONE,
    ),
    "alone-large": Contest(
        "one request alone, 69M parameters",
        0.1,
        lambda size, large: workloads.ask_alone(
            large, num_tokens=size.alone // 2, repeats=2
        ),
        ALONE,
    ),
}
