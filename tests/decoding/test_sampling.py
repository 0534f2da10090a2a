"""Sampling: filters compared with numpy, draws by chi-squared tests."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax, softmax
from support.jax_versions import few

from jkv import decoding
from jkv.decoding import Sampling, spread_seeds
from jkv.decoding.sampling import draws
from jkv.decoding.sampling.draws import find_best
from jkv.status import UsageError

# Compiled once per shape, for any parameters.
filter_logits = jax.jit(decoding.filter_logits)
sample = jax.jit(decoding.sample)

# More than one tile of the two-level draw, and not a multiple of it.
VOCABULARY = 300

FILTERS = {
    "temperature": dict(temperature=0.7),
    "hot": dict(temperature=3.0),
    "top_k": dict(temperature=1.0, top_k=5),
    "top_k_of_one": dict(temperature=1.0, top_k=1),
    "top_k_above_vocabulary": dict(temperature=1.0, top_k=1000),
    "top_p": dict(temperature=1.0, top_p=0.8),
    "top_p_low": dict(temperature=1.0, top_p=0.01),
    "top_p_zero": dict(temperature=1.0, top_p=0.0),
    "min_p": dict(temperature=1.0, min_p=0.1),
    "min_p_of_one": dict(temperature=1.0, min_p=1.0),
    "penalty": dict(temperature=1.0, repetition_penalty=1.5),
    "encouragement": dict(temperature=1.0, repetition_penalty=0.5),
    "all": dict(
        temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3
    ),
}


@functools.cache
def random_logits(num_rows=4, vocabulary=VOCABULARY):
    shape = num_rows, vocabulary
    return 3 * np.random.default_rng(0).standard_normal(shape, np.float32)


@functools.cache
def random_seen():
    return np.random.default_rng(1).random((4, VOCABULARY)) < 0.2


@pytest.mark.one_end
@pytest.mark.parametrize("vocabulary", [1, 127, 256, VOCABULARY])
def test_argmax_returns_the_first_of_equal_tokens(vocabulary):
    # Few distinct values, so that ties occur within tiles and between them.
    logits = np.random.default_rng(2).integers(-3, 3, (40, vocabulary))
    logits = np.where(logits == -3, -np.inf, logits).astype(np.float32)
    logits[0] = -np.inf
    logits[1, vocabulary // 2] = np.nan
    tokens = np.asarray(find_best(logits))
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(
        np.delete(tokens, 1), np.argmax(np.delete(logits, 1, 0), 1)
    )
    assert 0 <= tokens[1] < vocabulary


def reference(
    logits,
    seen,
    *,
    temperature,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
):
    """Compute the filters' definition in float64 by sorting, row by row."""
    rows = []
    for row, row_seen in zip(
        np.asarray(logits, np.float64), np.asarray(seen), strict=True
    ):
        row = np.where(row_seen & (row < 0), row * repetition_penalty, row)
        row = np.where(row_seen & (row > 0), row / repetition_penalty, row)
        row = row / temperature
        if top_k:
            row[np.argsort(-row)[top_k:]] = -np.inf
        if top_p < 1:
            order = np.argsort(-row)
            probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            above = np.cumsum(probabilities[order]) - probabilities[order]
            row[order[1:][above[1:] >= top_p]] = -np.inf
        probabilities = np.exp(row - row.max())
        row[probabilities < min_p] = -np.inf
        rows.append(row - row.max())
    return np.stack(rows)


@pytest.mark.parametrize("name", few(FILTERS, "all"))
def test_filters_equal_numpy(name):
    sampling = Sampling(**FILTERS[name])
    filtered = filter_logits(random_logits(), sampling, seen=random_seen())
    expected = reference(random_logits(), random_seen(), **FILTERS[name])
    np.testing.assert_array_equal(np.isinf(filtered), np.isinf(expected))
    np.testing.assert_allclose(filtered, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.one_end
def test_a_small_example_by_hand():
    # Probabilities 1/2, 1/4, 1/8, 1/16, 1/16, permuted.
    logits = np.log(np.array([[2, 16, 2, 4, 8]], np.float32))

    def kept(**options):
        filtered = filter_logits(logits, Sampling(temperature=1.0, **options))
        return np.flatnonzero(np.isfinite(filtered[0])).tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [1, 4]
    assert kept(top_k=4) == [0, 1, 2, 3, 4]  # two tokens tie for fourth place
    assert kept(top_p=0.5) == [1]
    assert kept(top_p=0.51) == [1, 4]  # the token that crosses it is kept
    assert kept(top_p=0.8) == [1, 3, 4]
    assert kept(min_p=0.2) == [1, 3, 4]
    assert kept(min_p=0.3) == [1, 4]
    # After top-k of 2 the probabilities are 2/3 and 1/3.
    assert kept(top_k=2, top_p=0.6) == [1]
    assert kept(top_k=2, top_p=0.7) == [1, 4]


def own_logprobs(logits, tokens):
    """Return the model's log-probabilities of the tokens, f32[B]."""
    rows = np.arange(len(logits))
    return log_softmax(logits, axis=-1)[rows, np.asarray(tokens)]


@pytest.mark.one_end
def test_greedy_takes_the_first_penalised_maximum():
    logits = np.array([[1.0, 3.0, 3.0, 2.9], [1.0, 3.0, 2.0, 2.9]], np.float32)
    tokens, logprobs = sample(logits, Sampling())
    assert tokens.tolist() == [1, 1]
    np.testing.assert_allclose(
        logprobs,
        own_logprobs(logits, tokens),
        rtol=1e-6,
    )
    seen = np.array([[False, True, True, False], [False, True, False, False]])
    penalised = Sampling(repetition_penalty=2.0)
    tokens, logprobs = sample(logits, penalised, seen=seen)
    assert tokens.tolist() == [3, 3]
    # The reported log-probability precedes the penalty.
    np.testing.assert_allclose(
        logprobs,
        own_logprobs(logits, tokens),
        rtol=1e-6,
    )


@pytest.mark.one_end
def test_the_penalty_lowers_logits_of_both_signs():
    logits = np.array([[2.0, -2.0, 2.0, -2.0]], np.float32)
    seen = np.array([[True, True, False, False]])
    filtered = filter_logits(
        logits, Sampling(temperature=1.0, repetition_penalty=2.0), seen=seen
    )
    assert (filtered[0] + 2).tolist() == [1.0, -4.0, 2.0, -2.0]


def draw_many(logits, num_draws, **options):
    """Draw tokens for `num_draws` rows with seeds of their own; return their counts."""
    rows = np.broadcast_to(logits, (num_draws, logits.shape[-1]))
    tokens, _ = sample(rows, Sampling(seeds=11, **options))
    return np.bincount(tokens, minlength=logits.shape[-1])


def chi_square(counts, logits):
    """Return the p-value of counts against softmax(logits)."""
    expected = softmax(np.asarray(logits, np.float64)) * counts.sum()
    expected *= counts.sum() / expected.sum()
    is_large = expected >= 5
    assert counts[expected == 0].sum() == 0
    # Rare tokens are merged into one class.
    observed = np.append(counts[is_large], counts[~is_large].sum())
    expected = np.append(expected[is_large], expected[~is_large].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    return stats.chisquare(observed, expected).pvalue


@pytest.mark.parametrize("vocabulary", few([2, 128, 129, VOCABULARY], 129))
def test_draws_follow_the_distribution(vocabulary):
    logits = random_logits(1, vocabulary)[0] / 2
    counts = draw_many(logits, 20_000, temperature=1.0)
    assert chi_square(counts, logits) > 1e-4
    # The test has power: a slightly different distribution is rejected.
    assert chi_square(counts, logits * 1.2) < 1e-6


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "hot"])
@pytest.mark.one_end
def test_draws_follow_the_filtered_distribution(name):
    logits = random_logits(1)[0]
    counts = draw_many(logits, 20_000, **FILTERS[name])
    allowed = filter_logits(logits[None], Sampling(**FILTERS[name]))[0]
    assert chi_square(counts, allowed) > 1e-4


@pytest.mark.one_end
def test_rare_tokens_are_drawn_at_their_rate():
    # 2^-10 each, over eight tiles.
    counts = draw_many(np.zeros(1024, np.float32), 20_480, temperature=1.0)
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.one_end
def test_draws_of_one_sequence_follow_the_distribution():
    logits = random_logits(1, 10)[0] / 3
    step = jax.jit(
        jax.vmap(
            lambda count: sample(logits[None], Sampling(temperature=1.0), count)[0]
        )
    )
    counts = np.bincount(np.asarray(step(np.arange(20_000)))[:, 0], minlength=10)
    assert chi_square(counts, logits) > 1e-4


@pytest.mark.one_end
def test_a_row_depends_only_on_its_seed_and_count():
    logits = random_logits()
    sampling = Sampling(temperature=1.5, top_p=0.95, seeds=np.array([5, 6, 7, 8]))
    together, _ = sample(logits, sampling, np.array([0, 3, 1, 9]))
    for i in range(4):
        alone, _ = sample(
            logits[i : i + 1],
            Sampling(temperature=1.5, top_p=0.95, seeds=np.array([5 + i])),
            np.array([0, 3, 1, 9])[i],
        )
        assert alone[0] == together[i]
    # In another order, with other neighbours.
    order = np.array([2, 0, 3, 1])
    moved, _ = sample(
        logits[order],
        Sampling(temperature=1.5, top_p=0.95, seeds=np.array([7, 5, 8, 6])),
        np.array([1, 0, 9, 3]),
    )
    np.testing.assert_array_equal(moved, np.asarray(together)[order])


@pytest.mark.one_end
def test_keys_are_converted_to_seeds():
    """Equal keys draw equal tokens, and different keys different ones."""
    flat = np.zeros((6, VOCABULARY), np.float32)
    keys = [jax.random.key(3), jax.random.key(3), jax.random.key(4)]
    options = [Sampling(temperature=1.0, key=key) for key in keys]
    first, again, other = (np.asarray(sample(flat, each)[0]) for each in options)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    same = Sampling(temperature=1.0, seeds=options[0].seeds)
    np.testing.assert_array_equal(sample(flat, same)[0], first)
    with pytest.raises(ValueError, match="seeds and key"):
        Sampling(key=keys[0], seeds=3)
    with pytest.raises(TypeError, match=r"jax\.random\.key"):
        Sampling(key=3)


@pytest.mark.newest_further
def test_sequences_with_one_seed_draw_differently():
    flat = np.zeros((6, VOCABULARY), np.float32)
    one, _ = sample(flat, Sampling(temperature=1.0, seeds=40))
    seeds = spread_seeds(40, 6)
    each, _ = sample(flat, Sampling(temperature=1.0, seeds=seeds))
    np.testing.assert_array_equal(one, each)
    assert len(set(one.tolist())) > 3
    # Another seed or another count draws other tokens.
    other, _ = sample(flat, Sampling(temperature=1.0, seeds=1000))
    later, _ = sample(flat, Sampling(temperature=1.0, seeds=40), 1)
    assert one.tolist() != other.tolist() and one.tolist() != later.tolist()


@pytest.mark.one_end
def test_neighbouring_seeds_share_no_sequence():
    seeds = np.concatenate([spread_seeds(seed, 500) for seed in range(-20, 20)])
    assert len(set(seeds.tolist())) == seeds.size
    assert seeds[::500].tolist() == list(range(-20, 20))
    # The host computes the same seeds as a program, for unsigned numbers, too.
    traced = jax.jit(lambda seed: spread_seeds(seed, 500))
    for seed in (0, -1, 2**31 - 1, -(2**31)):
        np.testing.assert_array_equal(traced(np.int32(seed)), spread_seeds(seed, 500))
    np.testing.assert_array_equal(spread_seeds(2**32 - 1, 9), spread_seeds(-1, 9))


@pytest.mark.one_end
def test_rows_may_differ_in_every_parameter():
    logits = np.broadcast_to(random_logits()[:1], (4, VOCABULARY))
    options = [
        dict(temperature=1.0, top_k=3),
        dict(temperature=0.5, top_p=0.5),
        dict(temperature=2.0, min_p=0.3),
        dict(temperature=1.0),
    ]
    names = ["temperature", "top_k", "top_p", "min_p"]
    defaults = [1.0, 0, 1.0, 0.0]
    dtypes = [np.float32, np.int32, np.float32, np.float32]
    together = Sampling(
        **{
            name: np.array([row.get(name, default) for row in options], dtype)
            for name, default, dtype in zip(names, defaults, dtypes, strict=True)
        }
    )
    filtered = filter_logits(logits, together)
    for i, row in enumerate(options):
        alone = filter_logits(logits[:1], Sampling(**row))[0]
        np.testing.assert_array_equal(np.isinf(filtered[i]), np.isinf(alone))
        np.testing.assert_allclose(filtered[i], alone, rtol=1e-6)


@pytest.mark.one_end
def test_greedy_rows_stay_greedy_beside_sampled_ones():
    logits = random_logits()
    temperature = np.array([0.0, 5.0, 0.0, 5.0], np.float32)
    for seed in range(5):
        tokens, _ = sample(logits, Sampling(temperature=temperature, seeds=seed))
        best = np.argmax(logits, axis=-1)
        np.testing.assert_array_equal(np.asarray(tokens)[::2], best[::2])


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("temperature", [1e-30, 1.0, 1e30])
@pytest.mark.one_end
def test_extreme_numbers_give_valid_tokens(scale, temperature):
    logits = random_logits() * np.float32(scale)
    logits[:, ::2] = -np.inf
    sampling = Sampling(temperature=temperature, top_k=9, top_p=0.9, min_p=0.01)
    filtered = filter_logits(logits, sampling)
    assert not np.isnan(filtered).any() and (np.max(filtered, axis=1) == 0).all()
    tokens, logprobs = sample(logits, sampling)
    assert (np.asarray(tokens) % 2 == 1).all()
    assert np.isfinite(logprobs).all()


@pytest.mark.one_end
def test_removed_tokens_are_never_drawn():
    # Three tokens in one tile and one in another; all others removed.
    logits = np.full(VOCABULARY, -np.inf, np.float32)
    logits[[3, 4, 5, 290]] = 0.0
    counts = draw_many(logits, 5_000, temperature=1.0)
    assert set(np.flatnonzero(counts)) == {3, 4, 5, 290}
    assert chi_square(counts, logits) > 1e-4


def test_one_trace_however_values_change():
    draw = jax.jit(chex.assert_max_traces(decoding.sample, n=1))
    for step in range(4):
        sampling = Sampling(
            temperature=0.5 * step,
            top_k=step,
            top_p=1 - 0.1 * step,
            min_p=0.01 * step,
            repetition_penalty=1.0 + step,
            seeds=step,
        )
        draw(random_logits(), sampling, np.int32(step), seen=random_seen())


def test_nothing_is_sorted():
    sampling = Sampling(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1)
    jaxpr = str(jax.make_jaxpr(decoding.sample)(random_logits(), sampling))
    assert not re.search(r"\b(sort|top_k|approx_top_k)\[", jaxpr)


@pytest.mark.one_end
def test_wrong_shapes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"Sampling.top_p must be .* N = 4"):
        sample(random_logits(), Sampling(top_p=np.ones(3, np.float32)))
    with pytest.raises(ValueError, match=r"Sampling.seeds must be .* N = 4"):
        sample(random_logits(), Sampling(seeds=np.ones((4, 1), np.int32)))


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", np.array([1.0, np.inf])),
        ("top_k", -1),
        ("top_k", 0.5),
        ("top_p", 1.01),
        ("top_p", np.array([0.5, -0.5])),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("seeds", 2**31),
    ],
)
@pytest.mark.one_end
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"Sampling.{field} must be"):
        Sampling(**{field: value})


def test_unflattening_skips_validation():
    """Axes, shapes and None replace numbers; leaves keep their names."""
    sampling = Sampling(temperature=np.ones(2, np.float32))
    axes = jax.tree.map(lambda _: 0, sampling)
    assert axes.repetition_penalty == 0
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(sampling)]
    assert jax.tree_util.keystr(paths[0]) == ".temperature"


def test_large_logits_are_searched_row_by_row_on_a_cpu(monkeypatch):
    """The bits equal those of all rows at once; without filters nothing is searched."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((5, 64), np.float32) * 3
    sampling = Sampling(
        temperature=np.array([0.0, 0.5, 1.0, 1.0, 2.0]),
        top_k=np.array([0, 5, 0, 9, 0]),
        top_p=np.array([0.9, 1.0, 0.5, 0.7, 1.0]),
        min_p=np.array([0.0, 0.0, 0.0, 0.1, 0.2]),
    )
    rows = draws.by_row(sampling, 5)
    at_once = jax.jit(draws.filter_rows.__wrapped__)(logits, rows, None)
    monkeypatch.setattr(draws, "_MOST_AT_ONCE", 64)

    def remove(logits):
        of_these = jax.tree.map(lambda field: field[: len(logits)], rows)
        return draws.filter_rows.__wrapped__(logits, of_these, None)

    np.testing.assert_array_equal(jax.jit(remove)(logits), at_once)
    loops = [str(jax.make_jaxpr(remove)(logits[:n])).count("scan[") for n in (1, 5)]
    assert loops == [0, 1]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: decoding.sample(jnp.zeros(5), Sampling()), r"logits must be \[B, V\]"),
        (
            lambda: decoding.filter_logits(jnp.zeros(5), Sampling()),
            r"logits must be \[B, V\]",
        ),
        (lambda: decoding.sample(jnp.zeros((2, 0)), Sampling()), "at least one token"),
        (
            lambda: decoding.sample(jnp.zeros((2, 5)), Sampling(), jnp.zeros(3, int)),
            "counts",
        ),
        (
            lambda: decoding.sample(
                jnp.zeros((2, 5)), Sampling(), seen=jnp.zeros((2, 4), bool)
            ),
            r"seen must be bool\[B, V\] with B = 2, V = 5",
        ),
        (lambda: spread_seeds(1.5, 3), "one integer of 32 bits, .* got 1.5"),
        (lambda: spread_seeds(2**40 + 7, 3), "one integer of 32 bits"),
        (lambda: spread_seeds(1, -1), "count must be a static int of at least 0"),
    ],
)
def test_wrong_arguments_are_named(call, text):
    with pytest.raises(UsageError, match=text):
        call()


def test_no_rows_are_sampled():
    tokens, logprobs = sample(jnp.zeros((0, 4)), Sampling(temperature=1.0))
    assert tokens.shape == logprobs.shape == (0,)
