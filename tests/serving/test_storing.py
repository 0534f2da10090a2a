"""Cached blocks that an engine offloads to a store, and restores."""

import jax
import numpy as np
import pytest
from support.jax_versions import further
from support.models.versioned_model import make_engine as make_versioned
from support.models.versioned_model import read_ages, weights
from support.serving.long_runs import Clock
from support.serving.small_engines import WIDTH, count_on, draw_request, make_engine
from support.states.folding_model import MODELS, VOCABULARY, make_config

import jkv
from jkv.decoding import FinishReason
from jkv.serving import Engine, EngineError
from jkv.serving.request import request as requests
from jkv.serving.request.request import SaltNumbers
from jkv.serving.scheduler import retention as storing_module

pytestmark = pytest.mark.one_end

PROMPTS = np.random.default_rng(5).integers(0, 29, (12, WIDTH)).tolist()
FREE_BLOCKS = 16  # the prompts alone have 24 full ones


def play(engine, prompts=PROMPTS, rounds=3):
    """Generate for prompts repeatedly, after the pool has evicted them."""
    results = []
    for _ in range(rounds):
        for first in range(0, len(prompts), 3):
            found = engine.generate(prompts[first : first + 3], max_new_tokens=4)
            results += [each.tokens for each in found]
    return results


def test_evicted_blocks_are_restored():
    expected = play(make_engine(free_blocks=FREE_BLOCKS))
    store = jkv.BlockStore(2**20)
    engine = make_engine(free_blocks=FREE_BLOCKS, store=store, store_share=0.9)
    assert play(engine) == expected
    stats = engine.stats()
    assert stats.spilled_blocks >= stats.restored_blocks
    assert stats.cached_tokens == stats.restored_tokens
    assert stats.prompt_tokens + stats.cached_tokens == len(expected) * WIDTH
    # In every round but the first, all full blocks of each prompt are found.
    assert stats.cached_tokens == 2 * len(PROMPTS) * (WIDTH // 4 * 4)
    assert stats.store_bytes == store.nbytes > 0 and stats.store_folder_bytes == 0
    assert stats.copy_seconds_per_token > 0


@pytest.mark.parametrize("free_blocks", [6, 8, 10])
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_blocks_are_spilled_before_they_are_reallocated(free_blocks, share):
    """One sequence after another; the pool holds one or two."""
    store = jkv.BlockStore(2**20)
    engine = make_engine(free_blocks=free_blocks, store=store, store_share=share)
    found = [
        engine.generate([prompt], max_new_tokens=4)[0].cached_tokens
        for _ in range(3)
        for prompt in PROMPTS[:5]
    ]
    assert found == [0] * 5 + [WIDTH // 4 * 4] * 10


@pytest.mark.parametrize("seed", range(2))
def test_random_requests_equal_those_without_a_store(seed):
    """Cancelled requests and late ones included."""
    results = []
    for store in (None, jkv.BlockStore(3000)):
        rng, ended = np.random.default_rng(seed), {}
        engine = make_engine(free_blocks=20, store=store, store_share=0.6)
        numbers = []
        for trip in range(60):
            options = draw_request(rng)
            if trip % 7 == 3:
                options["timeout"] = 1e-9
            numbers.append(engine.submit(**options))
            if trip % 5 == 4:
                engine.cancel(numbers[int(rng.integers(len(numbers)))])
            engine.step()
        while not engine.is_idle:
            engine.step()
        for number in numbers:
            for found in engine.results(number):
                if found.reason not in (FinishReason.CANCELLED, FinishReason.DEADLINE):
                    ended[number, found.sample] = found.tokens, found.reason
        results.append(ended)
        assert int(jkv.num_free_blocks(engine.cache)) == 20
    without, beside = results
    assert len(without) > 30
    common = without.keys() & beside.keys()
    assert len(common) > 30
    assert all(without[key] == beside[key] for key in common)
    assert engine.stats().restored_tokens > 0


def test_a_later_engine_restores_blocks_from_the_folder(tmp_path):
    def make():
        store = jkv.BlockStore(
            2**12, folder=tmp_path, max_folder_bytes=2**20, version="a"
        )
        return store, make_engine(free_blocks=FREE_BLOCKS, store=store, store_share=0.9)

    store, first = make()
    expected = play(first, rounds=1)
    store.save()
    store, second = make()
    assert play(second, rounds=1) == expected
    assert second.stats().restored_tokens > 0
    assert second.stats().store_folder_bytes > 0
    with pytest.raises(ValueError, match="must have version 'b', got 'a'"):
        jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=9, version="b")


PROMPT = list(range(13))


def folder_of(path, **fields):
    return jkv.BlockStore(0, folder=path, max_folder_bytes=2**20, **fields)


def hash_of(text):
    numbers = SaltNumbers()
    return numbers.name(numbers.number(text))


def fill(store, version, **options):
    """Fill the store with the blocks of a sequence from one engine."""
    engine = make_versioned(store=store, store_share=1.0, **options)
    if version:
        engine.update_params(weights(version))
    engine.generate([PROMPT])
    engine.close()
    store.save()
    return engine


def count_restored(engine):
    """Count the restored tokens; assert that their weights are the engine's."""
    before = engine.stats()
    (found,) = engine.generate([PROMPT])
    ages = read_ages(PROMPT, found)
    assert {*ages} == {before.version}, "blocks of other weights"
    return engine.stats().restored_tokens - before.restored_tokens


def test_engines_with_other_weights_share_a_folder_but_no_block(tmp_path):
    """Each reads the files of engines with equal weights, also after an update."""
    fill(folder_of(tmp_path), 0)
    fill(folder_of(tmp_path), 1)
    engine = make_versioned(store=folder_of(tmp_path), store_share=1.0)
    assert count_restored(engine) == 12
    engine.update_params(weights(1))
    assert count_restored(engine) == 12
    engine.update_params(weights(2))
    assert count_restored(engine) == 0
    again = make_versioned(store=folder_of(tmp_path), store_share=1.0)
    assert count_restored(again) == 12


def test_engines_share_a_store_object_but_no_block_of_other_weights():
    store = jkv.BlockStore(2**20)
    old = make_versioned(store=store, store_share=1.0)
    new = make_versioned(store=store, store_share=1.0)
    new.update_params(weights(1))
    for engine in (old, new):
        assert count_restored(engine) == 0
        engine.close()
    assert count_restored(old) == count_restored(new) == 12


def test_store_version_identifies_the_weights(tmp_path):
    """Equal names share blocks, whatever the weights; different names do not."""
    fill(folder_of(tmp_path), 0, store_version="a")
    for name, restored in (("a", 12), ("b", 0), (None, 0)):
        store = folder_of(tmp_path)
        engine = make_versioned(store=store, store_share=1.0, store_version=name)
        assert count_restored(engine) == restored
    engine.update_params(weights(1), store_version="trained")
    engine.generate([PROMPT])
    engine.close()
    store.save()
    store = folder_of(tmp_path, version="trained")  # the next start
    assert store.find(PROMPT).num_blocks == 3
    with pytest.raises(ValueError, match="must have version '', got 'trained'"):
        folder_of(tmp_path)


def test_blocks_of_mixed_weights_have_their_own_store_version(tmp_path):
    """With `keep_cached`, stored blocks remain under a separate name."""
    store = jkv.BlockStore(2**20, folder=tmp_path, max_folder_bytes=2**20)
    engine = make_versioned(store=store, store_share=1.0)
    engine.generate([PROMPT])
    engine.close()
    engine.update_params(weights(1), keep_cached=True)
    before = engine.stats().restored_tokens
    (found,) = engine.generate([PROMPT])
    assert engine.stats().restored_tokens - before == 12
    assert {*read_ages(PROMPT, found)} == {0}
    engine.close()
    store.save()
    for version in (0, 1):
        other = make_versioned(store=folder_of(tmp_path), store_share=1.0)
        if version:
            other.update_params(weights(version))
        assert count_restored(other) == 0


def test_a_string_salt_is_stable_across_processes(tmp_path):
    """The salt's number is not: another process numbers other clients first."""
    store = folder_of(tmp_path)
    engine = make_versioned(store=store, store_share=1.0)
    for salt in ("A", "B"):
        engine.results(engine.submit(PROMPT * 2, salt=salt))
    engine.close()
    store.save()
    engine = make_versioned(store=folder_of(tmp_path), store_share=1.0)
    for salt, length in (("B", 24), ("C", 0), ("A", 24), (0, 0)):
        (found,) = engine.results(engine.submit(PROMPT * 2, salt=salt))
        assert found.cached_tokens == length
    assert engine.stats().restored_tokens == 48


def test_prompts_longer_than_the_context_are_restored():
    """`roll` serves them; a prefix of the first context is in the store."""
    config = jkv.CacheConfig.toy(
        num_blocks=20,
        max_sequences=5,
        max_context_length=16,
        block_size=4,
        prefix_caching=True,
        pruning=True,
    )

    engine = Engine(
        count_on,
        None,
        jkv.init(config),
        max_running=1,
        max_new_tokens=2,
        max_prompt_tokens=64,
        row_counts=(16,),
        roll=jkv.Roll(first=0, step=4),
        store=jkv.BlockStore(2**20),
        store_share=1.0,
    )
    engine.generate([[*range(1, 14)]], limits=2)
    engine.generate([[99, 98]], limits=2)
    assert engine.stats().spilled_blocks
    (found,) = engine.generate([[*range(1, 40)]], limits=2)
    assert found.tokens == [40, 41] and found.cached_tokens == 12


@pytest.mark.further
def test_closing_a_failed_engine_raises_nothing():
    """The blocks of a donated cache are lost, and none are spilled."""
    cache, _ = jkv.allocate(jkv.init(jkv.CacheConfig.toy(prefix_caching=True)), 4)
    engine = Engine(
        count_on,
        None,
        cache,
        max_running=2,
        max_new_tokens=4,
        row_counts=(16,),
        store=jkv.BlockStore(2**20),
    )
    engine.generate([[1, 2, 3]])
    number = engine.submit([1, 2, 3])
    engine.step()
    for leaf in jax.tree.leaves(engine.cache):
        leaf.delete()  # as by a donated call that raises
    with pytest.raises(EngineError, match="failed"):
        engine.results(number)
    assert engine.has_failed
    engine.close()


def test_salts_are_strings_or_nonnegative_numbers():
    engine = make_versioned()
    engine.submit(PROMPT, salt=2**32 - 1)
    with pytest.raises(ValueError, match="salt must be a str or an int from 0"):
        engine.submit(PROMPT, salt="text")
    engine = make_versioned()
    engine.submit(PROMPT, salt="text")
    engine.submit(PROMPT, salt=7)
    for salt in (-1, 2**31):
        with pytest.raises(ValueError, match="salt must be a str or an int from 0"):
            engine.submit(PROMPT, salt=salt)
    engine.submit(PROMPT, salt="another")  # a refused request changes nothing
    with pytest.raises(ValueError, match=r"salt must be an int or a str, got 1\.0"):
        engine.submit(PROMPT, salt=1.0)
    numbers = SaltNumbers()
    assert numbers.number("\ud800") == -1 and numbers.number("a") == -2
    assert numbers.name(7) == 7 and numbers.name(-3) is None


def test_evicted_string_salts_are_not_stored(monkeypatch):
    monkeypatch.setattr(requests, "MOST_STRING_SALTS", 2)
    numbers = SaltNumbers()
    first = [numbers.number(text) for text in "abac"]
    assert first == [-1, -2, -1, -3] and numbers.number("b") == -4
    assert [numbers.name(number) is None for number in (-1, -2, -3, -4)] == [
        True,
        True,
        False,
        False,
    ]
    store = jkv.BlockStore(2**20)
    engine = make_versioned(store=store, store_share=0.05)
    for salt in "abc":
        engine.results(engine.submit(PROMPT, salt=salt))
    engine.close()
    left = {salt for _, salt in store._roots}
    assert left == {hash_of(text) for text in "bc"}


@pytest.mark.parametrize("copying, restored", [(1.0, 0), (1e-4, 8)])
def test_slow_restores_are_replaced_by_recomputation(copying, restored):
    store = jkv.BlockStore(2**20)
    engine = make_engine(free_blocks=FREE_BLOCKS, store=store, store_share=0.9)
    play(engine, rounds=1)
    offloading = engine._scheduler.offloading
    offloading._copying = storing_module._Pace(copying, num_timed=2)
    offloading._computing = storing_module._Pace(1e-3, num_timed=2)
    engine.generate(PROMPTS[:1], max_new_tokens=1)
    assert engine.stats().restored_tokens == restored
    if not restored:  # and is retried at the end
        assert offloading._copying.seconds < copying


def test_short_prompts_are_restored_only_if_faster():
    """Their windows are timed together, and waiting does not count as computing."""
    clock = Clock()
    store = jkv.BlockStore(2**20)
    engine = make_engine(
        free_blocks=FREE_BLOCKS, store=store, store_share=0.9, clock=clock
    )
    for prompt in PROMPTS:
        number = engine.submit(prompt, max_new_tokens=1)
        clock.now += 1000.0
        while not engine.is_idle:
            engine.step()
            clock.now += 0.001
        engine.results(number)
    seconds = engine.stats().compute_seconds_per_token
    assert 0 < seconds < 0.001  # two steps for ten tokens


def test_other_weights_empty_the_store():
    store = jkv.BlockStore(2**20)
    engine = make_versioned(store=store, store_share=1.0)
    prompt = list(range(9))
    engine.generate([prompt, prompt[::-1]])
    engine.generate([[1]])
    assert store.num_blocks > 0
    engine.update_params(weights(1))
    assert store.num_blocks == 0 and store.find(prompt) is None
    engine.generate([prompt])
    assert engine.stats().restored_blocks == 0


@pytest.mark.parametrize("kind", ["state", *further(["keys", "keys+state"])])
def test_states_are_restored_with_their_blocks(kind):
    config = make_config(kind, num_snapshots=3, every=4, num_blocks=14)
    model = MODELS[kind]
    prompts = np.random.default_rng(3).integers(0, VOCABULARY, (6, 13)).tolist()
    results = []
    for store in (None, jkv.BlockStore(2**22)):
        engine = Engine(
            model,
            None,
            jkv.init(config),
            max_running=2,
            max_new_tokens=3,
            row_counts=(8,),
            store=store,
            store_share=0.9,
            checks=True,
        )
        results.append([r.tokens for _ in "12" for r in engine.generate(prompts)])
    assert results[0] == results[1]
    assert engine.stats().restored_tokens > 0


def test_invalid_stores_are_refused():
    store = jkv.BlockStore(2**20)
    with pytest.raises(ValueError, match="no prefix index"):
        plain = jkv.CacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            num_blocks=8,
            max_sequences=8,
            max_context_length=64,
        )
        make_engine(cache=jkv.init(plain), store=store)
    with pytest.raises(ValueError, match="store_share must be > 0"):
        make_engine(store=store, store_share=0.0)
    with pytest.raises(ValueError, match="sliding window in every"):
        Engine(
            MODELS["window"],
            None,
            jkv.init(make_config("window")),
            max_running=2,
            max_new_tokens=3,
            store=store,
        )
    make_engine(store=store)
    wider = jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=8,
        block_size=4,
        max_sequences=8,
        max_context_length=64,
        prefix_caching=True,
    )
    with pytest.raises(ValueError, match="store must have the layout"):
        make_engine(cache=jkv.init(wider), store=store)
