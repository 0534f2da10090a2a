"""Extension: continues open sequences and leaves them open.

`generate` opens and frees its sequences; here they belong to the caller: chats with
several turns, agents that read tool results, branches of a search. The steps are those
of `generate` with all sequences seated: none is freed or preempted.

Symbols: B sequences, P most new tokens given, G most tokens generated.
"""

import dataclasses
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.decoding.arguments.loop_arguments import Arguments, DecodingOptions
from jkv.decoding.model.drafter import Drafter
from jkv.decoding.model.runner import Runner
from jkv.decoding.model.steps import ExactShape, GenerationConfig, Model, Roll
from jkv.decoding.sampling.draws import Sampling
from jkv.decoding.sampling.next_token import (
    Bounds,
    begin_rows,
    judge_prompts,
    resume_rows,
)
from jkv.decoding.scheduler.hidden import recall_last_tokens
from jkv.decoding.scheduler.queue import make_queue
from jkv.decoding.scheduler.state import (
    GenerationState,
    Places,
    RetainedPrompt,
    note_sequences,
)
from jkv.decoding.sequences import blocks
from jkv.decoding.sequences.blocks import BlockSize, Held
from jkv.decoding.sequences.prompts import Prompts
from jkv.decoding.sequences.results import FinishReason, Generation
from jkv.decoding.speculation.loop import begin_speculation, run_steps
from jkv.logits_processors import LogitsProcessor
from jkv.metadata import requests
from jkv.metadata.part import Demand
from jkv.metadata.requests import Integers
from jkv.operations import gather
from jkv.signatures import set_defaults
from jkv.state import NO_SEQUENCE, Cache
from jkv.state.entry import takes_cache
from jkv.verbs.lookups import context_lengths, next_positions


class ExtensionFields(TypedDict, total=False):
    """Keyword arguments of `extend`."""

    max_new_tokens: int
    chunk_size: int
    row_counts: tuple[int, ...] | None
    exact: ExactShape
    roll: Roll | None
    limits: Integers | None
    stop_tokens: Integers | None
    stop_sequences: requests.IntegerRows | None
    variants: Integers | None
    spans: requests.IntegerRows | None
    cacheable_spans: bool
    max_span: int | None
    extra_ids: int
    sampling: Sampling
    logits_processor: LogitsProcessor | None
    speculate: Drafter | None
    processor_state: Any  # from an earlier result


set_defaults(
    ExtensionFields, Prompts.of, GenerationConfig, DecodingOptions, processor_state=None
)


@takes_cache(argument=2)
def extend(
    model: Model,
    params: Any,
    cache: Cache,
    seq_ids: Integers,  # i32[B]
    tokens: requests.IntegerRows | Prompts,  # i32[B, P]
    *,
    generation_config: GenerationConfig | None = None,
    options: DecodingOptions | None = None,
    **fields: Unpack[ExtensionFields],
) -> tuple[Cache, Generation]:
    """Append tokens to open sequences, continue them and leave them open.

    Afterwards the cache holds the old tokens, the given ones, and all generated ones
    but the last. Pass that one first in the next call; passed alone, it continues the
    completion, so that a host can stream it in pieces. After NOTHING_ALLOWED and
    NAN_LOGITS the last one is cached, too.

    A sequence without room for its new tokens is refused: it is unchanged, with reason
    CONTEXT_FULL or OUT_OF_BLOCKS. A closed or duplicate sequence gets CANCELLED. If
    blocks run out later, the sequence finishes with OUT_OF_BLOCKS and keeps its tokens.
    `jkv.jitted.extend` is this function jitted with the cache donated.

    Args:
      model: see `Model`; hashable, as it is static under jit.
      params: the model's weights.
      cache: with the open sequences.
      seq_ids: i32[B]; -1 is padding.
      tokens: i32[B, P], the tokens not in the cache yet, at least one each; -1 past the
        end. Or a list of token ids for each, or `Prompts`.
      generation_config: `max_new_tokens`; `chunk_size` and `row_counts`, for the given
        tokens; `exact`, with at most W sequences; and `roll`. No other field. Static.
      options: sampling, processors and speculation. Random numbers depend on the seed
        and the position in this call. The repetition penalty and a `PromptLookup` use
        the tokens given and generated in this call, stop sequences only the generated
        ones. A drafter that needs hidden states computes the last cached tokens again,
        if the cache records tokens.
      fields: the fields of `GenerationConfig`, `DecodingOptions` and `Prompts.of` as
        keyword arguments; and `processor_state` of an earlier result, to continue its
        logits processor, which then skips the given tokens.

    Returns:
      The cache and a `Generation`.

    Raises:
      ValueError: at trace time, for arguments of a wrong shape or type, or a model with
        logits other than [B, V].

    Example:
      >>> import jax, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> cache, opened = jkv.allocate(cache, [0])
      >>> cache, answer = jkv.extend(count_on, None, cache, opened.seq_ids, [[5, 6, 7]],
      ...     max_new_tokens=4, stop_tokens=[9])
      >>> answer.tokens.tolist(), jkv.context_lengths(cache).tolist()
      ([[8, 9, -1, -1]], [4, 0, 0, 0])
      >>> cache, answer = jkv.extend(count_on, None, cache, opened.seq_ids, [[9, 40]],
      ...     max_new_tokens=2)
      >>> answer.tokens.tolist(), jkv.context_lengths(cache).tolist()
      ([[41, 42]], [7, 0, 0, 0])
    """
    args = Arguments.of(
        "extend", tokens, generation_config, options, fields, ExtensionFields
    )
    options = args.options
    names = "max_new_tokens", "chunk_size", "row_counts", "exact", "roll"
    args.config.check_only("extend", *names)
    (ids,) = requests.broadcast(seq_ids=seq_ids)
    runner = Runner(model, params)
    state = _begin(runner, cache, jnp.asarray(ids), args)
    if (left := fields.get("processor_state")) is not None:
        begun = resume_rows(
            options.logits_processor, state.result.processor_state, left
        )
        result = state.result._replace(processor_state=begun)
        state = dataclasses.replace(state, result=result)
    if state.recomputes_last:
        cache, state = recall_last_tokens(cache, state)
    cache, state = run_steps(
        runner,
        cache,
        state,
        options.choice(),
        lambda state, _: jnp.any(state.is_running),
        options.speculate,
    )
    return cache, state.result


def _begin(
    runner: Runner,
    cache: Cache,
    seq_ids: jax.Array,  # i32[B]
    args: Arguments,
) -> GenerationState:
    """Return a state with every open sequence seated."""
    given, stops, config, options = args
    runner = runner._replace(drafter=options.speculate)
    num_sequences, exact = given.lengths.shape[0], config.exact_shape
    sizes, why = {"B": len(seq_ids)}, "a row for each sequence"
    expect("tokens", given.tokens, "B P", sizes, why=why)
    if exact is not None:
        exact.check_fits("the number of sequences", num_sequences)
    num_places, row_counts = config.resolve(num_sequences, given.tokens.size)
    most = cache.max_context_length
    slots = gather(context_lengths(cache), seq_ids)
    before, room = gather(next_positions(cache), seq_ids), most - slots
    shortening = args.find_shortening(cache) if config.shortens else None
    lengths = slots + given.lengths
    if shortening is not None:  # rolls without end
        room = jnp.full_like(room, jnp.iinfo(jnp.int32).max)
        lengths = shortening.bound(lengths)
    size = blocks.find_block_size(cache, row_counts)
    groups = cache.metadata.block_groups
    num_blocks = tuple(jnp.int32(group.num_blocks) for group in groups)
    bounds = Bounds(room, size, num_blocks, shortening)
    vocabulary = runner.count_vocabulary(cache, num_places)
    checks = vocabulary, options.logits_processor, row_counts[-1]
    reasons = judge_prompts(given, bounds, *checks)
    reasons = _judge(cache, seq_ids, lengths, reasons, size)
    is_running = reasons == FinishReason.RUNNING
    places = Places.of_open(jnp.where(is_running, seq_ids, NO_SEQUENCE), num_places)
    divergence = cache.metadata.index.find_divergence_after(
        cache.metadata, seq_ids, slots, given.tokens
    )
    if divergence is not None:
        divergence = jnp.pad(divergence, (0, num_places - num_sequences))
    begun = begin_rows(options.logits_processor, given, 1)
    none = jnp.zeros((num_sequences,), bool)
    state = GenerationState(
        result=Generation.empty(reasons, config.max_new_tokens, begun),
        prompts=given,
        stops=stops,
        places=places,
        queue=make_queue(jnp.arange(num_sequences, dtype=jnp.int32), none),
        retained=RetainedPrompt.none(),
        seen=jnp.zeros((num_places, vocabulary), bool),
        num_blocks=num_blocks,
        most_running=places.num_running,
        seating_needs=tuple(jnp.zeros((), jnp.int32) for _ in num_blocks),
        speculation=None,
        divergence=divergence,
        before=before,
        room=room,
        shortening=shortening,
        row_counts=row_counts,
        exact=exact,
    )
    lane = jnp.where(places.is_running, jnp.arange(num_places), num_places)
    state = note_sequences(state, lane.astype(jnp.int32))
    return begin_speculation(runner, cache, state)


def _judge(
    cache: Cache,
    seq_ids: jax.Array,  # i32[B]
    lengths: jax.Array,  # i32[B], tokens of each sequence with the given ones
    reasons: jax.Array,  # i32[B], why the given tokens are refused
    block_size: BlockSize,  # blocks of a sequence
) -> jax.Array:
    """Return why sequences are not continued, i32[B], in order, as `append` would."""
    groups, running = cache.metadata.block_groups, jnp.int32(FinishReason.RUNNING)
    reasons = jnp.where(
        requests.is_live_once(cache.metadata, seq_ids),
        reasons,
        jnp.int32(FinishReason.CANCELLED),
    )
    needs = blocks.to_take(lengths, Held.of(cache, seq_ids), block_size)
    lacks = [
        (Demand.of(group, jnp.where(reasons == running, need, 0)),)
        for group, need in zip(groups, needs, strict=True)
    ]
    agreed = requests.agree(lacks)
    return jnp.where(agreed.no_block, jnp.int32(FinishReason.OUT_OF_BLOCKS), reasons)
