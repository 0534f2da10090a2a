"""The tree search example, compared with plain Python, and its cost."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
import tree_search
from searching.puzzle import Puzzle, read_vocabulary
from searching.search import Settings, Writer, search
from support.decoding import plain_tree_search
from support.decoding.cloned_sequences import ClonedSequences, dense_step, read_weights
from support.jax_versions import with_further
from support.models.small_attention_model import (
    VOCABULARY,
    attention_model,
    attention_params,
    dense_rows,
)

import jkv

pytestmark = pytest.mark.one_end

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]
LINES = 32
SETTINGS = Settings(num_simulations=64, num_choices=5, max_tokens=20, exploration=1.25)
CONFIG = jkv.CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=4,
    block_size=4,
    num_blocks=6 + LINES * (65 + 6),
    max_sequences=LINES * 65 + 1,
    max_context_length=len(PROMPT) + SETTINGS.max_tokens,
    dtype=jnp.float32,
)


@functools.cache
def make_puzzle():
    """Return a puzzle with tokens of one to four characters, some not allowed."""
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
    """The example's solutions of 32 puzzles with the small model."""
    return tree_search.solve(
        attention_model,
        attention_params(),
        jkv.init(CONFIG),
        np.array(PROMPT, np.int32),
        make_puzzle(),
        SETTINGS,
    )


@functools.cache
def last_logits(*sequence):
    return dense_rows(jax.device_get(attention_params()), np.array(sequence))[-1]


def search_plainly(line):
    """Solve one puzzle in plain Python: visits by line, the best line, its time."""
    puzzle = make_puzzle()._asdict()
    width, full_stop = int(puzzle.pop("widths")[line]), int(puzzle.pop("full_stop"))
    rules = plain_tree_search.Rules(
        width=width, full_stop=full_stop, **puzzle, **SETTINGS._asdict()
    )
    root, *rest = plain_tree_search.search(
        lambda sequence: last_logits(*sequence), PROMPT, rules
    )
    return plain_tree_search.count_visits(root), *rest


def read_visits(tree, line):
    """Return the number of visits of each line, by its tokens."""
    tokens, lengths = tree.lines.tokens[line], tree.lines.num_tokens[line]
    nodes = np.flatnonzero(tree.visits[line])
    return {
        tuple(tokens[node, : lengths[node]].tolist()): int(tree.visits[line, node])
        for node in nodes
    }


CHOSEN = (0, 5, 10, 16, 23, 31)


@pytest.mark.parametrize(
    "line",
    with_further(range(LINES), *sorted(set(range(LINES)) - {*CHOSEN})),
)
def test_visits_equal_a_search_without_a_cache(solved, line):
    _, tree, found = jax.device_get(solved)
    visits, best, first = search_plainly(line)
    assert visits[()] == SETTINGS.num_simulations
    assert read_visits(tree, line) == visits
    assert found.lines.tokens[line, : found.lines.num_tokens[line]].tolist() == best
    assert found.first[line] == first


def test_search_fits_lines_that_greedy_decoding_does_not(solved):
    _, tree, found = jax.device_get(solved)
    assert len({tuple(visits) for visits in tree.visits[[*CHOSEN]]}) == len(CHOSEN)
    greedy, searched = (found.first == 1).sum(), (found.first > 0).sum()
    assert 1 <= greedy <= 4 and searched >= 20
    puzzle, fits = make_puzzle(), found.first > 0
    columns = np.array([puzzle.sizes[t[t >= 0]].sum() for t in found.lines.tokens])
    assert ((columns == puzzle.widths) == fits).all()
    last = [line[line >= 0][-1] for line in found.lines.tokens[fits]]
    assert set(last) == {11}


def test_nodes_share_blocks_and_all_are_released(solved):
    sequences = solved[0]
    assert 4 * sequences.peak_blocks <= sequences.unshared_peak_blocks
    jkv.check(sequences.cache)
    stats = jkv.stats(sequences.cache)
    assert int(jkv.num_free_blocks(sequences.cache)) == CONFIG.num_blocks
    assert not any(stats.refusals.values())


def test_a_full_stop_follows_a_word_in_the_last_column():
    """Tokens: 0 "by", 1 " a", 2 "." and 3, which is not allowed; two lines."""
    puzzle = Puzzle(
        widths=jnp.array([5, 6]),
        sizes=jnp.array([2, 2, 1, 1]),
        is_allowed=jnp.array([True, True, True, False]),
        is_word_end=jnp.array([True, False, True, True]),
        full_stop=jnp.array(2),
    )
    logits = jnp.array([[1.0, 2.0, 3.0, 4.0]] * 2)

    def may_follow(line):
        choices = puzzle.choose(logits, line, 3)
        assert choices.tokens.tolist() == [[2, 1, 0]] * 2
        return np.isfinite(choices.logprobs).tolist()

    def write(line, *tokens):
        return puzzle.advance(line, jnp.array(tokens), jnp.full(2, -0.5))

    empty = puzzle.begin(8)
    assert may_follow(empty) == [[False, True, True]] * 2
    words = write(write(empty, 1, 1), 0, 1)  # " aby" and " a a"
    assert may_follow(words) == [[True, False, False], [False, False, False]]
    assert not words.is_over.any()
    ended = write(words, 2, 0)  # " aby." and, impossible, " a aby"
    assert ended.is_over.tolist() == [True, False]
    assert ended.columns.tolist() == [5, 6]
    stuck = puzzle.advance(ended, jnp.array([0, 0]), jnp.full(2, -jnp.inf))
    assert stuck.is_over.all() and stuck.num_tokens.tolist() == [3, 3]
    np.testing.assert_allclose(puzzle.judge(words), [0, 0])
    np.testing.assert_allclose(puzzle.judge(stuck)[0], np.exp(-0.5), rtol=1e-6)


@pytest.mark.further
@pytest.mark.slow
def test_the_script_shows_lines_and_blocks(run_here):
    options = "--lines", "4", "--width", "28", "--simulations", "6"
    output = run_here("tree_search.py", *options).out
    rows = re.findall(r"^(\d+)     ( .*\S) +([\d.]{4}) +(\d+) *$", output, re.M)
    assert rows
    for width, line, likely, first in rows:
        assert len(line) == int(width) and line.endswith(".")
        assert 0 < float(likely) < 1 and 1 <= int(first) <= 6
    counts = re.search(r"greedy text fits (\d) of 4 lines, search (\d)", output)
    assert int(counts[1]) <= int(counts[2]) == len(rows)
    assert "24 simulations of 4 trees" in output
    shared, alone = re.search(r"(\d+) blocks of .* peak, (\d+) if", output).groups()
    assert 3 * int(shared) <= int(alone)
    free, total = re.search(r"(\d+) of (\d+) blocks free at the end", output).groups()
    assert free == total


@pytest.mark.further
def test_bundled_model_visits_equal_cloned_caches():
    """Compared with the bundled model in plain JAX, on dense keys copied per branch."""
    tokenizer = pretrained.load_tokenizer(tree_search.BUNDLED)
    prompt = np.array(tokenizer.encode(tree_search.PROMPT).ids, np.int32)
    widths = np.arange(24, 24 + LINES, dtype=np.int32)
    puzzle = Puzzle(widths, **read_vocabulary(tokenizer, 3072))
    settings = Settings(num_simulations=64, num_choices=8, max_tokens=27)
    model, params = pretrained.load(
        tree_search.BUNDLED, dtype=jnp.float32, scan_layers=True
    )
    cache = jkv.init(tree_search.choose_config(model, len(prompt), LINES, settings))
    paged, tree, found = tree_search.solve(
        model, params, cache, prompt, puzzle, settings
    )

    @jax.jit
    def solve(weights, prompt, puzzle):
        sequences, seq_ids, logits = ClonedSequences.open(
            dense_step,
            weights,
            prompt,
            num_sequences=LINES * 65 + 1,
            max_length=prompt.shape[0] + settings.max_tokens,
            count=LINES,
        )
        writer = Writer(dense_step, weights, puzzle, settings)
        return search(writer, sequences, seq_ids, logits)

    cloned = solve(read_weights(), prompt, puzzle)
    for name in ("visits", "children"):
        expected = getattr(cloned.tree, name)
        np.testing.assert_array_equal(getattr(tree, name), expected)
    assert (found.first == 1).sum() <= 4 and (found.first > 0).sum() >= 28
    assert 4 * paged.peak_blocks <= paged.unshared_peak_blocks
