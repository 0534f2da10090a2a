"""Check that outputs are bit-identical under variations of batch and cache.

A model's rows may depend on their number or their neighbours outside of this package:
expert capacity, batch norms, kernels that tune tiles to the batch. So the variations of
serving and training are run and compared.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig
from jkv.decoding.extension import extend
from jkv.decoding.generation import generate
from jkv.decoding.model.steps import ExactShape, GenerationConfig, Model
from jkv.decoding.sampling.draws import GREEDY, Sampling
from jkv.decoding.sampling.next_token import sampling_of
from jkv.decoding.scoring.scores import score
from jkv.decoding.sequences.results import Generation
from jkv.metadata.requests import IntegerRows, as_prompts
from jkv.state import Cache
from jkv.state.entry import takes_cache
from jkv.states.verbs import read_state
from jkv.status import CacheError, raise_for_status
from jkv.verbs.allocation import allocate, free
from jkv.verbs.appending import append
from jkv.verbs.reading import read

Tokens = np.ndarray[Any, Any]


class ExactDifference(NamedTuple):
    """The first difference found."""

    variation: str  # a name of `ExactReport.played`
    sequence: int  # index of the prompt
    token: int  # index of the new token; for layer contents, of the whole sequence
    array: str  # "tokens", "logprobs", "keys", "values" or the name of a state array
    layer: int | None  # first layer with different contents; None: after all layers

    def __str__(self) -> str:
        where = "behind the last layer" if self.layer is None else f"layer {self.layer}"
        return (
            f"{self.variation}: {self.array} of sequence {self.sequence} differ first "
            f"at token {self.token}, from {where} on"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactReport:
    """Result of `check_exact`.

    Attributes:
      played: names of the variations.
      difference: the first difference, None if all outputs are bit-identical.
    """

    played: tuple[str, ...]
    difference: ExactDifference | None

    def raise_for_status(self) -> Self:
        """Return this report, or raise a `CacheError` that names the difference."""
        if self.difference is not None:
            raise CacheError(f"results are not bit-identical: {self.difference}")
        return self


# Arrays of a sequence in a layer, by name: keys and values [max_context_length, K, D],
# and state arrays [1, ...] after the last token.
Kept = dict[str, Tokens]


class _Played(NamedTuple):
    """Result of one prompt."""

    tokens: Tokens  # i32[G]
    logprobs: Tokens  # f32[G]
    kept: list[Kept] | None = None  # per layer; None: not read


@takes_cache(argument=2, on_host=True)
def check_exact(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: IntegerRows,  # i32[B, P]
    *,
    max_new_tokens: int = 8,
    sampling: Sampling = GREEDY,
    exact: ExactShape = True,
    config: CacheConfig | GroupedConfig | None = None,
) -> ExactReport:
    """Run variations of a generation with `exact` and compare the results bit by bit.

    The variations: prompts in reverse order; each alone; one at a time from a queue;
    with prefix cache hits, if the cache has an index; recomputed from the middle, as
    after a preemption; and `score` of the completions.

    Args:
      model: as for `generate`.
      params: the model's weights.
      cache: with room for all prompts and completions; it is not changed.
      prompts: i32[B, P] or a list of token ids for each, at most W; none empty.
      max_new_tokens: tokens to generate for each, at least 2.
      sampling: as for `generate`, scalars or B values.
      exact: as for `generate`.
      config: of the cache, for `score`, which is skipped without it.

    Returns:
      An `ExactReport` with the first difference.

    Raises:
      ValueError: for arguments that `generate` or `extend` refuse.

    Example:
      >>> import jax, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> report = jkv.check_exact(count_on, None, cache, [[5, 6, 7], [40]],
      ...     exact=(2, 4))
      >>> report.raise_for_status().difference is None
      True
    """
    generation_config = GenerationConfig(max_new_tokens, exact=exact)
    rows = np.asarray(as_prompts(prompts, "prompts")).tolist()
    sequences = [[token for token in row if token >= 0] for row in rows]
    player = _Player(model, params, cache, sequences, generation_config, sampling)
    numbers = list(range(len(sequences)))
    known = player.extend(numbers)
    plays: dict[str, Callable[[], list[_Played]]] = {
        "reverse order": lambda: player.extend(numbers[::-1]),
        "alone": lambda: [player.extend([i])[0] for i in numbers],
        "one at a time from a queue": player.generate,
        "computed anew from the middle": lambda: player.recompute(known),
    }
    if cache.metadata.index.is_there:
        plays["found in the cache"] = lambda: player.extend(numbers, again=True)
    if config is not None:
        plays["scored"] = lambda: player.score(known, config)
    for name, play in plays.items():
        difference = _compare(name, known, play())
        if difference is not None:
            break
    return ExactReport(played=tuple(plays), difference=difference)


class _Player(NamedTuple):
    """Arguments shared by all variations."""

    model: Model
    params: Any
    cache: Cache
    sequences: list[list[int]]
    generation_config: GenerationConfig
    sampling: Sampling

    def extend(self, chosen: list[int], *, again: bool = False) -> list[_Played]:
        """Continue the chosen prompts; with `again`, compute and free them before."""
        cache = self.cache
        if again:
            cache, _, ids = self._extend(cache, chosen)
            cache, _ = free(cache, ids)
        cache, result, ids = self._extend(cache, chosen)
        tokens, logprobs = np.asarray(result.tokens), np.asarray(result.logprobs)
        played = list(map(_Played, tokens, logprobs, _read_kept(cache, ids)))
        return [played[i] for i in np.argsort(chosen)]

    def _extend(
        self, cache: Cache, chosen: list[int]
    ) -> tuple[Cache, Generation, jax.Array]:
        given = [self.sequences[i] for i in chosen]
        cache, opened = raise_for_status(
            allocate(cache, [len(sequence) - 1 for sequence in given], tokens=given)
        )
        num_cached = np.asarray(opened.num_cached).tolist()
        rest = [sequence[n:] for sequence, n in zip(given, num_cached, strict=True)]
        most = max(map(len, self.sequences))
        rest = [sequence + [-1] * (most - len(sequence)) for sequence in rest]
        cache, result = _extend_jitted(
            self.model,
            self.params,
            cache,
            opened.seq_ids,
            jnp.asarray(rest, jnp.int32),
            generation_config=self.generation_config,
            sampling=self._sampling_of(chosen),
        )
        return cache, result, opened.seq_ids

    def _sampling_of(self, chosen: list[int]) -> Sampling:
        index = jnp.asarray(chosen, jnp.int32)
        return sampling_of(self.sampling, len(self.sequences), index)

    def generate(self) -> list[_Played]:
        """Continue the prompts one after the other in one call."""
        _, result = _generate_jitted(
            self.model,
            self.params,
            self.cache,
            self.sequences,
            generation_config=dataclasses.replace(
                self.generation_config, max_running=1
            ),
            sampling=self._sampling_of([*range(len(self.sequences))]),
        )
        return list(
            map(_Played, np.asarray(result.tokens), np.asarray(result.logprobs))
        )

    def recompute(self, known: list[_Played]) -> list[_Played]:
        """Compute prompts and all completion tokens but the last as new prompts."""
        sequences = [
            sequence + [token for token in played.tokens[:-1].tolist() if token >= 0]
            for sequence, played in zip(self.sequences, known, strict=True)
        ]
        config = dataclasses.replace(self.generation_config, max_new_tokens=1)
        again = self._replace(sequences=sequences, generation_config=config)
        found = again.extend([*range(len(sequences))])
        pairs = zip(known, found, strict=True)
        return [played._replace(kept=anew.kept) for played, anew in pairs]

    def score(
        self, known: list[_Played], config: CacheConfig | GroupedConfig
    ) -> list[_Played]:
        tokens = np.stack([played.tokens for played in known])
        found = _score_jitted(
            self.model,
            self.params,
            self.sequences,
            tokens,
            config=config,
            exact=self.generation_config.exact,
        )
        return list(map(_Played, tokens, np.asarray(found)))


_extend_jitted = jax.jit(extend, static_argnames=("model", "generation_config"))
_generate_jitted = jax.jit(generate, static_argnames=("model", "generation_config"))
_score_jitted = jax.jit(score, static_argnames=("model", "exact", "config"))


def _compare(
    variation: str, known: list[_Played], found: list[_Played]
) -> ExactDifference | None:
    """Return the first difference, by sequence, and by layer if contents were read."""
    for sequence, (one, other) in enumerate(zip(known, found, strict=True)):
        layers = zip(one.kept or (), other.kept or (), strict=False)
        for layer, (kept, again) in enumerate(layers):
            for name in kept:
                if (token := _find_other(kept[name], again[name])) is not None:
                    return ExactDifference(variation, sequence, token, name, layer)
        for name in ("tokens", "logprobs"):
            token = _find_other(getattr(one, name), getattr(other, name))
            if token is not None:
                return ExactDifference(variation, sequence, token, name, None)
    return None


def _find_other(one: Tokens, other: Tokens) -> int | None:
    """Return the first entry with different bits, of arrays [n, ...], or None."""
    arrays = map(np.ascontiguousarray, (one, other))
    bits = (each.view(np.uint8).reshape(len(each), -1) for each in arrays)
    differs = np.flatnonzero(np.any(np.not_equal(*bits), axis=1))
    return int(differs[0]) if differs.size else None


def _read_kept(cache: Cache, seq_ids: jax.Array) -> list[list[Kept]]:
    """Read the contents of each layer for open sequences."""
    kept: list[list[Kept]] = [[{} for _ in cache.layer_groups] for _ in seq_ids]
    _, nothing_new = append(cache, seq_ids, jnp.zeros_like(seq_ids), capacity=1)
    for layer, groups in enumerate(cache.layer_groups):
        is_state = [group not in cache.metadata.block_numbers for group in groups]
        states = read_state(cache, layer, nothing_new) if any(is_state) else {}
        for i, seq_id in enumerate(seq_ids):
            if not all(is_state):
                arrays = read(cache, layer, seq_id)[:2]
                names = "keys", "values"
                kept[i][layer] |= dict(zip(names, map(np.asarray, arrays), strict=True))
            for name, array in states.items():
                kept[i][layer][name] = np.asarray(array)[i : i + 1]
    return kept
