"""Trajectory trees: shared tokens are computed once, results equal sequences'."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoding.trajectory_trees import (
    CONFIG,
    NUM_ROWS,
    ROOT_ROWS,
    SEGMENTS,
    dense_scores,
    draw_segments,
    list_sequences,
    make_tree,
    pad,
)
from support.jax_versions import with_further
from support.models import windowed_model
from support.models.small_attention_model import attention_model, attention_params
from support.states.folding_model import (
    MODELS,
    VOCABULARY,
    WITH_STATE,
    continue_prompt,
    make_config,
)

import jkv

TREE = make_tree()
NUM_TOKENS = sum(len(tokens) for tokens, _ in SEGMENTS)
score = functools.partial(jkv.score, attention_model, config=CONFIG)
WEIGHTS = np.cos(np.arange(NUM_ROWS, dtype=np.float32))
WEIGHTS[[*ROOT_ROWS, *range(NUM_TOKENS, NUM_ROWS)]] = 0


def weigh(scores, weights=WEIGHTS):
    """Return a loss that weighs each token differently, as advantages do."""
    return jnp.where(weights != 0, scores * weights, 0.0).sum()


@jax.jit
def score_and_differentiate(params, tree, weights):
    def loss(params):
        scores = score(params, tree)
        return weigh(scores, weights), scores

    (_, scores), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return scores, gradient


def assert_same_gradients(found, expected):
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        scale = np.abs(other).max()
        assert scale > 1e-2
        np.testing.assert_allclose(one, other, atol=1e-5 * scale, rtol=0)


@pytest.mark.one_end
def test_scores_and_gradients_equal_a_dense_model():
    params = attention_params()
    scores, gradient = score_and_differentiate(params, pad(TREE), WEIGHTS)
    assert not np.asarray(scores)[ROOT_ROWS].any()
    assert not np.asarray(scores)[NUM_TOKENS:].any()
    expected = dense_scores(jax.device_get(params))
    known = np.flatnonzero(WEIGHTS)
    np.testing.assert_allclose(scores[known], expected[known], atol=2e-5)

    def loss(params):
        return weigh(dense_scores(params, xp=jnp), WEIGHTS[:NUM_TOKENS])

    assert_same_gradients(gradient, jax.jit(jax.grad(loss))(params))


@pytest.mark.further
@pytest.mark.one_end
def test_missing_scores_are_not_nan():
    """With `jax_debug_nans`, a NaN for a missing score would raise."""
    with jax.debug_nans(True):
        scores, _ = score_and_differentiate(attention_params(), pad(TREE), WEIGHTS)
        exact = jkv.score(
            *(attention_model, attention_params(), [[], [1, 2]], [[3, 4], [3, 4]]),
            config=CONFIG,
            exact=True,
        )
    assert np.isfinite(scores).all() and np.isfinite(exact).all()
    assert exact[0, 0] == 0 and (exact[1] < 0).all()


@pytest.mark.one_end
def test_random_trees_equal_a_dense_model():
    """One compiled program scores all; scores change with a segment's parent."""
    params, rng = attention_params(), np.random.default_rng(11)
    weights = jax.device_get(params)
    for _ in range(10):
        segments = draw_segments(rng)
        scores, _ = score_and_differentiate(params, pad(make_tree(segments)), WEIGHTS)
        expected = dense_scores(weights, segments)
        scores = np.asarray(scores)[: len(expected)]
        np.testing.assert_allclose(scores, expected, atol=2e-5)
        sequences = list_sequences(segments)
        pairs = zip(sequences, segments, strict=True)
        begins = [sequence for sequence, (own, _) in pairs if own and sequence == own]
        assert np.sum(scores == 0) == len(begins)
    scores, _ = score_and_differentiate(params, pad(TREE), WEIGHTS)
    moved = [(own, 6 if i == 9 else parent) for i, (own, parent) in enumerate(SEGMENTS)]
    distance = np.abs(scores[:NUM_TOKENS] - dense_scores(weights, moved))
    assert distance.max() > 1e-2


def traced_rows(tree):
    """Return the row counts of the model's calls, by tracing."""
    rows = []

    def watched(params, tokens, cache, batch):
        rows.append(tokens.shape[0])
        return attention_model(params, tokens, cache, batch)

    scored = functools.partial(jkv.score, watched, config=CONFIG)
    scores = jax.eval_shape(scored, attention_params(), tree)
    return rows, scores.shape


@pytest.mark.one_end
def test_each_distinct_token_is_computed_once():
    """A prompt of 512, 8 turns of 8 samples of 64 tokens; one sample continues."""
    assert traced_rows(TREE) == ([NUM_TOKENS], (NUM_TOKENS,))
    rng, trunk = np.random.default_rng(0), 0
    tree = jkv.TrajectoryTree.of(rng.integers(0, 9, (1, 512), np.int32))
    for _ in range(8):
        samples = rng.integers(0, 9, (8, 64), np.int32)
        samples[:, 0] = np.arange(8)
        tree, segments = jkv.trees.grow(tree, samples, trunk)
        trunk = int(segments[3])
    sequences = [jkv.trees.read_sequence(tree, s) for s in range(1, tree.num_segments)]
    assert sum(map(len, sequences)) == 51_200
    distinct = {
        tuple(sequence[: i + 1]) for sequence in sequences for i in range(len(sequence))
    }
    assert traced_rows(tree)[0] == [len(distinct)] == [4_608]


@pytest.mark.one_end
def test_prompts_and_continuations_equal_a_tree_of_two_levels():
    prompts, sequences = [[3, 1, 4, 1, 5], [9, 2]], [[6, 5, 3], [5, 8], [9], [7, 9, 3]]
    params = attention_params()
    expected = jax.jit(score)(params, prompts, sequences)
    tree, children = jkv.trees.grow(
        jkv.TrajectoryTree.of(prompts), sequences, [0, 0, 1, 1]
    )
    scores = np.asarray(score_and_differentiate(params, pad(tree), WEIGHTS)[0])
    segments = np.asarray(tree.segments)
    for row, child in zip(expected, children, strict=True):
        found = scores[: len(segments)][segments == child]
        np.testing.assert_allclose(found, row[: len(found)], atol=2e-5)


@pytest.mark.one_end
def test_windows_of_grouped_layers_equal_numpy():
    """A window ends inside a parent, or after it."""
    full = jkv.CacheConfig(num_blocks=12, max_sequences=1, **windowed_model.SIZES)
    windowed = full.__class__(
        num_blocks=12,
        max_sequences=1,
        sliding_window=windowed_model.WINDOW,
        **windowed_model.SIZES,
    )
    config = jkv.GroupedConfig(groups=(full, windowed), layer_groups=(1, 0))
    run = jax.jit(
        functools.partial(jkv.score, windowed_model.mixed_model, config=config)
    )
    segments = SEGMENTS[:7]
    scores = np.asarray(run(windowed_model.EMBEDDING, make_tree(segments)))
    row = 0
    for sequence, (own, _) in zip(list_sequences(segments), segments, strict=True):
        for place in range(len(sequence) - len(own), len(sequence)):
            if place:
                logits = windowed_model.find_logits(
                    sequence[:place], windowed_model.MIXED
                )
                expected = logits[sequence[place]] - np.log(np.exp(logits).sum())
                np.testing.assert_allclose(scores[row], expected, rtol=1e-4, atol=1e-4)
            row += 1


@pytest.mark.one_end
@pytest.mark.parametrize("kind", with_further(WITH_STATE, *WITH_STATE[:2]))
def test_recurrent_layers_are_computed_level_by_level(kind):
    """Only the token that follows from all previous ones has a high probability."""
    config = make_config(kind)
    trunk = [2, 1, 3, 0, 4]
    likely = continue_prompt(trunk, 3, kind)
    tool = [1, 4]
    later = continue_prompt(trunk + likely + tool, 2, kind)
    wrong = [(token + 1) % VOCABULARY for token in later]
    sequences = [trunk, likely, tool, later, [], wrong, [0, 1]]
    tree = jkv.TrajectoryTree.of(sequences, [-1, 0, 1, 2, 2, 4, -1])
    run = functools.partial(jkv.score, MODELS[kind], None, config=config)
    scores, segments = (
        np.asarray(jax.jit(lambda: run(tree))()),
        np.asarray(tree.segments),
    )
    assert (scores[np.isin(segments, [1, 3])] > -0.1).all()
    assert scores[segments == 5][0] < -4
    assert scores[[0, len(segments) - 2]].tolist() == [0, 0]
    with pytest.raises(ValueError, match="close over the tree in the jitted function"):
        jax.eval_shape(run, tree)


@pytest.mark.one_end
def test_scores_and_gradients_of_parts_add_up():
    """Each token is scored in one part."""
    params = attention_params()
    whole, gradient = score_and_differentiate(params, pad(TREE), WEIGHTS)
    parts = jkv.trees.split(TREE, 24)
    rows, is_first = np.asarray(parts.rows), np.asarray(parts.is_first)
    assert rows.shape[1] == 24 and len(rows) > 2
    assert np.sort(rows[is_first]).tolist() == list(range(NUM_TOKENS))
    total = None
    for i in range(len(rows)):
        part = jax.tree.map(lambda each, i=i: each[i], parts)
        counts = np.append(WEIGHTS[:NUM_TOKENS], 0)[rows[i]] * is_first[i]
        counts = np.pad(counts, (0, NUM_ROWS - len(counts)))
        scores, found = score_and_differentiate(params, pad(part.tree), counts)
        known = rows[i] < NUM_TOKENS
        np.testing.assert_allclose(
            np.asarray(scores)[: len(known)][known],
            np.asarray(whole)[rows[i][known]],
            atol=2e-5,
        )
        total = found if total is None else jax.tree.map(jnp.add, total, found)
    assert_same_gradients(total, gradient)


@pytest.mark.one_end
def test_parts_repeat_few_tokens():
    """The trunk is the last branch of each turn, so that parts repeat their path."""
    sequences, parents = [[1] * 8], [-1]
    for turn in range(4):
        trunk = 4 * turn
        sequences += [[2] * 4] * 4
        parents += [trunk] * 4
    tree = jkv.TrajectoryTree.of(sequences, parents)
    parts = jkv.trees.split(tree, 28)
    num_repeated = int(((parts.rows < tree.num_rows) & ~parts.is_first).sum())
    # 72 tokens, and at least 12 of the trunk in each part but the first.
    assert parts.rows.shape[0] == 5 and num_repeated <= 4 * 24
    single = jkv.trees.split(tree, tree.num_rows, num_segments=20)
    assert single.tree.tokens.tolist() == [tree.tokens.tolist()]
    assert single.tree.parents.shape == (1, 20) and single.is_first.all()


@pytest.mark.one_end
class TestMistakes:
    @pytest.mark.parametrize(
        "change, message",
        [
            (
                dict(parents=[-1, 1, 0]),
                "segment 1 has parent 1; a parent must precede",
            ),
            (dict(parents=[-1, 0, -2]), "segment 2 has parent -2"),
            (dict(segments=[0, 0, 1, 3]), "row 3 has token 8 and segment 3 of 3"),
            (dict(segments=[0, 0, -1, 2]), "row 2 has token 7 and segment -1 of 3"),
            (
                dict(segments=[0, 1, 0, 2]),
                "rows of segment 0 must be contiguous",
            ),
            (
                dict(tokens=[5, 6, 7, 19]),
                "segment 2 has 19 at position 0.*from 0 to 18",
            ),
            (
                dict(tokens=[5, 6, 7]),
                r"segments must be int32\[R\] with R = 3, got int32\[4\]",
            ),
            (dict(parents=[[-1, 0, 0]]), r"parents must be int32\[S\], got int32"),
        ],
    )
    def test_invalid_trees(self, change, message):
        fields = dict(tokens=[5, 6, 7, 8], segments=[0, 0, 1, 2], parents=[-1, 0, 0])
        arrays = {k: jnp.array(v, jnp.int32) for k, v in (fields | change).items()}
        tree = jkv.TrajectoryTree(**arrays, max_length=8)

        def flat(_params, tokens, cache, _batch):
            return jnp.zeros((tokens.shape[0], 19)), cache

        with pytest.raises(ValueError, match=message):
            jkv.score(flat, None, tree, config=CONFIG)

    def test_sequences_longer_than_max_length_are_refused(self):
        tree = jkv.TrajectoryTree.of([[1, 2], [3, 4]], [-1, 0])
        tree = jkv.TrajectoryTree(
            tokens=tree.tokens,
            segments=tree.segments,
            parents=tree.parents,
            max_length=3,
        )
        with pytest.raises(ValueError, match="of segment 1 has 4 tokens; max_length"):
            score(None, tree)

    def test_a_tree_with_other_arguments(self):
        with pytest.raises(ValueError, match="a tree takes no continuations"):
            score(None, TREE, [[1]])
        with pytest.raises(ValueError, match="continuations must be given"):
            score(None, [[1]])
        with pytest.raises(ValueError, match="a tree must have at least one row"):
            score(None, jkv.TrajectoryTree.of([[]]))

    def test_a_missing_parent(self):
        with pytest.raises(
            ValueError, match=r"parents\[1\] must be a segment .* got 12"
        ):
            jkv.trees.grow(TREE, [[1], [2]], [3, 12])
        with pytest.raises(ValueError, match="segment 0 has parent 0"):
            jkv.TrajectoryTree.of([[1], [2]], [0, 0])

    def test_insufficient_sizes(self):
        with pytest.raises(ValueError, match="num_rows must be >= 42"):
            jkv.trees.pad(TREE, num_rows=41)
        with pytest.raises(
            ValueError, match="max_rows must be >= 20.* got 18; segment 10 ends at 20"
        ):
            jkv.trees.split(TREE, 18)
        with pytest.raises(ValueError, match="num_segments must be >= ., got"):
            jkv.trees.split(TREE, 24, num_segments=2)
        with pytest.raises(ValueError, match="outside jit"):
            jax.eval_shape(lambda tree: jkv.trees.split(tree, 24), TREE)


@pytest.mark.one_end
def test_invalid_segments_are_nan_inside_jit_without_effect_on_others():
    """A segment that is its own ancestor, a disconnected one, and a long one."""
    good, params = pad(TREE), attention_params()
    expected = np.asarray(score_and_differentiate(params, good, WEIGHTS)[0])
    segments, parents = np.asarray(good.segments), np.asarray(good.parents)

    def find_nan(is_moved=(), **change):
        fields = dict(tokens=good.tokens, segments=segments, parents=parents) | change
        tree = jkv.TrajectoryTree(max_length=good.max_length, **fields)
        scores = np.asarray(score_and_differentiate(params, tree, WEIGHTS)[0])
        is_nan = np.isnan(scores)
        unharmed = ~is_nan & ~np.isin(segments, is_moved) & (segments >= 0)
        np.testing.assert_allclose(scores[unharmed], expected[unharmed], atol=2e-5)
        return {int(each) for each in segments[is_nan]}

    def move(changes):
        moved = parents.copy()
        moved[list(changes)] = list(changes.values())
        return moved

    assert find_nan(parents=move({2: 5})) == {2, 4, 6, 10}
    # A token of segment 4, separated from its others.
    apart, tokens = segments.copy(), np.asarray(good.tokens).copy()
    apart[-1], tokens[-1] = 4, 3
    assert find_nan(segments=apart, tokens=tokens) == {-1, 4, 10}
    # 18 tokens of segment 4, then 5, 5, 2, and 6 that do not fit.
    moved = {7: 4, 9: 7, 10: 9, 11: 10}
    assert find_nan([*moved, 8], parents=move(moved)) == {11}


@pytest.mark.one_end
def test_trees_grow_inside_jit():
    """Trees have a row for each token of the result; the scored tokens are equal."""

    @jax.jit
    def run(params, prompts, sequences, parents):
        tree = jkv.TrajectoryTree.of(prompts)
        tree, first = jkv.trees.grow(tree, sequences, parents)
        tree, _ = jkv.trees.grow(tree, sequences[:1], first[1:2])
        return tree, score(params, tree)

    prompts, sequences = (
        [[3, 1, 4, -1], [9, 2, 6, 5]],
        [[6, 5, 3], [5, 8, -1], [9, -1, -1]],
    )
    arrays = (jnp.array(each, jnp.int32) for each in (prompts, sequences, [0, 1, 0]))
    tree, scores = run(attention_params(), *arrays)
    assert tree.num_rows == 8 + 9 + 3 and tree.max_length == 4 + 3 + 3
    segments = [([3, 1, 4], -1), ([9, 2, 6, 5], -1), ([6, 5, 3], 0), ([5, 8], 1)]
    segments += [([9], 0), ([6, 5, 3], 3)]
    assert tree.lengths.tolist() == [len(own) for own, _ in segments]
    found = np.asarray(scores)[np.asarray(tree.segments) >= 0]
    expected = dense_scores(jax.device_get(attention_params()), segments)
    np.testing.assert_allclose(found, expected, atol=2e-5)
