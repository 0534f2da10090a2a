"""Trees as lists of (tokens, parent), and a dense model's scores of their sequences."""

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from support.models.small_attention_model import (
    DIM,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    dense_rows,
)

CONFIG = jkv.CacheConfig(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    block_size=4,
    num_blocks=1,
    max_sequences=1,
    max_context_length=1,
)
# Two roots; empty segments, segments within a block and over several blocks; a chain of
# five; siblings that start inside a block and at its end.
SEGMENTS = [
    ([3, 1, 4, 1, 5, 9], -1),
    ([2, 6], 0),
    ([5], 1),
    ([], 1),
    ([3, 5, 8, 9, 7, 9, 3, 2, 3], 2),
    ([8, 4], 3),
    ([6], 2),
    ([2, 6, 4, 3, 3], -1),
    ([8, 3, 2], 7),
    ([7, 9, 5, 0, 2], 7),
    ([8, 8], 4),
    ([4, 1, 9, 7, 1, 6], 0),
]
NUM_ROWS, NUM_SEGMENTS, LONGEST = 48, 14, 32  # shapes shared by all trees
ROOT_ROWS = [0, 21]  # rows of the roots' first tokens


def make_tree(segments=SEGMENTS):
    return jkv.TrajectoryTree.of(*(list(each) for each in zip(*segments, strict=True)))


def pad(tree):
    return jkv.trees.pad(
        tree, num_rows=NUM_ROWS, num_segments=NUM_SEGMENTS, max_length=LONGEST
    )


def draw_segments(rng):
    """Draw a tree of up to 14 segments, 48 tokens and sequences of 32."""
    segments, ends, left = [], [], NUM_ROWS
    for _ in range(rng.integers(1, NUM_SEGMENTS + 1)):
        parent = int(rng.integers(-1, len(segments)))
        before = ends[parent] if parent >= 0 else 0
        most = min(left, LONGEST - before, rng.choice([2, 5, 12]))
        tokens = rng.integers(0, VOCABULARY, rng.integers(0, most + 1)).tolist()
        segments.append((tokens, parent))
        ends.append(before + len(tokens))
        left -= len(tokens)
    return segments


def list_sequences(segments):
    """Return the whole sequence of each segment, from its root."""
    sequences = []
    for tokens, parent in segments:
        sequences.append((sequences[parent] if parent >= 0 else []) + tokens)
    return sequences


def dense_scores(params, segments=SEGMENTS, xp=np):
    """Score each segment's sequence alone; the first tokens of a sequence score 0."""
    sequences, found = list_sequences(segments), []
    # Padding after the end is causally masked.
    padded = np.zeros((len(sequences), LONGEST + 1), np.int32)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence

    def run(tokens):
        logits = dense_rows(params, tokens, xp=xp)
        return logits - xp.log(xp.exp(logits).sum(axis=-1, keepdims=True))

    rows = (
        jax.vmap(run)(padded) if xp is jnp else [run(sequence) for sequence in padded]
    )
    for i, ((own, _), sequence) in enumerate(zip(segments, sequences, strict=True)):
        for place in range(len(sequence) - len(own), len(sequence)):
            score = rows[i][place - 1, sequence[place]] if place else xp.float32(0)
            found.append(score)
    return xp.stack(found) if found else np.zeros(0, np.float32)
