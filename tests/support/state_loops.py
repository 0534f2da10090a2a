"""Each loop beside kept texts: the rows of the table of loops."""

import functools

import jax
import numpy as np

import jkv
from jkv.decoding import DraftModel, PromptLookup
from jkv.serving import Engine
from support.folding_loops import (
    NUM_NEW,
    PROMPTS,
    beam_search,
    expect,
    extend,
    generate,
    padded,
)
from support.folding_model import MODELS, continue_text, make_config
from support.kept_texts import PENDING, TEXT


def generate_plainly(kept):
    counts = _generate(kept)
    assert int(counts.cached_tokens) > 0


def generate_with_lookup(kept):
    counts = _generate(kept, PromptLookup(num_tokens=PENDING, cost=1.0))
    assert 0 < int(counts.accepted_tokens) < int(counts.draft_tokens)


def generate_with_draft(kept):
    """The draft takes back its own guesses: it is the model itself, always right."""
    cache = jkv.init(make_config(kept.kind, pending=PENDING, caching=False))
    draft = DraftModel(
        model=MODELS[kept.kind], params=None, cache=cache, num_tokens=PENDING
    )
    counts = _generate(kept, draft)
    assert int(counts.accepted_tokens) == int(counts.draft_tokens) > 0


def _generate(kept, speculate=None):
    """Continue prompts beside the sequences, more than there are rows for."""
    options = {} if speculate is None else {"speculate": speculate}
    kept.cache, result = generate(kept.kind, kept.cache, PROMPTS, **options)
    np.testing.assert_array_equal(result.tokens, expect(kept.kind))
    return result.statistics


def extend_twice(kept):
    """Two turns of two chats."""
    for _ in range(2):
        given, ids = [[2, 1, 3], [0, 4]], np.array([0, 1], np.int32)
        for seq_id, more in enumerate(given):
            kept.texts[seq_id] += more
        # The last token of a turn is in no cache before the next one.
        expected = expect(kept.kind, [kept.texts[0], kept.texts[1]], 4)
        run = functools.partial(extend, kept.kind, 4)
        turn = kept.call(run, ids, padded(given))
        np.testing.assert_array_equal(turn.tokens, expected)
        for seq_id, tokens in enumerate(expected):
            kept.texts[seq_id] += tokens[:-1].tolist()


def search_with_beams(kept):
    prompts = [TEXT, PROMPTS[0]]
    run = functools.partial(beam_search, kept.kind, 3)
    found = kept.call(run, padded(prompts))
    np.testing.assert_array_equal(found.tokens[:, 0], expect(kept.kind, prompts, 3))


def score(kept):
    """In a cache of its own, of these sizes."""
    best = expect(kept.kind, PROMPTS[:2], 3)
    pairs = [each for one in best for each in (one, (one + 1) % 5)]
    config = make_config(kept.kind, pending=PENDING)
    scores = jkv.score(MODELS[kept.kind], None, PROMPTS[:2], pairs, config=config)
    assert np.all(np.asarray(scores[::2]) > -0.1)
    assert np.all(np.asarray(scores[1::2, 0]) < -4)


def engine(kept):
    """Samples, priorities, a cancelled request, guesses and hits."""
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
    cache = jax.tree.map(jax.numpy.copy, kept.cache)  # the engine's own
    with Engine(MODELS[kept.kind], None, cache, **options) as engine:
        for sample in engine.results(engine.submit(PROMPTS[0], n=2)):
            assert sample.tokens == continue_text(PROMPTS[0], NUM_NEW, kept.kind)
        numbers = [
            engine.submit(prompt, priority=-i) for i, prompt in enumerate(PROMPTS)
        ]
        engine.cancel(engine.submit(PROMPTS[1]))
        for number, wanted in zip(numbers, expect(kept.kind), strict=True):
            (sample,) = engine.results(number)
            assert sample.tokens == wanted.tolist()
        stats = engine.stats()
    assert stats.cached_tokens > 0 and stats.accepted_tokens > 0
