"""Random operations: sequences are opened, grown, forked and freed."""

import numpy as np

import jkv

from .cells import FIRST_COLOUR, HEIGHT, SIGNS, WIDTH

NUM_SEQUENCES, LONGEST, PROMPT, GROWTH = 24, 96, 56, 8  # all but the first in tokens

# Only metadata is drawn, so the cache has no storage.
CONFIG = jkv.CacheConfig(
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    num_blocks=HEIGHT * WIDTH,
    block_size=4,
    max_sequences=NUM_SEQUENCES,
    max_context_length=LONGEST,
    prefix_caching=True,
)


def append(cache, seq_ids, tokens):
    """Append rows of tokens, [B, Q], padded with -1, to sequences."""
    counts, width = np.sum(tokens >= 0, axis=1), tokens.shape[1]
    cache, batch = jkv.append(
        cache, seq_ids, counts, max_query_length=width, tokens=tokens.reshape(-1)
    )
    return jkv.commit(cache, batch)  # a model would first write and attend


def open_one(cache, prompt):
    """Open a sequence with a prompt; if the cache is full, evict cached blocks."""
    cache, opened = jkv.allocate(cache, PROMPT, tokens=prompt[None])
    seq_id, found = int(opened.seq_ids[0]), int(opened.num_cached[0])
    rest = np.pad(prompt[found:], (0, found), constant_values=-1)
    cache = append(cache, [seq_id], rest[None])
    if seq_id != jkv.NO_SEQUENCE:
        name = SIGNS[FIRST_COLOUR + seq_id]
        return cache, f"{name} opens, {found} of its {PROMPT} tokens were found"
    cache, gone = jkv.evict(cache, cache.num_blocks // 2)
    return cache, f"the cache is full, {np.sum(np.asarray(gone) >= 0)} are evicted"


def play(cache, num_steps, seed):
    """Yield the cache after each step, with a caption."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(1000, size=(3, PROMPT - 8))  # common prefixes of prompts
    for step in range(1, num_steps + 1):
        is_open = np.asarray(cache.metadata.is_open)
        kind = rng.choice(["open", "grow", "fork", "free"], p=[0.4, 0.3, 0.15, 0.15])
        if step % 25 == 0:
            cache, caption = jkv.compact(cache), "the pool is compacted"
        elif kind == "open" or not is_open.any():
            prompt = np.append(starts[rng.integers(3)], rng.integers(1000, size=8))
            cache, caption = open_one(cache, prompt)
        elif kind == "grow":
            grows = is_open & (np.asarray(cache.metadata.context_lengths) < LONGEST)
            seq_ids = np.where(grows, np.arange(NUM_SEQUENCES), jkv.NO_SEQUENCE)
            tokens = rng.integers(1000, size=(NUM_SEQUENCES, GROWTH))
            cache = append(cache, seq_ids, tokens)
            caption = f"{grows.sum()} sequences grow by {GROWTH} tokens"
        else:
            seq_id = int(rng.choice(np.flatnonzero(is_open)))
            name = SIGNS[FIRST_COLOUR + seq_id]
            cache = getattr(jkv, kind)(cache, seq_id)[0]
            caption = f"{name} is {'forked' if kind == 'fork' else 'freed'}"
        num_open = int(np.sum(np.asarray(cache.metadata.is_open)))
        yield cache, f"Step {step}: {caption}; {num_open} sequences are open"
