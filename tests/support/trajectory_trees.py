"""Trees as lists of (tokens, parent), and a dense model's scores of their texts."""

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from support.small_attention_model import DIM, KV_HEADS, LAYERS, VOCABULARY, dense_rows

CONFIG = jkv.CacheConfig(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    block_size=4,
    num_blocks=1,
    max_sequences=1,
    max_context_length=1,
)
# Two roots; segments of none, of one that stay inside a block, of several blocks; a
# chain of five; siblings that begin in the middle of a block and at its end.
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
NUM_ROWS, NUM_SEGMENTS, LONGEST = 48, 14, 32  # of trees that share a program
ROOT_ROWS = [0, 21]  # rows of their first tokens


def make_tree(segments=SEGMENTS):
    return jkv.TrajectoryTree.of(*(list(each) for each in zip(*segments, strict=True)))


def pad(tree):
    return jkv.trees.pad(
        tree, num_rows=NUM_ROWS, num_segments=NUM_SEGMENTS, max_length=LONGEST
    )


def draw_segments(rng):
    """A tree of up to 14 segments, 48 tokens and texts of 32."""
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


def list_texts(segments):
    """The text of each segment, from its root on."""
    texts = []
    for tokens, parent in segments:
        texts.append((texts[parent] if parent >= 0 else []) + tokens)
    return texts


def dense_scores(params, segments=SEGMENTS, xp=np):
    """Each segment's text alone: scores of all tokens, 0 for a text's first ones."""
    texts, found = list_texts(segments), []
    # Tokens behind the end: rows see none that follow.
    padded = np.zeros((len(texts), LONGEST + 1), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text

    def run(tokens):
        logits = dense_rows(params, tokens, xp=xp)
        return logits - xp.log(xp.exp(logits).sum(axis=-1, keepdims=True))

    rows = jax.vmap(run)(padded) if xp is jnp else [run(text) for text in padded]
    for i, ((own, _), text) in enumerate(zip(segments, texts, strict=True)):
        for place in range(len(text) - len(own), len(text)):
            score = rows[i][place - 1, text[place]] if place else xp.float32(0)
            found.append(score)
    return xp.stack(found) if found else np.zeros(0, np.float32)
