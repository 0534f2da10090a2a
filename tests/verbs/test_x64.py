"""Verbs keep 32-bit types if 64-bit types are enabled in JAX."""

import jax
import jax.numpy as jnp
from support.small_caches import small_cache, write_tokens

import jkv


def test_every_verb_keeps_its_types_under_x64():
    with jax.enable_x64(True):
        cache = small_cache(prefix_caching=True)
        before = [leaf.dtype for leaf in jax.tree.leaves(cache)]
        prompts = jnp.arange(10)[None]

        def cycle(_, cache):
            cache, opened = jkv.allocate(cache, 2, tokens=prompts)
            cache, batch = jkv.append(
                cache, opened.seq_ids, 9, capacity=12, tokens=jnp.arange(12)
            )
            cache = write_tokens(cache, batch, jnp.arange(12))
            cache, forked = jkv.fork(cache, opened.seq_ids)
            cache, _ = jkv.truncate(cache, forked.seq_ids, 3)
            cache, _ = jkv.reorder(cache, opened.seq_ids, forked.seq_ids)
            cache, _ = jkv.touch(cache, forked.seq_ids)
            cache = jkv.evict_cached(cache, 1)
            cache, _ = jkv.evict(cache, 7)
            cache, _ = jkv.evict_older_than(cache, 0)
            return jkv.free(cache, opened.seq_ids)[0]

        # `fori_loop` requires equal carry types; tracing suffices to check them.
        lowered = jax.jit(lambda cache: jax.lax.fori_loop(0, 5, cycle, cache)).lower(
            cache
        )
        after = jax.tree.leaves(lowered.out_info)
        assert [leaf.dtype for leaf in after] == before


def test_prune_keeps_its_types_under_x64():
    with jax.enable_x64(True):
        cache = small_cache(prefix_caching=True, pruning=True)
        before = [leaf.dtype for leaf in jax.tree.leaves(cache)]

        def cycle(_, cache):
            cache, opened = jkv.allocate(cache, 0)
            cache, _ = jkv.append(cache, opened.seq_ids, 9, capacity=9)
            kept = jnp.arange(7)[None] + 1
            cache, _ = jkv.prune(cache, opened.seq_ids, kept, 6)
            cache, _ = jkv.prune(cache, opened.seq_ids, kept[:, None, None], 3)
            return jkv.free(cache, opened.seq_ids)[0]

        lowered = jax.jit(lambda cache: jax.lax.fori_loop(0, 5, cycle, cache)).lower(
            cache
        )
        after = jax.tree.leaves(lowered.out_info)
        assert [leaf.dtype for leaf in after] == before
