"""The tree search of the examples, beside one in plain Python, and what it takes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import plain_tree_search
from support.small_attention_model import (
    VOCABULARY,
    attention_model,
    attention_params,
    dense_rows,
)

import jkv

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

import tree_search
from searching.puzzle import Puzzle
from searching.search import Settings

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]
LINES = 32
SETTINGS = Settings(num_simulations=64, num_choices=4, max_tokens=12, exploration=1.25)
CONFIG = jkv.CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=4,
    block_size=4,
    num_blocks=6 + LINES * (65 + 4),
    max_sequences=LINES * 65 + 1,
    max_context_length=len(PROMPT) + SETTINGS.max_tokens,
    dtype=jnp.float32,
)


@functools.cache
def make_puzzle():
    """Tokens of one to four characters, some of which no sentence has."""
    rng = np.random.default_rng(5)
    return Puzzle(
        widths=np.arange(6, 6 + LINES, dtype=np.int32),
        sizes=rng.integers(1, 5, VOCABULARY).astype(np.int32),
        is_allowed=np.arange(VOCABULARY) % 7 != 3,
        is_word_end=np.arange(VOCABULARY) % 3 != 0,
        full_stop=np.array(11, np.int32),
    )


@pytest.fixture(scope="module")
def solved():
    """What the example makes of 32 puzzles, the small model writing."""
    return tree_search.solve(
        attention_model,
        attention_params(),
        jkv.init(CONFIG),
        np.array(PROMPT, np.int32),
        make_puzzle(),
        SETTINGS,
    )


@functools.cache
def plainly(line):
    """The same of one puzzle in plain Python: visits by line, the best line, when."""
    params = jax.device_get(attention_params())
    puzzle = make_puzzle()._asdict()
    width, full_stop = int(puzzle.pop("widths")[line]), int(puzzle.pop("full_stop"))
    rules = plain_tree_search.Rules(
        width=width, full_stop=full_stop, **puzzle, **SETTINGS._asdict()
    )
    root, *rest = plain_tree_search.search(
        lambda text: last_logits(tuple(text)), PROMPT, rules
    )
    return plain_tree_search.count_visits(root), *rest


@functools.cache
def last_logits(text):
    return dense_rows(jax.device_get(attention_params()), np.array(text))[-1]


def read_visits(tree, line):
    """Return how often each line was visited, by its tokens."""
    tokens, lengths = tree.lines.tokens[line], tree.lines.num_tokens[line]
    nodes = np.flatnonzero(tree.visits[line])
    return {
        tuple(tokens[node, : lengths[node]].tolist()): int(tree.visits[line, node])
        for node in nodes
    }


@pytest.mark.parametrize("line", range(LINES))
def test_visits_are_those_of_whole_texts_computed_anew(solved, line):
    _, tree, found = jax.device_get(solved)
    visits, best, first = plainly(line)
    assert read_visits(tree, line) == visits
    assert visits[()] == SETTINGS.num_simulations
    assert found.lines.tokens[line, : found.lines.num_tokens[line]].tolist() == best
    assert found.first[line] == first
