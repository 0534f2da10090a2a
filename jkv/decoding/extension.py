"""Extension: open sequences go on, and stay open.

`generate` opens its sequences and frees them. Here they are the caller's: a chat whose
turns keep what was computed, an agent that reads the answer of a tool, the branches of
a search. One loop feeds the tokens that are new, in chunks; one decodes.

Symbols: B sequences, P most new tokens given, G most tokens generated, C of a chunk.
"""

from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp

from jkv.decoding.arguments.asked import Asked, How
from jkv.decoding.model.protocol import Model
from jkv.decoding.model.runner import Chunk, ChunkSizes, Runner, Unread, run_chunks
from jkv.decoding.model.steps import ExactShape, Steps
from jkv.decoding.sampling.draws import Choice
from jkv.decoding.sampling.next_token import (
    Bounds,
    Progress,
    choose_next,
    judge_prompts,
)
from jkv.decoding.sampling.options import Sampling
from jkv.decoding.steering.rows import begin_rows, resume_rows
from jkv.decoding.texts import blocks
from jkv.decoding.texts.blocks import BlockSize, Held
from jkv.decoding.texts.prompts import Prompts, find_texts
from jkv.decoding.texts.results import FinishReason, Generation
from jkv.indexing import gather, scatter
from jkv.metadata import requests
from jkv.metadata.part import Lack
from jkv.metadata.requests import Integers
from jkv.sharding.loops import when, while_loop
from jkv.signatures import set_defaults
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.state.entry import takes_cache
from jkv.status import Status, UsageError
from jkv.steering import Steering
from jkv.verbs.lookups import context_lengths


class OfExtension(TypedDict, total=False):
    """What `extend` takes by name of `Steps`, `How` and `Prompts.of`."""

    max_new_tokens: int
    chunk_size: int
    exact: ExactShape
    limits: Integers | None
    stop_tokens: Integers | None
    stop_sequences: requests.Texts | None
    variants: Integers | None
    sampling: Sampling
    steering: Steering | None
    steering_state: Any  # of a result


set_defaults(OfExtension, Prompts.of, Steps, How, steering_state=None)


@takes_cache(argument=2)
def extend(
    model: Model,
    params: Any,
    cache: Cache,
    seq_ids: Integers,  # i32[B]
    tokens: requests.Texts | Prompts,  # i32[B, P]
    *,
    steps: Steps | None = None,
    how: How | None = None,
    **fields: Unpack[OfExtension],
) -> tuple[Cache, Generation]:
    """Give open sequences their next tokens, continue them, and leave them open.

    Afterwards the cache holds what it held, the tokens given, and all generated ones
    but the last, which nothing has followed yet. Give that one in front of what comes
    next; alone, and the text just goes on, so that a host can show it in pieces.

    A sequence whose new tokens do not fit is refused: it stays as it was, and its
    reason is CONTEXT_FULL or OUT_OF_BLOCKS. One that is not open, or is named a second
    time, has CANCELLED. When blocks run out later, the sequence ends with OUT_OF_BLOCKS
    and keeps what it has. `jkv.jitted.extend` is this function jitted with the cache
    donated.

    Args:
      model: see `Model`; hashable, as it is static under jit.
      params: the model's weights.
      cache: where the sequences are open.
      seq_ids: i32[B]; -1 is padding.
      tokens: i32[B, P], what of each text is not in the cache yet, one token at least;
        -1 after the end. Or a list of token ids for each, or `Prompts`.
      steps: how many tokens are generated, `chunk_size`, in which those given are
        computed, and `exact`, of at most W sequences; nothing else. Static.
      how: how tokens are chosen, without guesses. Numbers are drawn by seed and place
        in this call; the repetition penalty counts the tokens given and generated in
        it, and stop sequences are looked for in those generated in it.
      fields: those of `Steps`, `How` and `Prompts.of` instead, each by its name; and
        `steering_state`, what an earlier result says of that name, to go on from there:
        the tokens given are no part of what is steered then.

    Returns:
      The cache and a `Generation`.

    Raises:
      ValueError: for arguments of a wrong shape or type, or a model whose logits are
        not [B, V], when it is traced.

    Example:
      >>> import jax, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, opened = jkv.allocate(cache, [0])
      >>> cache, answer = jkv.extend(count_on, None, cache, opened.seq_ids, [[5, 6, 7]],
      ...     max_new_tokens=4, stop_tokens=[9])
      >>> answer.tokens.tolist(), jkv.context_lengths(cache).tolist()
      ([[8, 9, -1, -1]], [4, 0])
      >>> cache, answer = jkv.extend(count_on, None, cache, opened.seq_ids, [[9, 40]],
      ...     max_new_tokens=2)
      >>> answer.tokens.tolist(), jkv.context_lengths(cache).tolist()
      ([[41, 42]], [7, 0])
    """
    asked = Asked.of("extend", tokens, steps, how, fields, OfExtension)
    given, stops, steps, how = asked
    steps.check_only("extend", "max_new_tokens", "chunk_size", "exact")
    if how.speculate is not None:
        raise UsageError("extend guesses no tokens: leave out speculate")
    (ids,) = requests.broadcast(seq_ids=seq_ids)
    ids = jnp.asarray(ids)
    num_sequences = given.lengths.shape[0]
    if ids.shape != (num_sequences,):
        raise ValueError(
            f"extend needs tokens for each of {ids.shape[0]} sequences, got "
            f"{num_sequences}"
        )
    before = gather(context_lengths(cache), ids)
    # What a text may still take.
    room = cache.max_context_length - before
    shape = steps.exact_shape
    if shape is None:
        size = min(max(1, steps.chunk_size // num_sequences), given.tokens.shape[1])
    else:
        shape.check_alone(None, steps.chunk_size)
        shape.check_fits("the number of sequences", num_sequences)
        size = shape.num_rows
    block_size = blocks.find_block_size(cache, (size,))
    groups = cache.metadata.block_groups
    num_blocks = tuple(jnp.int32(group.num_blocks) for group in groups)
    bounds = Bounds(room, block_size, num_blocks)
    runner = Runner(model, params, shape)
    vocabulary = runner.count_vocabulary(cache, num_sequences)
    reasons = judge_prompts(given, bounds, vocabulary, how.steering)
    reasons = _judge(cache, ids, before + given.lengths, reasons, block_size)
    begun = begin_rows(how.steering, given, 1)
    if (state := fields.get("steering_state")) is not None:
        begun = resume_rows(how.steering, begun, state)
    result = Generation.empty(reasons, steps.max_new_tokens, begun)
    choice = how.choice(None if shape is None else shape.num_requests)
    extension = _Extension(runner, ids, before, choice)
    progress = Progress(given, stops, bounds, result)
    cache, progress = extension.feed(cache, progress, size)
    cache, progress = extension.decode(cache, progress)
    return cache, progress.result


def _judge(
    cache: Cache,
    seq_ids: jax.Array,  # i32[B]
    lengths: jax.Array,  # i32[B], tokens of each text with those given
    reasons: jax.Array,  # i32[B], why what was given is not fed
    block_size: BlockSize,  # how many blocks a text takes
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
        (Lack.of(group, jnp.where(reasons == running, need, 0)),)
        for group, need in zip(groups, needs, strict=True)
    ]
    agreed = requests.agree(lacks)
    return jnp.where(agreed.no_block, jnp.int32(FinishReason.OUT_OF_BLOCKS), reasons)


class _Extension(NamedTuple):
    """What stays the same from step to step."""

    runner: Runner
    seq_ids: jax.Array  # i32[B]
    before: jax.Array  # i32[B], tokens that the sequences had
    choice: Choice

    def feed(
        self, cache: Cache, progress: Progress, most_each: int
    ) -> tuple[Cache, Progress]:
        """Feed what was given, at most so many tokens of each text at a time."""
        prompts, index = progress.prompts, cache.metadata.index
        sizes = ChunkSizes(prompts.lengths.shape[0] * most_each, most_each=most_each)
        if self.runner.exact is not None:
            sizes = ChunkSizes(self.runner.exact.num_rows)
        partings = index.find_partings_behind(
            cache.metadata, self.seq_ids, self.before, prompts.tokens
        )

        def find_tokens(text: jax.Array, position: jax.Array) -> jax.Array:
            column = position - self.before[text]
            return jnp.maximum(gather(prompts.tokens, (text, column)), 0)

        def count_left(progress: Progress, done: jax.Array) -> jax.Array:
            left = self.before + prompts.lengths - done
            return jnp.where(progress.is_running, left, 0)

        def note(cache: Cache, progress: Progress, chunk: Chunk) -> Progress:
            progress = _note_step(cache, progress, chunk.batch, is_prompt=True)
            return self.choose(progress, chunk.logits, chunk.is_whole)

        return run_chunks(
            self.runner,
            cache,
            Unread(self.seq_ids, find_tokens, partings=partings),
            progress,
            sizes,
            count_left=count_left,
            note=note,
        )

    def decode(self, cache: Cache, progress: Progress) -> tuple[Cache, Progress]:
        """Feed the newest token of each text until all have ended."""
        Carry = tuple[Cache, Progress]

        def step(carry: Carry) -> Carry:
            cache, progress = carry
            result, is_running = progress.result, progress.is_running
            newest = jnp.maximum(result.lengths - 1, 0)[:, None]
            tokens = jnp.take_along_axis(result.tokens, newest, axis=1)[:, 0]
            seq_ids = jnp.where(is_running, self.seq_ids, NO_SEQUENCE)
            tokens = jnp.maximum(tokens, 0)
            cache, batch, logits = self.runner.run(cache, seq_ids, tokens)
            progress = _note_step(cache, progress, batch, is_prompt=False)
            return cache, self.choose(progress, logits, is_running)

        return while_loop(
            lambda carry: jnp.any(carry[1].is_running), step, (cache, progress)
        )

    def choose(
        self, progress: Progress, logits: jax.Array, is_ready: jax.Array
    ) -> Progress:
        """Choose the next token of the texts that are in the cache whole, bool[B]."""
        is_ready &= progress.is_running
        num_sequences = is_ready.shape[0]
        sequences = jnp.arange(num_sequences, dtype=jnp.int32)
        seen = _find_seen(progress, logits.shape[1], self.choice.sampling)
        sequences = jnp.where(is_ready, sequences, num_sequences)
        result, *_ = choose_next(progress, logits, sequences, seen, self.choice)
        return progress._replace(result=result)


def _note_step(
    cache: Cache, progress: Progress, batch: Batch, *, is_prompt: bool
) -> Progress:
    """Count a step, and end the texts that found no block."""
    rows = jnp.sum(batch.query_lengths, dtype=jnp.int32)
    result = progress.result.add_counts(
        num_steps=jnp.int32(1),
        sequence_steps=jnp.sum(batch.query_lengths > 0, dtype=jnp.int32),
        prompt_tokens=rows if is_prompt else jnp.int32(0),
    )
    statistics = result.statistics
    peak = jnp.maximum(statistics.peak_blocks, blocks.count_used_blocks(cache))
    reason = jnp.int32(FinishReason.OUT_OF_BLOCKS)
    result = result._replace(
        reasons=jnp.where(batch.status != Status.OK, reason, result.reasons),
        statistics=statistics._replace(peak_blocks=peak),
    )
    return progress._replace(result=result)


def _find_seen(progress: Progress, vocabulary: int, sampling: Sampling) -> jax.Array:
    """Return the tokens of each text of this call, bool[B, V]; none without penalty."""
    sequences = jnp.arange(progress.result.lengths.shape[0], dtype=jnp.int32)

    def note(seen: jax.Array) -> jax.Array:
        tokens, _ = find_texts(progress.prompts, progress.result, sequences)
        tokens = jnp.where(tokens < 0, vocabulary, tokens)
        return scatter(seen, (sequences[:, None], tokens), True)

    seen = jnp.zeros((sequences.shape[0], vocabulary), bool)
    return when(jnp.any(jnp.asarray(sampling.repetition_penalty) != 1), note, seen)
