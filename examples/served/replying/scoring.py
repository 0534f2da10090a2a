"""Log-probabilities of given sequences: `jkv.score` of a trajectory tree.

Texts share the segments of their common prefix, as the answers to one question do.
Trees are padded to few sizes, each of which is compiled when it first comes.
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

MOST_TOP = 20  # alternatives at each place, as in the API
LEAST_ROWS, LEAST_SEGMENTS = 64, 16
MOST_LOGITS = 2**28  # bytes of one call, unless one text alone takes more


class Scored(NamedTuple):
    """The model's scores of a text of P tokens.

    Place i has the tokens before it as context, from none to all of them: place 0 has
    no score.
    """

    logprobs: list[float]  # [P], of each token; NaN of the first
    top_tokens: np.ndarray[Any, Any]  # i32[P + 1, MOST_TOP], the most likely first
    top_logprobs: np.ndarray[Any, Any]  # f32[P + 1, MOST_TOP]

    def list_top(self, place: int, count: int) -> list[tuple[int, float]]:
        """Return the most likely tokens at a place, and their log-probabilities."""
        tokens, logprobs = self.top_tokens[place], self.top_logprobs[place]
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))[:count]


class Scorer:
    """Scores texts. Any thread may call `score`; one does at a time.

    Attributes:
        params: the model's weights from now on.
    """

    def __init__(self, model: Any, params: Any, config: Any) -> None:
        """Keep the model, its weights, and the sizes of its cache."""
        self.params = params
        self._length = config.max_context_length
        self._program = jax.jit(functools.partial(_score, model, config))
        self._vocabulary = model.config.vocab_size
        self._lock = threading.Lock()

    def score(self, texts: Sequence[Sequence[int]]) -> list[Scored]:
        """Return the scores of each text, of one token or more."""
        found: dict[int, Scored] = {}
        with self._lock:
            for numbers in self._deal(texts):
                part = [tuple(texts[i]) for i in numbers]
                found |= zip(numbers, self._score_tree(part), strict=True)
        return [found[i] for i in range(len(texts))]

    def _deal(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Deal texts to calls; neighbours in the alphabet share most."""
        most = max(LEAST_ROWS, MOST_LOGITS // (4 * self._vocabulary))
        parts: list[list[int]] = []
        num_rows: int = most + 1
        before: Sequence[int] = ()
        for number in sorted(range(len(texts)), key=lambda i: tuple(texts[i])):
            text = texts[number]
            num_new = len(text) - (_count_common(before, text) if parts else 0)
            if num_rows + num_new > most:
                parts.append([])
                num_rows, num_new = 0, len(text)
            parts[-1].append(number)
            num_rows, before = num_rows + num_new, text
        return parts

    def _score_tree(self, texts: list[tuple[int, ...]]) -> list[Scored]:
        segments, parents, paths = grow(texts)
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
        for text in texts:
            rows = np.concatenate([rows_of[segment] for segment in paths[text]])
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
    """Return a scorer; None for models with states: each tree needs a program."""
    config = as_grouped(config)
    return None if config.state_groups else Scorer(model, params, config)


def grow(
    texts: Sequence[tuple[int, ...]],
) -> tuple[list[list[int]], list[int], dict[tuple[int, ...], list[int]]]:
    """Return a tree that holds each common prefix of the texts once.

    Returns:
        The tokens of each segment, its parent's number (-1 for none), and the segments
        of each text.
    """
    ordered = sorted(set(texts))
    segments: list[list[int]] = []
    parents: list[int] = []
    paths: dict[tuple[int, ...], list[int]] = {}
    # Texts with a common prefix of this length, the tokens of a path of segments.
    todo: list[tuple[list[tuple[int, ...]], int, list[int]]] = [(ordered, 0, [])]
    while todo:
        alike, depth, path = todo.pop()
        if len(alike[0]) == depth:  # the shortest is the first
            paths[alike[0]] = path
        longer = [text for text in alike if len(text) > depth]
        for _, group in itertools.groupby(longer, key=lambda text: text[depth]):
            same = list(group)
            end = _count_common(same[0], same[-1])
            parents.append(path[-1] if path else -1)
            segments.append(list(same[0][depth:end]))
            todo.append((same, end, [*path, len(segments) - 1]))
    return segments, parents, paths


def _score(
    model: Any, config: Any, params: Any, tree: jkv.TrajectoryTree
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return of each row its token's log-probability, and the most likely behind it."""
    told: list[tuple[jax.Array, jax.Array]] = []

    def note(params: Any, tokens: jax.Array, cache: Any, batch: Any) -> Any:
        logits, cache = model(params, tokens, cache, batch)
        normalised = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        told.append(jax.lax.top_k(normalised, MOST_TOP))
        return logits, cache

    logprobs = jkv.score(note, params, tree, config=config)
    ((values, tokens),) = told
    return logprobs, tokens, values


def _count_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _round_up(count: int, least: int) -> int:
    """Return a power of two."""
    return max(least, 2 ** math.ceil(math.log2(max(count, 1))))
