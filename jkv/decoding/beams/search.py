"""Beam search in one jit: the public function and its arguments.

Symbols: Q prompts, K beams of each, P most prompt tokens, G most new tokens.
"""

import dataclasses
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp

from jkv.decoding.arguments.loop_arguments import Arguments
from jkv.decoding.beams.branches import SearchState
from jkv.decoding.beams.hypotheses import EarlyStopping, Rules
from jkv.decoding.beams.rounds import Searcher, run_round
from jkv.decoding.model.runner import Runner
from jkv.decoding.model.steps import GenerationConfig, Model
from jkv.decoding.sampling.next_token import Bounds, begin_rows, judge_prompts
from jkv.decoding.sequences.blocks import count_free_blocks, find_block_size
from jkv.decoding.sequences.prompts import Prompts, Stops, as_stop_tokens
from jkv.decoding.sequences.results import BeamSearch
from jkv.logits_processors import LogitsProcessor
from jkv.metadata.requests import IntegerRows, Integers, check_counts
from jkv.operations import while_loop
from jkv.signatures import set_defaults
from jkv.state import Cache
from jkv.state.entry import takes_cache
from jkv.status import UsageError

_STOPS = "stop_tokens must be i32[E], shared by all prompts; omit stop_sequences"


class SearchFields(TypedDict, total=False):
    """Keyword arguments of `beam_search`."""

    length_penalty: jax.Array | float
    early_stopping: EarlyStopping
    num_return: int
    max_new_tokens: int
    chunk_size: int
    salts: Integers
    variants: Integers | None
    stop_tokens: Integers
    logits_processor: LogitsProcessor | None


set_defaults(
    SearchFields,
    Prompts.of,
    GenerationConfig,
    length_penalty=1.0,
    early_stopping=False,
    num_return=1,
    logits_processor=None,
)


@takes_cache(argument=2)
def beam_search(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: IntegerRows | Prompts,  # i32[B, P]
    *,
    num_beams: int,
    generation_config: GenerationConfig | None = None,
    **fields: Unpack[SearchFields],
) -> tuple[Cache, BeamSearch]:
    """Search for the most likely completions of B prompts with beam search.

    Completions and scores equal those of `generate(num_beams=...)` in Hugging Face
    transformers: the score is the sum of log-probabilities, divided by the number of
    new tokens to the power of `length_penalty`. A prompt is computed once and its beams
    share their common prefix; a branching beam copies only a partly filled block.
    `jkv.jitted.beam_search` is this function jitted with the cache donated; without
    donation every call copies the pool.

    If blocks or rows run out, the search of the last prompt is preempted and starts
    over when the others have finished. A search therefore ends with OUT_OF_BLOCKS or
    OUT_OF_SEQUENCES only if it would not fit alone, and returns its best completions so
    far.

    Args:
      model: see `Model`; hashable, as it is static under jit.
      params: the model's weights.
      cache: may hold other sequences, which are unchanged.
      prompts: i32[B, P], -1 past the end of each, or a list of token ids for each; an
        empty prompt is not started.
      num_beams: running beams of each prompt, K; one is greedy search. Static.
      generation_config: `max_new_tokens` and `chunk_size`; no other field. Static.
      fields: keyword arguments: `max_new_tokens` and `chunk_size` instead of
        `generation_config`; `salts`, `variants` and shared `stop_tokens` of
        `Prompts.of`; and

        * `length_penalty`, f32[] or float: above 0 it favours long completions, below 0
          short ones; default 1.0.
        * `early_stopping`: when to stop a search with K finished hypotheses. True: at
          once. False, the default: when the best beam, at its length, scores no better
          than the worst of them. "never": like False, but with a length penalty above 0
          the best beam is scored at G tokens. Static.
        * `num_return`: completions to return of each prompt, at most K, default 1;
          static.
        * `logits_processor`: a logits processor, as for `generate`. A search with all
          tokens of all beams masked ends with its finished hypotheses; without any,
          with its beams and NOTHING_ALLOWED.

    Returns:
      The cache, with all sequences of this call freed, and a `BeamSearch`. A search
      ends with STOP when its hypotheses cannot improve, with LENGTH or CONTEXT_FULL
      when its beams cannot grow.

    Raises:
      ValueError: at trace time, for arguments of a wrong shape, type or size, or a
        model with logits other than [B, V].

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> table = (2.0 * jnp.eye(10, k=1)).at[:, 9].add(1.0)
      >>> def spell(params, tokens, cache, batch):
      ...     return table[tokens][batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> cache, found = jkv.beam_search(spell, None, cache, [[1, 2]], num_beams=2,
      ...     max_new_tokens=4, stop_tokens=[9], num_return=2)
      >>> found.tokens.tolist()
      [[[3, 4, 5, 6], [3, 4, 5, 9]]]
    """
    if as_stop_tokens(fields.get("stop_tokens", ())).ndim > 1:
        raise UsageError(_STOPS)
    args = Arguments.of(
        "beam_search", prompts, generation_config, None, fields, SearchFields
    )
    given, stops, config, options = args
    if given.spans is not None:
        raise UsageError(
            "spans must be None for beam_search, which computes prompts causally; "
            "sample with generate"
        )
    logits_processor, num_return = options.logits_processor, fields.get("num_return", 1)
    config.check_only("beam_search", "max_new_tokens", "chunk_size")
    check_counts(num_beams=num_beams, num_return=num_return)
    rules = _make_rules(num_beams, config.max_new_tokens, stops, fields)
    if logits_processor is not None:
        rules = rules._replace(num_end_tokens=logits_processor.num_end_tokens)
    if num_return > num_beams:
        raise UsageError(
            f"num_return must be at most num_beams, got {num_return} and {num_beams}; "
            f"raise num_beams"
        )
    num_rows = max(given.lengths.shape[0], min(config.chunk_size, given.tokens.size))
    size = find_block_size(cache, (num_rows,))
    bounds = Bounds(cache.max_context_length, size, count_free_blocks(cache))
    runner = Runner(model, params)
    vocabulary = runner.count_vocabulary(cache, given.lengths.shape[0] * num_beams)
    reasons = judge_prompts(given, bounds, vocabulary, logits_processor, num_rows)
    state = SearchState.begin(given, reasons, num_beams, config.max_new_tokens)
    state = dataclasses.replace(
        state, processor_state=begin_rows(logits_processor, given, num_beams)
    )
    searcher = Searcher(runner, rules, num_rows, vocabulary, size, logits_processor)
    cache, state = while_loop(
        lambda carry: jnp.any(carry[1].is_open),
        lambda carry: run_round(searcher, *carry),
        (cache, state),
    )
    tokens, lengths, scores = (each[:, :num_return] for each in state.hypotheses)
    found = BeamSearch(tokens, lengths, scores, state.reasons, state.statistics)
    return cache, found


def _make_rules(
    num_beams: int, max_new_tokens: int, stops: Stops, fields: SearchFields
) -> Rules:
    early_stopping = fields.get("early_stopping", False)
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise UsageError(
            f'early_stopping must be True, False or "never", got {early_stopping!r}'
        )
    if stops.tokens.shape[0] != 1 or stops.sequences is not None:
        raise UsageError(_STOPS)
    penalty = jnp.asarray(fields.get("length_penalty", 1.0), jnp.float32)
    if penalty.ndim:
        raise UsageError(
            f"length_penalty must be one number, got shape {list(penalty.shape)}"
        )
    # One beam is greedy search: its first finished hypothesis is the result.
    stops_at_once = True if num_beams == 1 else early_stopping
    return Rules(num_beams, max_new_tokens, stops.tokens[0], penalty, stops_at_once)
