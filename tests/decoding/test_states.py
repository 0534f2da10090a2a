"""Loops over a model of which some layers keep a state: exact, whatever happens to it.

The model's next token follows from a fold of all tokens before it, so that a state that
stands elsewhere changes all that comes. Everything is asked of caches with keys of all
tokens, with keys of a window, and without any.
"""

import functools

import jax
import numpy as np
import pytest
from support.folding_model import KINDS, continue_text, make_config, model
from support.jax_versions import further

import jkv
from jkv.decoding import DraftModel, PromptLookup
from jkv.status import UsageError

pytestmark = pytest.mark.one_end

EVERY = 8
NUM_NEW = 11
SHARED = [3, 1, 4, 1, 0, 2, 2, 1, 4, 3, 0, 3, 1, 1, 2, 0, 4, 2, 3]
# Behind the shared tokens, texts that end at a multiple, one before and one after it.
PROMPTS = [
    [*SHARED, 1, 2, 3, 4],
    [*SHARED, 4, 4, 1, 2, 0],
    [*SHARED, 0, 3, 2, 1, 1, 3],
    SHARED,
    [2, 1, 0],
    [*SHARED, 1, 2, 3, 4, 2, 2, 0, 1, 0, 3, 3],
]
WANTED = np.array([continue_text(prompt, NUM_NEW) for prompt in PROMPTS])
CHUNK = 16
# Blocks for a text or two at a time.
FEW_BLOCKS = 14

STATIC = ("max_new_tokens", "max_running", "num_samples", "chunk_size")


run_generate = jax.jit(
    functools.partial(jkv.generate, model), static_argnames=STATIC, donate_argnums=1
)
run_extend = jax.jit(
    functools.partial(jkv.extend, model),
    static_argnames="max_new_tokens",
    donate_argnums=1,
)


def padded(prompts, width=32):
    """Prompts of one width, so that queues of as many are one program."""
    rows = np.full((len(prompts), width), -1, np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return rows


def generate(cache, prompts, **options):
    given = dict(max_new_tokens=NUM_NEW, max_running=4, chunk_size=CHUNK) | options
    cache, result = run_generate(None, cache, padded(prompts), **given)
    jkv.check(cache)
    return cache, result


@pytest.mark.parametrize("kind", ["alone", *further(["full", "window"])])
def test_samples_guesses_and_hits(kind):
    """All at once, cold and warm: the tokens are those of the fold."""
    sizes = {} if kind == "alone" else {"num_blocks": FEW_BLOCKS}
    cache = jkv.init(make_config(kind, pending=4, **sizes))
    options = dict(
        num_samples=5, max_running=2, speculate=PromptLookup(num_tokens=4, cost=1.0)
    )
    cache, cold = generate(cache, PROMPTS, **options)
    cache, warm = generate(cache, PROMPTS, **options)
    for result in (cold, warm):
        np.testing.assert_array_equal(result.tokens, np.repeat(WANTED, 5, axis=0))
        counts = result.statistics
        assert 0 < int(counts.accepted_tokens) < int(counts.draft_tokens)
    of_all = sum(map(len, PROMPTS))
    found = [int(result.statistics.cached_tokens) for result in (cold, warm)]
    if kind == "alone":
        assert found[1] > found[0] > 0
        # Each prompt is computed once, also for samples that have no place yet.
        assert int(cold.statistics.prompt_tokens) + found[0] == of_all
    else:  # there are too few blocks to keep much of what was
        assert sum(found) > 0


def test_a_queue_of_a_model_without_keys():
    """A shared beginning has a snapshot from its second use on."""
    cache = jkv.init(make_config("alone"))
    cache, result = generate(cache, PROMPTS[:1], max_running=1)
    lengths = sorted(cache.metadata.states.snapshots.lengths.tolist())
    # Before the end of the prompt, and where new tokens reached multiples.
    assert lengths[-3:] == [16, 24, 32]
    cache, result = generate(cache, PROMPTS[1:2], max_running=1)
    assert int(result.statistics.cached_tokens) == 16
    np.testing.assert_array_equal(result.tokens, WANTED[1:2])


@pytest.mark.further
def test_a_text_that_was_preempted_goes_on():
    """Its state is computed again, or taken from a snapshot."""
    cache = jkv.init(make_config("full", num_blocks=8))
    prompts = [[n, 4 - n, n] for n in range(4)]
    cache, result = generate(cache, prompts)
    wanted = [continue_text(prompt, NUM_NEW) for prompt in prompts]
    np.testing.assert_array_equal(result.tokens, wanted)
    assert int(result.statistics.preemptions) > 0


LENGTHS = [EVERY - 1, EVERY, EVERY + 1, 2 * EVERY - 1, 2 * EVERY, 2 * EVERY + 1]


def test_prompts_around_multiples_are_found():
    """Of k blocks, of k intervals, one more and one less: found up to the last."""
    text = SHARED[:3] + SHARED
    cache, expected = jkv.init(make_config("alone")), []
    for length in LENGTHS:
        known = jkv.match(cache, padded([[*text[:length], 4]]))
        cache, result = generate(cache, [text[:length]], max_running=1)
        # Its own last token is computed always.
        found = int(jkv.match(cache, padded([text[:length]]))[0])
        assert found == (length - 1) // EVERY * EVERY
        # A longer text goes on from its end, where that is a multiple.
        longer = int(jkv.match(cache, padded([[*text[:length], 4]]))[0])
        assert longer == length // EVERY * EVERY >= int(known[0])
        expected.append(continue_text(text[:length], NUM_NEW))
        np.testing.assert_array_equal(result.tokens[0], expected[-1])


@pytest.mark.parametrize("kind", ["alone", *further(["full", "window"])])
def test_extend_score_and_beams(kind):
    """Turns of a chat, log-probabilities, and a search with one beam and with two."""
    config = make_config(kind)
    cache, opened = jkv.allocate(jkv.init(config), [0, 0])
    given, texts = [PROMPTS[0], PROMPTS[4]], [list(PROMPTS[0]), list(PROMPTS[4])]
    for _ in range(2):
        cache, turn = run_extend(
            None, cache, opened.seq_ids, padded(given), max_new_tokens=NUM_NEW
        )
        wanted = [continue_text(text, NUM_NEW) for text in texts]
        np.testing.assert_array_equal(turn.tokens, wanted)
        # The last token of a turn is in no cache yet.
        given = [[each[-1], 2, 1] for each in wanted]
        texts = [[*t, *each, 2, 1] for t, each in zip(texts, wanted, strict=True)]
    # A text that parts from a known one has a snapshot there, and before its end.
    other, made = jkv.init(config), []
    other, opened = jkv.allocate(other, [0, 0])
    for seq_id, text in enumerate([PROMPTS[5], [*SHARED, *[4] * 10]]):
        ids = np.array([opened.seq_ids[seq_id], -1], np.int32)
        other, turn = run_extend(
            None, other, ids, padded([text, []]), max_new_tokens=NUM_NEW
        )
        np.testing.assert_array_equal(turn.tokens[0], continue_text(text, NUM_NEW))
        made.append(jkv.snapshots(other, seq_id)[: len(text)].nonzero()[0].tolist())
    assert made == [[24], [16, 24]]
    wanted = [continue_text(text, 3) for text in PROMPTS[:2]]
    worse = [[(token + 1) % 5 for token in each] for each in wanted]
    pairs = [each for pair in zip(wanted, worse, strict=True) for each in pair]
    scores = jkv.score(model, None, PROMPTS[:2], pairs, config=config)
    assert np.all(np.asarray(scores[::2]) > -0.1)
    assert np.all(np.asarray(scores[1::2, 0]) < -4)
    cache, found = jkv.beam_search(
        model, None, cache, PROMPTS[:2], num_beams=2, max_new_tokens=3
    )
    np.testing.assert_array_equal(found.tokens[:, 0], wanted)
    jkv.check(cache)


@pytest.mark.parametrize("kind", further(KINDS))
def test_a_draft_model_with_states(kind):
    """A draft takes back its own guesses: here it is the model itself, always right."""
    cache = jkv.init(make_config(kind, pending=3))
    draft = jkv.init(make_config("alone", pending=3, caching=False))
    speculate = DraftModel(model=model, params=None, cache=draft, num_tokens=3)
    cache, result = generate(cache, PROMPTS, speculate=speculate)
    np.testing.assert_array_equal(result.tokens, WANTED)
    counts = result.statistics
    assert int(counts.accepted_tokens) == int(counts.draft_tokens) > 0


def test_what_cannot_be_is_said_by_name():
    cache = jkv.init(make_config("full"))
    with pytest.raises(UsageError, match="max_pending=4"):
        generate(cache, PROMPTS, speculate=PromptLookup(num_tokens=4))
    cache, batch = jkv.append(cache, -1, 1)
    rows = np.zeros((1, 2, 4), np.float32)
    with pytest.raises(UsageError, match="layer 0 keeps no keys and values.*a state"):
        jkv.attend(cache, 0, batch, rows)
    with pytest.raises(UsageError, match="layer 1 keeps no state"):
        jkv.read_state(cache, 1, batch)
    state = jkv.read_state(cache, 0, batch)
    with pytest.raises(UsageError, match=r"int32\[1, 2\].*got float32\[1, 2\]"):
        jkv.write_state(cache, 0, batch, {"fold": state["fold"].astype("float32")})
    with pytest.raises(UsageError, match=r"\['fold'\], got \[\]"):
        jkv.write_state(cache, 0, batch, {})
    with pytest.raises(UsageError, match="num_pending is at most 0"):
        jkv.append(cache, -1, 1, num_pending=1)
    with pytest.raises(ValueError, match="snapshot_every must be a multiple"):
        make_config("full", every=6)
    with pytest.raises(ValueError, match="give StateConfig num_snapshots"):
        make_config("full", num_snapshots=0)


def test_debug_mode_watches_states():
    """A state that is not written, or is written twice, is found."""
    cache = jkv.debug(jkv.init(make_config("alone", caching=False)))
    cache, opened = jkv.allocate(cache, [0])
    assert int(opened.status[0]) == 0
    for is_twice in (False, True):
        cache, batch = jkv.append(cache, opened.seq_ids)
        state = jkv.read_state(cache, 0, batch)
        for _ in range(1 + is_twice):
            cache = jkv.write_state(cache, 0, batch, state)
        assert int(batch.status[0]) == 0
    with pytest.raises(jkv.DebugError) as found:
        jkv.check(cache)
    assert "not written to all layers" in str(found.value)
    assert "write_state to layer 0 for the second time" in str(found.value)
