"""Drafters in the target's cache: greedy sequences, stored keys, updates, refusals.

The test drafter needs the target's hidden states, so a wrong or stale one changes its
keys. They are compared with the keys of the whole sequence, computed at once."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support.compiled_hlo import ALL_PASSES, pool_sized_operations
from support.jax_versions import further
from support.models.following_drafter import (
    AUX_LAYERS,
    Following,
    make_following,
    mix,
)
from support.models.small_attention_model import (
    DIM,
    KV_HEADS,
    LAYERS,
    attention_model,
    attention_params,
    continue_densely,
    dense_rows,
)
from support.small_caches import filled_cache

import jkv

pytestmark = pytest.mark.one_end

SIZES = dict(num_blocks=80, block_size=4, max_sequences=12, max_context_length=40)
CONFIG = jkv.CacheConfig(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    dtype="float32",
    prefix_caching=True,
    **SIZES,
)
UPDATED = []  # rows of updates, on the host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recording(Following):
    """A drafter that records its updates."""

    def update(self, cache, batch, tokens, hidden, previous):
        given = batch.query_starts, batch.query_lengths, batch.positions, tokens
        jax.debug.callback(lambda *given: UPDATED.append(given), *given)
        return super().update(cache, batch, tokens, hidden, previous)


DRAFTER = make_following(Recording, **SIZES)
LAYER = LAYERS  # of the drafter, after the target's
NEW, SAMPLES = 12, 2
SHARED = [3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = [[*SHARED, 5], [*SHARED, 3, 5, 8], [7, 9, 7, 9, 7], [11]]

extend = jax.jit(jkv.extend, static_argnums=0, static_argnames=("max_new_tokens",))
generate = jax.jit(
    jkv.generate,
    static_argnums=0,
    static_argnames=("max_new_tokens", "max_running", "num_samples", "row_counts"),
)


def fresh_cache(config=CONFIG, drafter=DRAFTER, free_blocks=None):
    """Create a cache full of NaN with the drafter's layer and `free_blocks` free."""
    cache = filled_cache(jkv.with_drafter(config, drafter))
    if free_blocks is not None:
        taken = (config.num_blocks - free_blocks) * config.block_size
        lengths = np.minimum(np.maximum(taken - 40 * np.arange(8), 0), 40)
        cache, others = jkv.allocate(cache, lengths.astype(np.int32))
        jkv.raise_for_status(others.status)
    return cache


def padded(rows, width=12):
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)


def expected_keys(text, drafter=DRAFTER):
    """Return the drafter's keys of a whole sequence."""
    params = jax.tree.map(np.asarray, attention_params())
    hidden = dense_rows(params, np.array(text), aux_layers=AUX_LAYERS)
    previous = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])
    return mix(drafter.params, np.array(text), previous) @ drafter.params["k"]


def assert_keys(cache, seq_id, text):
    """Assert the drafter's stored keys to 1e-5; wrong ones differ by more."""
    keys, _, length = jkv.read(cache, LAYER, seq_id)
    assert int(length) == len(text)
    wanted = expected_keys(text)
    np.testing.assert_allclose(keys[: len(text), 0], wanted, atol=1e-5)
    if len(text) > 2:  # detects a hidden state at the wrong position
        assert np.abs(np.roll(wanted, 1, axis=0) - wanted).max() > 0.1


def play(cache, drafter=DRAFTER, model=attention_model):
    given = dict(max_new_tokens=NEW, max_running=3, row_counts=(16,))
    cache, result = generate(
        model,
        attention_params(),
        cache,
        padded(PROMPTS),
        num_samples=SAMPLES,
        speculate=drafter,
        **given,
    )
    jkv.check(cache)
    return cache, result


def assert_greedy(result, window=None):
    wanted = [continue_densely(p, count=NEW, window=window) for p in PROMPTS]
    wanted = [text for text in wanted for _ in range(SAMPLES)]
    assert np.asarray(result.tokens).tolist() == wanted


def count_updated():
    """Count the updated rows; assert that each is a token at its position."""
    jax.effects_barrier()
    wanted = [p + continue_densely(p, count=NEW) for p in PROMPTS]
    num_rows = 0
    for starts, lengths, positions, tokens in UPDATED:
        for start, length in zip(starts, lengths, strict=True):
            rows = slice(start, start + length)
            place, text = positions[rows].tolist(), tokens[rows].tolist()
            num_rows += int(length)
            if length:
                assert place == [*range(place[0], place[0] + length)]
                assert any(one[place[0] : place[0] + length] == text for one in wanted)
    return num_rows


@pytest.mark.further
def test_sequences_and_keys_with_hits_samples_and_preemptions():
    """Two turns on one cache: the second finds the first's blocks, except one token.

    The drafter is updated once with each accepted row, and with no other.
    """
    totals = np.zeros(3, int)
    for free_blocks in (80, 7):
        cache = fresh_cache(free_blocks=free_blocks)
        for turn in range(2):
            UPDATED.clear()
            cache, result = play(cache)
            assert_greedy(result)
            counts = result.statistics
            generated = SAMPLES * len(PROMPTS) * (NEW - 1)
            again = int(counts.prompt_tokens) + int(counts.recomputed_tokens)
            assert count_updated() == generated + again
            totals += [counts.draft_tokens, counts.accepted_tokens, counts.preemptions]
            if free_blocks == 80:
                # All tokens of a prompt but the last may be cached; one is recomputed.
                found = [[0, 0, 0, 0], [7, 9, 3, 0]][turn]
                assert result.cached_tokens[::SAMPLES].tolist() == found
        # The cached contents are right, including the drafter's.
        for prompt in PROMPTS[:2]:
            text = prompt + continue_densely(prompt, count=NEW)
            after, opened = jkv.allocate(cache, [len(text)], tokens=[text])
            if opened.status[0] == 0 and opened.num_cached[0] > 0:
                seq_id, found = int(opened.seq_ids[0]), int(opened.num_cached[0])
                assert_keys(after, seq_id, text[:found])
    drafted, accepted, preemptions = totals
    assert drafted > accepted > 20 and preemptions > 0


WINDOW = 5
windowed_model = functools.partial(attention_model, window=WINDOW)


@pytest.mark.further
def test_windows_that_release_blocks_and_int8():
    """Only the target's blocks are released; some sequences are preempted."""
    changes = dict(dtype="int8", prefix_caching=False)
    config = dataclasses.replace(CONFIG, sliding_window=WINDOW, **changes)
    own = dataclasses.replace(DRAFTER.config, dtype="int8")
    drafter = make_following(**SIZES)
    drafter = dataclasses.replace(drafter, config=own)
    totals = np.zeros(3, int)
    for free_blocks in (80, 9):
        cache = fresh_cache(config, drafter, free_blocks)
        before = jkv.num_free_blocks(cache)
        cache, result = play(cache, drafter, windowed_model)
        assert_greedy(result, WINDOW)
        assert jkv.num_free_blocks(cache).tolist() == before.tolist()
        of_target, of_drafter = jkv.stats(cache).groups
        if free_blocks == 80:
            assert of_target.peak_blocks < of_drafter.peak_blocks
        counts = result.statistics
        totals += [counts.draft_tokens, counts.accepted_tokens, counts.preemptions]
    drafted, accepted, preemptions = totals
    assert drafted > accepted > 10 and preemptions > 0
    without = [continue_densely(p, count=NEW) for p in PROMPTS]
    assert without != [continue_densely(p, count=NEW, window=WINDOW) for p in PROMPTS]


@pytest.mark.further  # compiles a program with all passes
def test_a_donated_loop_copies_no_pools():
    """Drafting, verification and updates write both pools in place."""
    sizes = SIZES | dict(num_blocks=5000)
    drafter = make_following(**sizes)
    config = dataclasses.replace(CONFIG, num_blocks=5000)
    cache = jkv.init(jkv.with_drafter(config, drafter))
    options = dict(max_new_tokens=4, max_running=3, row_counts=(16,))

    def run(cache, params, drafter):
        given = model, params, cache, padded(PROMPTS)
        return jkv.generate(*given, speculate=drafter, **options)

    model = attention_model
    lowered = jax.jit(run, donate_argnums=0).lower(cache, attention_params(), drafter)
    compiled = lowered.compile(ALL_PASSES)
    pools = [a for a in jax.tree.leaves(cache.storage) if a.ndim == 5]
    assert len(pools) == 4
    layer_size = min(a.size // a.shape[0] for a in pools)
    assert pool_sized_operations(compiled, layer_size) == []
    num_bytes = sum(a.nbytes for a in pools)
    assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes


@pytest.mark.parametrize("records", further([False, True]))
def test_extended_sequences_recompute_their_last_token(records):
    """Over several turns of open sequences, the drafter's keys stay right."""
    config = CONFIG
    if not records:  # without recorded tokens, one row's hidden state is unknown
        config = dataclasses.replace(config, prefix_caching=False)
    cache = fresh_cache(config)
    cache, opened = jkv.allocate(cache, [0] * 4)
    texts = [[], [], [], []]
    given = [[3, 1, 4], [5, 9, 2, 6, 5], [3], [5, 8, 9, 7]]
    for turn in range(4):
        cache, result = extend(
            attention_model,
            attention_params(),
            cache,
            opened.seq_ids,
            padded(given),
            max_new_tokens=5,
            speculate=DRAFTER,
        )
        jkv.check(cache)
        for i, new in enumerate(np.asarray(result.tokens).tolist()):
            texts[i] += given[i]
            assert new == continue_densely(texts[i], count=5)
            texts[i] += new[:-1]
            given[i] = [new[-1], (7 * turn + i) % 19]
            if records:
                assert_keys(cache, i, texts[i])
            else:
                assert jkv.context_lengths(cache)[i] == len(texts[i])
    assert int(result.statistics.draft_tokens) > 0


@pytest.mark.further
def test_a_window_of_plain_steps_leaves_only_its_own_keys_unwritten():
    """The first step with the drafter writes the newest token's key."""
    options = dict(max_new_tokens=NEW, max_running=2, row_counts=(16,), num_samples=2)
    prompt, model, params = PROMPTS[0], attention_model, attention_params()
    decode = jax.jit(jkv.decoding.decode, static_argnums=0)
    cache = fresh_cache()
    state = jkv.decoding.begin(
        model, params, cache, [prompt], speculate=DRAFTER, **options
    )
    given = model, params
    cache, state = decode(*given, cache, state, num_steps=np.int32(3))
    plain = int(jkv.context_lengths(cache)[state.seq_ids[1]])
    num_steps = np.int32(1)
    cache, state = decode(*given, cache, state, num_steps=num_steps, speculate=DRAFTER)
    keys, _, length = jkv.read(cache, LAYER, state.seq_ids[1])
    is_unknown = np.isnan(np.asarray(keys[: int(length)])).all(axis=(1, 2))
    assert len(prompt) <= plain < int(length)
    assert is_unknown.tolist() == [True] * plain + [False] * (int(length) - plain)
    wanted = continue_densely(prompt, count=NEW)
    for new, count in zip(state.result.tokens, state.result.lengths, strict=True):
        assert new[:count].tolist() == wanted[:count]


def test_wrong_drafters_and_caches_are_refused_by_name():
    params, plain = attention_params(), jkv.init(CONFIG)

    def no_hidden(params, tokens, cache, batch, *, all_rows=False):
        return attention_model(params, tokens, cache, batch, all_rows=all_rows)

    def run(model, cache, drafter):
        options = dict(max_new_tokens=2, speculate=drafter)
        jax.eval_shape(
            lambda cache: jkv.generate(model, params, cache, [[1, 2]], **options), cache
        )

    with pytest.raises(jkv.UsageError, match=r"jkv.init\(jkv.with_drafter\("):
        run(attention_model, plain, DRAFTER)
    other = make_following(**(SIZES | dict(block_size=8)))
    with pytest.raises(jkv.UsageError, match="block_size of the drafter's groups"):
        jkv.with_drafter(CONFIG, other)
    with pytest.raises(jkv.UsageError, match="an argument aux_layers"):
        run(no_hidden, fresh_cache(), DRAFTER)
    with pytest.raises(jkv.UsageError, match="speculate is not supported by beam_"):
        given = attention_model, params, fresh_cache(), [[1, 2]]
        jkv.beam_search(*given, num_beams=2, max_new_tokens=2, speculate=DRAFTER)
    for field, value, words in [
        ("num_tokens", 0, "num_tokens must be"),
        ("aux_layers", (-1,), "aux_layers must be"),
        ("cost", 9.0, "cost must be"),
        ("groups", (3,), "groups must be a tuple"),
        ("groups", DRAFTER.config, "groups must be a tuple"),
    ]:

        class Changed(Following):
            pass

        setattr(Changed, field, value)
        drafter = object.__new__(Changed)
        object.__setattr__(drafter, "params", None)
        object.__setattr__(drafter, "config", DRAFTER.config)
        if field != "num_tokens":
            object.__setattr__(drafter, "num_tokens", 3)
        if field != "cost":
            object.__setattr__(drafter, "cost", 1.0)
        with pytest.raises(jkv.UsageError, match=words):
            jkv.with_drafter(CONFIG, drafter)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda *_: None, r"draft of Drafting must return .* got NoneType"),
        (lambda cache, _: (cache, 0), r"draft of Drafting must return .* got \(Cache"),
        (lambda _, step: step.choose(0, [0.0]), "draft logits must be an array"),
        (lambda _, step: step.choose(0, np.zeros(3)), r"draft logits must be .*, V\]"),
        (lambda _, step: step.choose(1, None), "index must be 0"),
        (
            lambda _, step: [step.choose(i, np.zeros((1, 19), "f4")) for i in range(3)],
            "call choose at most num_tokens=2 times",
        ),
    ],
)
def test_wrong_results_of_drafters_are_refused(returned, text):
    class Drafting(jkv.PromptLookup):
        def draft(self, cache, step):
            return returned(cache, step)

    fields = [each.name for each in dataclasses.fields(Drafting)]
    jax.tree_util.register_dataclass(Drafting, [], fields)
    drafter, params = Drafting(num_tokens=2, cost=1.0), attention_params()
    options = dict(max_new_tokens=4, row_counts=(8,), speculate=drafter)
    with pytest.raises(jkv.UsageError, match=text):
        jkv.generate(attention_model, params, jkv.init(CONFIG), [[1, 2]], **options)


def test_other_auxiliary_layers_are_refused():
    begin, decode = jkv.decoding.begin, jkv.decoding.decode
    options = dict(max_new_tokens=4, row_counts=(8,))
    given = attention_model, attention_params()

    class Fewer(Following):
        aux_layers = (1,)

    class Beyond(Following):
        aux_layers = (1, 7)

    for kind in (Fewer, Beyond):
        fields = [each.name for each in dataclasses.fields(kind)]
        jax.tree_util.register_dataclass(kind, ["params"], fields[1:])
    state = begin(*given, fresh_cache(), [[1, 2]], speculate=DRAFTER, **options)
    with pytest.raises(jkv.UsageError, match=r"aux_layers of speculate must be \(1, 2"):
        decode(*given, fresh_cache(), state, speculate=make_following(Fewer, **SIZES))
    with pytest.raises(jkv.UsageError, match=r"must be in 0..2, .* got \(1, 7\)"):
        drafter = make_following(Beyond, **SIZES)
        begin(*given, fresh_cache(), [[1, 2]], speculate=drafter, **options)
