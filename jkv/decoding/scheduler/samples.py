"""Samples of a prompt share what was computed of it.

The first sample, the *leader*, computes the prompt; the others have places, but wait
until it is computed and then fork. When the last sample in the cache ends while others
still need the prompt, its row is handed over: to the oldest sample that has a place,
else to the *holder*, a sequence of the cache that has no place. Samples without a place
are the first that wait, so all of them are of one prompt, and one holder is enough.

Symbols: Q prompts, W places, K lanes.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.scheduler.places import Places
from jkv.state import NO_SEQUENCE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Holder:
    """A prompt that is kept in the cache for samples that wait."""

    seq_id: jax.Array  # i32[], its row in the cache, -1 if there is none
    prompt: jax.Array  # i32[], which prompt it has, any if there is none

    @classmethod
    def none(cls) -> "Holder":
        """Hold nothing."""
        return cls(seq_id=jnp.full((), NO_SEQUENCE, jnp.int32), prompt=jnp.int32(0))

    def holds(self, prompts: jax.Array) -> jax.Array:
        """Return which of these prompts, i32[K], it has, bool[K]."""
        return (self.seq_id >= 0) & (prompts == self.prompt)


class Pending(NamedTuple):
    """What can be done for the sequences that run but are not in the cache, bool[W]."""

    leads: jax.Array  # no sample of its prompt is in the cache or older: it computes
    forks: jax.Array  # its prompt is computed: it forks


def find_pending(
    places: Places,
    holder: Holder,  # of a prompt
    prompts: jax.Array,  # i32[W], the prompt of each place
    lengths: jax.Array,  # i32[W], its tokens
    # i32[W], tokens that the place's sequence has in the cache, -1 without one
    done: jax.Array,
    num_prompts: int,  # Q, static
) -> Pending:
    """Find what can be done for the sequences that run but are not in the cache."""
    pending = places.is_pending
    running = jnp.where(places.is_cached, prompts, num_prompts)
    most_done = jnp.full((num_prompts,), -1, jnp.int32)
    most_done = most_done.at[running].max(done, mode="drop")[prompts]
    is_held = holder.holds(prompts)
    oldest = jnp.full((num_prompts,), places.num_places, jnp.int32)
    waiting = jnp.where(pending, prompts, num_prompts)
    oldest = oldest.at[waiting].min(places.ages, mode="drop")[prompts]
    is_alone = (most_done < 0) & ~is_held
    return Pending(
        leads=pending & is_alone & (places.ages == oldest),
        forks=pending & ((most_done >= lengths) | is_held),
    )


class HandOver(NamedTuple):
    """Which sequences give their prompts to which places."""

    gives: jax.Array  # bool[W], ended sequences that are cut back, not freed
    receiver: jax.Array  # i32[W], the place that takes it, W: the holder does


def find_hand_over(
    places: Places,  # W of them, the ended ones still in theirs
    ended: jax.Array,  # bool[W]
    prompts: jax.Array,  # i32[W], the prompt of each place
    # bool[W], whether the place's sequence has all of its prompt in the cache
    is_whole: jax.Array,
    unfinished: jax.Array,  # i32[Q], samples of each prompt that have not ended
) -> HandOver:
    """Find the ended sequences whose prompt other samples still need."""
    num_prompts, nothing = unfinished.shape[0], places.num_places
    stays = places.is_running & ~ended

    def of(mask: jax.Array) -> jax.Array:
        return jnp.where(mask, prompts, num_prompts)

    none = jnp.zeros((num_prompts,), jnp.int32)
    num_cached = none.at[of(stays & places.is_cached)].add(1, mode="drop")
    num_running = none.at[of(stays)].add(1, mode="drop")
    youngest = jnp.full((num_prompts,), nothing, jnp.int32)
    heir = youngest.at[of(stays & ~places.is_cached)].min(places.ages, mode="drop")
    may_give = ended & places.is_cached & is_whole
    giver = youngest.at[of(may_give)].min(places.ages, mode="drop")

    is_last = may_give & (num_cached[prompts] == 0) & (places.ages == giver[prompts])
    has_heir = heir[prompts] < nothing
    is_wanted = unfinished[prompts] > num_running[prompts]
    place = jnp.arange(nothing, dtype=jnp.int32)
    by_age = jnp.zeros_like(place).at[places.ages].set(place)
    receiver = by_age.at[heir[prompts]].get(mode="fill", fill_value=nothing)
    return HandOver(is_last & (has_heir | is_wanted), receiver)
