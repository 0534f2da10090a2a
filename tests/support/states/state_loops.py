"""Each loop beside open sequences: the rows of the table of loops."""

import functools

import jax
import numpy as np

import jkv
from jkv.decoding import DraftModel, PromptLookup
from jkv.serving import Engine
from support.caches.kept_sequences import PENDING, SEQUENCE
from support.states.folding_loops import (
    NUM_NEW,
    PROMPTS,
    beam_search,
    expect,
    extend,
    generate,
    padded,
)
from support.states.folding_model import MODELS, continue_prompt, make_config


def generate_plainly(kept):
    counts = _generate(kept)
    assert int(counts.cached_tokens) > 0


def generate_with_lookup(kept):
    lookup = PromptLookup(num_tokens=PENDING, cost=1.0)
    counts = _generate(kept, speculate=lookup)
    assert 0 < int(counts.accepted_tokens) < int(counts.draft_tokens)


def generate_with_draft(kept):
    """Draft with the model itself: every draft token is accepted, and states follow."""
    first, again = _generate_with_draft(kept.kind)
    for draft_tokens, accepted_tokens, _ in (first, again):
        assert accepted_tokens == draft_tokens > 0
    assert again[2] > 0  # cached tokens


@functools.cache
def _generate_with_draft(kind):
    """Generate twice, in a cache with the draft model's layers.

    The cache holds no other sequences, so that their past does not matter.
    """
    config = make_config(kind, pending=PENDING)
    draft = DraftModel(
        model=MODELS[kind], params=None, config=config, num_tokens=PENDING
    )
    cache = jkv.init(jkv.with_drafter(config, draft))
    counts = []
    for _ in range(2):
        cache, result = generate(kind, cache, PROMPTS, speculate=draft)
        np.testing.assert_array_equal(result.tokens, expect(kind))
        counts.append(result.statistics)
    jkv.check(cache)
    return [
        (int(each.draft_tokens), int(each.accepted_tokens), int(each.cached_tokens))
        for each in counts
    ]


def _generate(kept, **options):
    """Continue more prompts than there are free rows beside the sequences."""
    kept.cache, result = generate(kept.kind, kept.cache, PROMPTS, **options)
    np.testing.assert_array_equal(result.tokens, expect(kept.kind))
    return result.statistics


def extend_twice(kept):
    """Run two turns of two chats."""
    for _ in range(2):
        given, ids = [[2, 1, 3], [0, 4]], np.array([0, 1], np.int32)
        for seq_id, more in enumerate(given):
            kept.sequences[seq_id] += more
        # The last token of a turn is appended with the next one.
        expected = expect(kept.kind, [kept.sequences[0], kept.sequences[1]], 4)
        run = functools.partial(extend, kept.kind, 4)
        turn = kept.call(run, ids, padded(given))
        np.testing.assert_array_equal(turn.tokens, expected)
        for seq_id, tokens in enumerate(expected):
            kept.sequences[seq_id] += tokens[:-1].tolist()


def search_with_beams(kept):
    prompts = [SEQUENCE, PROMPTS[0]]
    run = functools.partial(beam_search, kept.kind, 3)
    found = kept.call(run, padded(prompts))
    np.testing.assert_array_equal(found.tokens[:, 0], expect(kept.kind, prompts, 3))


def score(kept):
    """Score in a cache that `score` creates."""
    best = expect(kept.kind, PROMPTS[:2], 3)
    pairs = [each for one in best for each in (one, (one + 1) % 5)]
    config = make_config(kept.kind, pending=PENDING)
    scores = jkv.score(MODELS[kept.kind], None, PROMPTS[:2], pairs, config=config)
    assert np.all(np.asarray(scores[::2]) > -0.1)
    assert np.all(np.asarray(scores[1::2, 0]) < -4)


def engine(kept):
    """Serve samples, priorities, a cancelled request, draft tokens and cache hits."""
    options = dict(
        max_running=3,
        max_new_tokens=NUM_NEW,
        max_prompt_tokens=32,
        max_samples=2,
        num_steps=3,
        row_counts=(16,),
        checks=True,
        speculate=PromptLookup(num_tokens=PENDING, cost=1.0),
    )
    cache = jax.tree.map(jax.numpy.copy, kept.cache)  # the engine owns its cache
    with Engine(MODELS[kept.kind], None, cache, **options) as engine:
        for sample in engine.results(engine.submit(PROMPTS[0], n=2)):
            assert sample.tokens == continue_prompt(PROMPTS[0], NUM_NEW, kept.kind)
        numbers = [
            engine.submit(prompt, priority=-i) for i, prompt in enumerate(PROMPTS)
        ]
        engine.cancel(engine.submit(PROMPTS[1]))
        for number, wanted in zip(numbers, expect(kept.kind), strict=True):
            (sample,) = engine.results(number)
            assert sample.tokens == wanted.tolist()
        stats = engine.stats()
    assert stats.cached_tokens > 0 and stats.accepted_tokens > 0
