"""Parked sequences: their blocks stay, are copied to the host, and are restored."""

import pytest
from support.models.small_attention_model import attention_model, attention_params
from support.models.versioned_model import make_cache, make_engine, read_ages, weights
from support.states.folding_model import KINDS, MODELS, continue_prompt, make_config

import jkv
from jkv.decoding import DraftModel, FinishReason
from jkv.serving import Engine, RequestRefused

pytestmark = pytest.mark.one_end
PROMPT = [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


class Clock:
    """A clock set by the test."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run(engine):
    while not engine.is_idle:
        engine.step()


def park_one(engine, prompt=PROMPT, **options):
    """Park a sequence after twelve new tokens; return its number and all tokens."""
    number = engine.submit(prompt, **options)
    engine.park(number)
    run(engine)
    return number, [*prompt, *engine.results(number)[0].tokens]


def resume(engine, number, tokens, **options):
    """Resume a sequence; return its completion, and the number of cached tokens."""
    before = engine.stats().cached_tokens
    again = engine.resume(number, tokens, **options)
    (found,) = engine.results(again)
    run(engine)
    return found, engine.stats().cached_tokens - before


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_parked_sequence_continues_exactly(place):
    clock = Clock()
    engine = make_engine(clock=clock, park_seconds=5.0)
    number, sequence = park_one(engine)
    stats = engine.stats()
    assert (stats.parked, stats.parked_blocks, stats.parked_bytes) == (1, 6, 0)
    assert int(jkv.num_free_blocks(engine.cache)) == 24  # cached blocks count as free
    if place == "host":
        clock.now = 6.0
        engine.generate([[1]], max_new_tokens=1)
        stats = engine.stats()
        assert (stats.parked, stats.parked_blocks) == (1, 0)
        assert stats.parked_bytes == 5 * 4 * 3 * 4 * 2  # float32 keys and values
        wipe(engine)
    found, num_found = resume(engine, number, [4, 4], max_new_tokens=4)
    # The newest token has no keys and values yet, and the last block was partial.
    assert num_found == (len(sequence) - 1) // 4 * 4 == 20
    assert found.tokens == alone([*sequence, 4, 4], 4)
    stats = engine.stats()
    assert (stats.parked, stats.parked_blocks, stats.parked_bytes) == (0, 0, 0)
    assert stats.free_blocks == 24
    with pytest.raises(KeyError, match="must be parked"):
        engine.resume(number, [4])


def wipe(engine):
    """Evict all cached blocks on the device."""
    engine._scheduler.loop.forget_cached()


def alone(prompt, count):
    """Return the completion by a fresh engine."""
    (found,) = make_engine().generate([prompt], max_new_tokens=count)
    assert read_ages(prompt, found) == [0] * count
    return found.tokens


def test_parked_blocks_are_offloaded_before_requests_wait_or_are_preempted():
    """Sequences of eight blocks; three fill the pool."""
    engine = make_engine(park_seconds=1e9)
    numbers, sequences = zip(
        *(park_one(engine, [i, *PROMPT, *PROMPT]) for i in range(3)), strict=True
    )
    assert engine.stats().parked == 3
    most, running = 0, [engine.submit([30 + i] * 20) for i in range(3)]
    while not engine.is_idle:
        engine.step()
        most = max(most, engine.stats().running)
    assert most == 3 and engine.stats().preemptions == 0
    assert engine.stats().parked_bytes > 0
    for number in running:
        (found,) = engine.results(number)
        assert read_ages([30 + number - running[0]] * 20, found) == [0] * 12
    # Each gets all of its full blocks back, which the index would have evicted.
    for number, sequence in zip(numbers, sequences, strict=True):
        found, num_found = resume(engine, number, [7], max_new_tokens=3)
        assert num_found == (len(sequence) - 1) // 4 * 4 == 32
        assert found.tokens == alone([*sequence, 7], 3)
    assert engine.stats().free_blocks == 24


@pytest.mark.further
def test_parked_blocks_are_evicted_last_if_the_cache_has_priorities():
    engine = make_engine(make_cache(keep_classes=2), park_seconds=1e9)
    number, sequence = park_one(engine)
    for i in range(4):  # 28 blocks, in a pool of 24
        engine.generate([[30 + i] * 20], max_new_tokens=8)
    assert engine.stats().parked_bytes == 0
    found, num_found = resume(engine, number, [7], max_new_tokens=3)
    assert num_found == 20 and found.tokens == alone([*sequence, 7], 3)


def test_parked_blocks_are_copied_to_the_engines_store():
    store = jkv.BlockStore(2**20)
    engine = make_engine(park_seconds=0.0, store=store)
    number, sequence = park_one(engine)
    engine.generate([[1]], max_new_tokens=1)
    assert store.num_blocks == 5 and engine.stats().parked_bytes == 0
    wipe(engine)
    found, num_found = resume(engine, number, [7], max_new_tokens=3)
    assert num_found == 20 and found.tokens == alone([*sequence, 7], 3)
    assert store.num_blocks >= 5  # the store keeps them


def test_unparked_sequences_release_their_blocks():
    engine = make_engine(park_seconds=1e9)
    number, _ = park_one(engine, n=2)
    assert engine.stats().parked == 2
    assert engine.unpark(number) and not engine.unpark(number)
    run(engine)
    stats = engine.stats()
    assert (stats.parked, stats.parked_blocks) == (0, 0)
    assert int(jkv.num_free_blocks(engine.cache)) == 24
    number, _ = park_one(engine)
    engine.close()
    assert int(jkv.num_free_blocks(engine.cache)) == 24
    assert engine.stats().parked == 0


def test_a_cancelled_request_can_be_parked():
    """Each of its two samples continues where it stopped."""
    engine = make_engine()
    number = engine.submit(PROMPT)
    engine.park(number)
    for _ in range(3):
        engine.step()
    engine.cancel(number)
    (first,) = engine.results(number)
    assert first.reason == FinishReason.CANCELLED and 0 < len(first.tokens) < 12
    left = 12 - len(first.tokens)
    found, num_found = resume(engine, number, [], max_new_tokens=left)
    assert [*first.tokens, *found.tokens] == alone(PROMPT, 12) and num_found > 0


def test_new_weights_drop_the_blocks_of_parked_sequences():
    engine = make_engine(park_seconds=0.0)
    (kept, sequence), (lost, _) = park_one(engine), park_one(engine, PROMPT[:6])
    engine.generate([[1]], max_new_tokens=1)
    assert engine.stats().parked_bytes > 0
    engine.update_params(weights(1), keep_cached=True)
    found, _ = resume(engine, kept, [3])
    assert {*read_ages([*sequence, 3], found)} == {0} == {*found.context_versions}
    engine.update_params(weights(2))
    assert engine.stats().parked_bytes == 0
    found, num_found = resume(engine, lost, [3])
    assert num_found == 0 and {*found.versions} == {2} == {*found.context_versions}


def test_a_refused_request_leaves_its_sequence_parked():
    engine = make_engine()
    number, sequence = park_one(engine)
    with pytest.raises(RequestRefused, match="at most 40 tokens, got 41"):
        engine.resume(number, [5] * (41 - len(sequence)))
    with pytest.raises(TypeError, match="salt"):
        engine.resume(number, [5], salt=3)
    assert engine.stats().parked == 1
    found, _ = resume(engine, number, [5], max_new_tokens=2)
    assert found.tokens == alone([*sequence, 5], 2)


def test_a_string_salt_is_inherited():
    engine = make_engine()
    number = engine.submit(PROMPT, salt="secret")
    engine.park(number)
    engine.results(number)
    (found,) = engine.results(engine.resume(number, [3], max_new_tokens=2))
    assert found.cached_tokens >= len(PROMPT) // 4 * 4


def test_invalid_parking_is_refused():
    engine = make_engine()
    with pytest.raises(KeyError):
        engine.park(3)
    with pytest.raises(ValueError, match=">= 0, got -1"):
        make_engine(park_seconds=-1)
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=3,
        num_blocks=4,
        max_sequences=2,
        max_context_length=16,
        dtype="float32",
    )
    engine = make_engine(cache=jkv.init(config), max_running=1)
    with pytest.raises(ValueError, match="prefix_caching=True"):
        engine.park(engine.submit([1]))


def test_parked_copies_above_the_limit_are_dropped():
    """The oldest first, block by block; they are recomputed."""
    engine = make_engine(park_seconds=0.0, max_parked_bytes=900)
    parked = [park_one(engine, [i, *PROMPT]) for i in range(2)]
    engine.generate([[1]], max_new_tokens=1)
    stats = engine.stats()
    assert stats.parked == 2 and 0 < stats.parked_bytes <= 900
    wipe(engine)
    num_found = []
    for number, sequence in parked:
        found, each = resume(engine, number, [7], max_new_tokens=3)
        assert found.tokens == alone([*sequence, 7], 3)
        num_found.append(each)
    assert num_found == [16, 20]  # the oldest lost its last block


def test_parked_host_copies_outlive_a_failed_step():
    engine = make_engine(park_seconds=0.0)
    number, sequence = park_one(engine)
    engine.generate([[1]], max_new_tokens=1)
    engine._scheduler._fail(RuntimeError("a device was lost"))
    found, num_found = resume(engine, number, [7], max_new_tokens=3)
    assert found.tokens == alone([*sequence, 7], 3) and num_found == 20


def draft_of(kind):
    """Return a draft model that equals the target."""
    config = make_config(kind, pending=4)
    return DraftModel(
        model=MODELS[kind], params=None, config=config, num_tokens=2, cost=1.0
    )


LAYERS = [(kind, is_drafted) for kind in KINDS for is_drafted in (False, True)]


@pytest.mark.further
@pytest.mark.parametrize("kind, is_drafted", LAYERS)
def test_all_kinds_of_layers_with_and_without_drafts(kind, is_drafted):
    """One turn from the device, one from the host, one with its blocks lost."""
    clock = Clock()
    config = make_config(kind, pending=4 if is_drafted else 0)
    if is_drafted:
        config = jkv.with_drafter(config, draft_of(kind))
    engine = Engine(
        MODELS[kind],
        None,
        jkv.init(config),
        max_running=2,
        max_new_tokens=12,
        num_steps=3,
        row_counts=(12,),
        clock=clock,
        park_seconds=5.0,
        speculate=draft_of(kind) if is_drafted else None,
    )
    prompt = [1, 3, 0, 2, 4, 4, 1, 0, 3, 3]
    number = engine.submit(prompt)
    engine.park(number)
    run(engine)
    (found,) = engine.results(number)
    assert found.tokens == continue_prompt(prompt, 12, kind)
    sequence, all_found = [*prompt, *found.tokens], []
    for place in ("device", "host", "nowhere"):
        if place != "device":
            clock.now += 6.0
            engine.generate([[1]], max_new_tokens=1)
            assert engine.stats().parked_blocks == 0
            wipe(engine)
        if place == "nowhere":
            engine._scheduler.parking.forget_blocks()
        before = engine.stats().cached_tokens
        sequence += [2]
        again = engine.resume(number, [2], max_new_tokens=9)
        engine.park(again)
        run(engine)
        (found,) = engine.results(again)
        assert found.tokens == continue_prompt(sequence, 9, kind)
        all_found.append(engine.stats().cached_tokens - before)
        number, sequence = again, [*sequence, *found.tokens]
    print(kind, is_drafted, all_found)
    # Windowed blocks are not restored from the host, and lost blocks never are.
    on_device, from_host, nowhere = (found > 0 for found in all_found)
    assert on_device and from_host == ("window" not in kind) and not nowhere
    assert engine.stats().parked == 1
    engine.close()
    jkv.check(engine.cache)
    assert not engine.cache.metadata.is_open.any()


@pytest.mark.further
def test_a_parked_sequence_is_bit_identical_in_exact_mode():
    """Its blocks are restored from the host; the reference is computed at once."""
    config = jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        num_blocks=60,
        block_size=4,
        max_sequences=8,
        max_context_length=40,
        prefix_caching=True,
        dtype="float32",
    )
    results = []
    for is_parked in (True, False):
        engine = Engine(
            attention_model,
            attention_params(),
            jkv.init(config),
            max_running=3,
            max_new_tokens=9,
            num_steps=2,
            exact=(6, 10),
            park_seconds=0.0,
        )
        if is_parked:
            number, sequence = park_one(engine)
            engine.generate([[1]], max_new_tokens=1)
            wipe(engine)
            found, num_found = resume(engine, number, [4, 5])
            assert num_found == (len(sequence) - 1) // 4 * 4 == 16
        else:
            (found,) = engine.generate([[*sequence, 4, 5]])
        results.append((found.tokens, found.logprobs))
    assert results[0] == results[1]
