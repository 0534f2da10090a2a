"""Log-probabilities of given sequences, by `jkv.score` of a trajectory tree.

Sequences share the segments of common prefixes, such as one question with several
answers. Trees are padded to a few sizes; each size is compiled at its first use.
"""

import functools
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.config import as_grouped

MOST_TOP = 20  # top logprobs per position, as in the API
LEAST_ROWS, LEAST_SEGMENTS = 64, 16
MOST_LOGITS = 2**28  # bytes per call; one sequence may need more


class Scored(NamedTuple):
    """Scores of a sequence of P tokens.

    Position i is predicted from the i tokens before it; position 0 has no score.
    """

    logprobs: list[float]  # [P]; NaN for the first token
    top_tokens: np.ndarray[Any, Any]  # i32[P + 1, MOST_TOP], most likely first
    top_logprobs: np.ndarray[Any, Any]  # f32[P + 1, MOST_TOP]

    def list_top(self, place: int, count: int) -> list[tuple[int, float]]:
        """Return the `count` most likely tokens at a position and their logprobs."""
        tokens, logprobs = self.top_tokens[place], self.top_logprobs[place]
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))[:count]


class Scorer:
    """Scores sequences. Thread-safe; calls run one at a time.

    Attributes:
        params: the model's parameters; may be replaced.
    """

    def __init__(self, model: Any, params: Any, config: Any) -> None:
        """Store the model, its parameters and the cache configuration."""
        self.params = params
        self._length = config.max_context_length
        self._program = jax.jit(functools.partial(_score, model, config))
        self._vocabulary = model.config.vocab_size
        self._lock = threading.Lock()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Scored]:
        """Return the scores of each sequence; sequences must not be empty."""
        found: dict[int, Scored] = {}
        with self._lock:
            for numbers in self._deal(sequences):
                part = [tuple(sequences[i]) for i in numbers]
                found |= zip(numbers, self._score_tree(part), strict=True)
        return [found[i] for i in range(len(sequences))]

    def _deal(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        """Split sequences into calls, sorted so that neighbours share long prefixes."""
        most = max(LEAST_ROWS, MOST_LOGITS // (4 * self._vocabulary))
        parts: list[list[int]] = []
        num_rows: int = most + 1
        before: Sequence[int] = ()
        for number in sorted(range(len(sequences)), key=lambda i: tuple(sequences[i])):
            sequence = sequences[number]
            num_new = len(sequence) - (_count_common(before, sequence) if parts else 0)
            if num_rows + num_new > most:
                parts.append([])
                num_rows, num_new = 0, len(sequence)
            parts[-1].append(number)
            num_rows, before = num_rows + num_new, sequence
        return parts

    def _score_tree(self, sequences: list[tuple[int, ...]]) -> list[Scored]:
        segments, parents, paths = grow(sequences)
        tree = jkv.trees.pad(
            jkv.TrajectoryTree.of(segments, parents=np.array(parents)),
            num_rows=_round_up(sum(map(len, segments)), LEAST_ROWS),
            num_segments=_round_up(len(segments), LEAST_SEGMENTS),
            max_length=self._length,
        )
        logprobs, tokens, values = jax.device_get(self._program(self.params, tree))
        ends = np.cumsum(list(map(len, segments)))
        rows_of = [
            np.arange(e - len(s), e) for s, e in zip(segments, ends, strict=True)
        ]
        found = []
        for sequence in sequences:
            rows = np.concatenate([rows_of[segment] for segment in paths[sequence]])
            nothing = np.full_like(values[:1], np.nan)
            found.append(
                Scored(
                    logprobs[rows].tolist(),
                    np.concatenate([np.full_like(tokens[:1], -1), tokens[rows]]),
                    np.concatenate([nothing, values[rows]]),
                )
            )
        return found


def make_scorer(model: Any, params: Any, config: Any) -> Scorer | None:
    """Return a scorer; None for recurrent-state models, which compile once per tree."""
    config = as_grouped(config)
    return None if config.state_groups else Scorer(model, params, config)


def grow(
    sequences: Sequence[tuple[int, ...]],
) -> tuple[list[list[int]], list[int], dict[tuple[int, ...], list[int]]]:
    """Return a prefix tree of sequences.

    Returns:
        The tokens of each segment, the index of its parent (-1 for none), and the path
        of segments of each sequence.
    """
    ordered = sorted(set(sequences))
    segments: list[list[int]] = []
    parents: list[int] = []
    paths: dict[tuple[int, ...], list[int]] = {}
    # Groups of sequences with a common prefix: its length and its path of segments.
    todo: list[tuple[list[tuple[int, ...]], int, list[int]]] = [(ordered, 0, [])]
    while todo:
        alike, depth, path = todo.pop()
        if len(alike[0]) == depth:  # the shortest is first
            paths[alike[0]] = path
        longer = [sequence for sequence in alike if len(sequence) > depth]
        for _, group in itertools.groupby(longer, key=lambda sequence: sequence[depth]):
            same = list(group)
            end = _count_common(same[0], same[-1])
            parents.append(path[-1] if path else -1)
            segments.append(list(same[0][depth:end]))
            todo.append((same, end, [*path, len(segments) - 1]))
    return segments, parents, paths


def _score(
    model: Any, config: Any, params: Any, tree: jkv.TrajectoryTree
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each row's logprob, and the top tokens and logprobs after the row."""
    likeliest: list[tuple[jax.Array, jax.Array]] = []

    def note(params: Any, tokens: jax.Array, cache: Any, batch: Any) -> Any:
        logits, cache = model(params, tokens, cache, batch)
        normalised = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        likeliest.append(jax.lax.top_k(normalised, MOST_TOP))
        return logits, cache

    logprobs = jkv.score(note, params, tree, config=config)
    ((values, tokens),) = likeliest
    return logprobs, tokens, values


def _count_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _round_up(count: int, least: int) -> int:
    """Round up to a power of two."""
    return max(least, 2 ** math.ceil(math.log2(max(count, 1))))
