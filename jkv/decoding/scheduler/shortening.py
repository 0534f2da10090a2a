"""Sequences that drop cached tokens: pressed prompts and rolling contexts.

With a press each prompt is pruned to a budget of tokens once it is computed, and its
samples fork from the result. With `Roll` a sequence that fills the longest context
drops its oldest tokens after the first ones, and goes on.

Lengths of prompts and sequences count all tokens; *slots* count the cached ones. A
preempted sequence is computed again from its tokens: it drops the same ones at the same
lengths.

Symbols: B sequences, W places, C kept tokens, L layers, K kv heads, N slots.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jkv.decoding.model.steps import GenerationConfig, Roll
from jkv.decoding.sequences.blocks import count_cached
from jkv.operations import gather, when, while_loop
from jkv.press import Press, top_tokens
from jkv.state import NO_SEQUENCE, Cache, GroupLayer
from jkv.status import UsageError
from jkv.verbs.observing import read_queries
from jkv.verbs.pruning import prune
from jkv.verbs.reading import read


class Shortening(NamedTuple):
    """How sequences drop tokens; static."""

    press: Press | None
    budget: int  # tokens of a pressed prompt; 0 without a press
    roll: Roll | None
    most: int  # slots of a sequence
    observed: int = 0  # queries that a rule gets

    @classmethod
    def of(cls, cache: Cache, config: GenerationConfig) -> Self:
        """Return the options of a loop, checked for a cache."""
        press, budget, roll = config.press, config.budget, config.roll
        named = "press" if roll is None else "roll"
        if not cache.metadata.sequences.pruned.is_there:
            raise UsageError(
                f"{named} needs a cache with pruning=True; create it with "
                f"CacheConfig(pruning=True)"
            )
        if config.exact_shape is not None and press is not None:
            raise UsageError(
                "press is not supported with exact=, as scores have no fixed shape; "
                "omit one of them"
            )
        groups = cache.metadata.block_groups
        observed = max(each.observed.width for each in groups) if press else 0
        found = cls(press, budget or 0, roll, cache.max_context_length, observed)
        if roll is not None:
            found._check_roll(cache, roll, config.num_samples)
        elif found.budget < (fewest := _count_visible(cache)):
            raise UsageError(
                f"budget must be at least {fewest}, the tokens of the cache's sliding "
                f"windows, got {found.budget}"
            )
        return found

    def _check_roll(self, cache: Cache, roll: Roll, num_samples: int) -> None:
        if roll.step % cache.block_size:
            raise UsageError(
                f"step of jkv.Roll must be a multiple of the block size "
                f"{cache.block_size}, got {roll.step}"
            )
        kept = self.most - roll.step
        if kept < max(roll.first, _count_visible(cache)):
            raise UsageError(
                f"jkv.Roll(first={roll.first}, step={roll.step}) must leave the first "
                f"tokens and sliding windows of {self.most} slots; lower step, or "
                f"raise max_context_length"
            )
        if num_samples > 1:
            raise UsageError(
                f"roll is not supported with num_samples={num_samples}, whose prompts "
                f"stay whole; omit one of them"
            )

    def slots(
        self, prompt_lengths: jax.Array, sequence_lengths: jax.Array
    ) -> jax.Array:
        """Return the slots of sequences at their ends, i32[...]."""
        if self.roll is not None:
            return jnp.minimum(sequence_lengths, self.most)
        cut = jnp.where(sequence_lengths > prompt_lengths, self._cut(prompt_lengths), 0)
        return sequence_lengths - cut

    def bound(self, slots: jax.Array) -> jax.Array:
        """Return slots, i32[...], at most those of the longest context."""
        return slots if self.roll is None else jnp.minimum(slots, self.most)

    def peak(self, prompt_lengths: jax.Array, sequence_lengths: jax.Array) -> jax.Array:
        """Return the most slots of sequences while they are computed, i32[...]."""
        slots = self.slots(prompt_lengths, sequence_lengths)
        if self.roll is not None:
            return slots
        return jnp.maximum(slots, jnp.minimum(prompt_lengths, sequence_lengths))

    def shared(self, prompt_lengths: jax.Array) -> jax.Array:
        """Return the slots of computed prompts, from which samples fork, i32[...]."""
        return prompt_lengths - self._cut(prompt_lengths)

    def _cut(self, prompt_lengths: jax.Array) -> jax.Array | int:
        """Return the tokens that a press drops from prompts, i32[...]."""
        if self.press is None:
            return 0
        return jnp.maximum(prompt_lengths - self.budget, 0)

    def findable(self, sequences: jax.Array, prompt_lengths: jax.Array) -> jax.Array:
        """Return prefixes to look up, i32[B, X]; of a pressed sequence its prompt.

        Without the observed tokens, but one: the last token never hits.
        """
        if self.press is None:
            return sequences
        if self.observed:
            prompt_lengths = prompt_lengths - (self.observed - 1)
        position = jnp.arange(sequences.shape[1], dtype=jnp.int32)[None]
        return jnp.where(position < prompt_lengths[:, None], sequences, -1)

    def limit(
        self,
        counts: jax.Array,  # i32[W], rows of each place
        done: jax.Array,  # i32[W], tokens computed
        prompt_lengths: jax.Array,  # i32[W]
        slots: jax.Array,  # i32[W], cached tokens
    ) -> jax.Array:
        """Shorten the rows of a step to end where tokens are to be dropped, i32[W]."""
        if self.roll is not None:
            return jnp.minimum(counts, self.most - slots)
        rest = prompt_lengths - done
        return jnp.where(rest > 0, jnp.minimum(counts, rest), counts)

    def make_room(self, cache: Cache, seq_ids: jax.Array) -> tuple[Cache, jax.Array]:
        """Roll the sequences without a slot left, i32[W]; return the refused, bool[W].

        A roll needs a block only to copy a shared one.
        """
        if self.roll is None:
            return cache, jnp.zeros(seq_ids.shape, bool)
        first, step = self.roll.first, self.roll.step
        slot = jnp.arange(self.most - step, dtype=jnp.int32)
        kept = jnp.where(slot < first, slot, slot + step)[None]
        due = count_cached(cache, seq_ids) >= self.most

        def drop(cache: Cache, seq_ids: jax.Array) -> Cache:
            each = jnp.broadcast_to(kept, (seq_ids.shape[0], kept.shape[1]))
            return prune(cache, seq_ids, each, kept.shape[1])[0]

        named = jnp.where(due, seq_ids, NO_SEQUENCE)
        cache = when(jnp.any(due), drop, cache, named)
        return cache, due & (count_cached(cache, named) >= self.most)

    def press_prompts(
        self, cache: Cache, seq_ids: jax.Array, is_due: jax.Array
    ) -> Cache:
        """Prune the prompts just computed, bool[W], one at a time."""
        press = self.press
        if press is None:
            return cache
        is_due &= count_cached(cache, seq_ids) > self.budget
        Carry = tuple[Cache, jax.Array]

        def trip(carry: Carry) -> Carry:
            cache, left = carry
            place = jnp.argmax(left).astype(jnp.int32)
            seq_id = gather(seq_ids, place)
            kept = choose_tokens(cache, press, seq_id, self.budget)
            cache, _ = prune(cache, seq_id[None], kept, self.budget)
            return cache, left.at[place].set(False)

        return while_loop(lambda carry: jnp.any(carry[1]), trip, (cache, is_due))[0]


def choose_tokens(
    cache: Cache, press: Press, seq_id: jax.Array, num_kept: int
) -> jax.Array | tuple[jax.Array, ...]:
    """Return the best tokens of one sequence by a rule, given its observed queries.

    A tuple as `prune` takes it, i32[1, L, K, C] for each group without a window; i32[1,
    C] of the newest tokens if all have windows.
    """
    length = gather(cache.metadata.context_lengths, seq_id)[None]
    groups, found = cache.metadata.groups, []
    for number in cache.metadata.block_numbers:
        if groups[number].window.length is not None:
            continue

        def choose(layer: jax.Array, number: int = number) -> jax.Array:
            keys, values, _ = read(cache, GroupLayer(number, layer), seq_id)
            keys, values = (x.astype(jnp.float32)[None] for x in (keys, values))
            queries = _read_queries(cache, GroupLayer(number, layer), seq_id)
            scores = press.scores(keys, values, queries, length)
            return top_tokens(scores, num_kept, length, num_kept)[0]

        layers = jnp.arange(len(cache.layers_of(number)), dtype=jnp.int32)
        found.append(jax.lax.map(choose, layers)[None])
    if not found:
        rank = jnp.arange(num_kept, dtype=jnp.int32)[None]
        return length[:, None] - num_kept + rank
    return tuple(found)


def _read_queries(
    cache: Cache, layer: GroupLayer, seq_id: jax.Array
) -> jax.Array | None:
    """Return the newest queries of a sequence, f32[1, W, H, D]; None without any."""
    if not cache.metadata.groups[layer.group].observed.width:
        return None
    return read_queries(cache, layer, seq_id).queries


def _count_visible(cache: Cache) -> int:
    """Return the most slots that a sliding window of the cache needs; 1 without."""
    windows = [group.window for group in cache.metadata.block_groups]
    needs = [w.length - 1 + w.num_sink_tokens for w in windows if w.length is not None]
    return max([1, *needs])
