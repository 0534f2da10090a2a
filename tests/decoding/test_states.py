"""Loops over a model with recurrent layers, exact after any operations.

The next token is an exact function of all tokens before it.
`support.states.state_table` runs each loop beside sequences of each kind of groups;
these tests use prompts of their own.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import further
from support.states.folding_loops import (
    PROMPTS,
    SHARED,
    expect,
    extend,
    generate,
    padded,
)
from support.states.folding_model import MODELS, continue_prompt, make_config

import jkv
from jkv.decoding import PromptLookup
from jkv.status import UsageError

pytestmark = pytest.mark.one_end

EVERY = 8
# Blocks for one or two sequences at a time.
FEW_BLOCKS = 14


@pytest.mark.parametrize("kind", ["state", *further(["keys+state", "window+state"])])
def test_samples_speculation_and_prefix_hits(kind):
    """Together, with a cold and a warm cache: the tokens equal the fold's."""
    sizes = {} if kind == "state" else {"num_blocks": FEW_BLOCKS}
    cache = jkv.init(make_config(kind, pending=4, **sizes))
    options = dict(
        num_samples=5, max_running=2, speculate=PromptLookup(num_tokens=4, cost=1.0)
    )
    cache, cold = generate(kind, cache, PROMPTS, **options)
    cache, warm = generate(kind, cache, PROMPTS, **options)
    for result in (cold, warm):
        np.testing.assert_array_equal(result.tokens, np.repeat(expect(kind), 5, axis=0))
        counts = result.statistics
        assert 0 < int(counts.accepted_tokens) < int(counts.draft_tokens)
    of_all = sum(map(len, PROMPTS))
    found = [int(result.statistics.cached_tokens) for result in (cold, warm)]
    if kind == "state":
        assert found[1] > found[0] > 0
        # Each prompt is computed once, also for samples that are not admitted yet.
        assert int(cold.statistics.prompt_tokens) + found[0] == of_all
    else:  # too few blocks to keep many cached
        assert sum(found) > 0


def test_generate_with_recurrent_layers_only():
    """A shared prefix has a snapshot from its second use on."""
    cache = jkv.init(make_config("state"))
    cache, result = generate("state", cache, PROMPTS[:1], max_running=1)
    lengths = sorted(cache.metadata.index.snapshots.lengths.tolist())
    # Before the end of the prompt, and at multiples reached by new tokens.
    assert lengths[-3:] == [16, 24, 32]
    cache, result = generate("state", cache, PROMPTS[1:2], max_running=1)
    assert int(result.statistics.cached_tokens) == 16
    np.testing.assert_array_equal(result.tokens, expect("state", PROMPTS[1:2]))


@pytest.mark.further
def test_a_preempted_sequence_continues():
    """The state is recomputed, or read from a snapshot."""
    cache = jkv.init(make_config("keys+state", num_blocks=8))
    prompts = [[n, 4 - n, n] for n in range(4)]
    cache, result = generate("keys+state", cache, prompts)
    np.testing.assert_array_equal(result.tokens, expect("keys+state", prompts))
    assert int(result.statistics.preemptions) > 0


LENGTHS = [EVERY - 1, EVERY, EVERY + 1, 2 * EVERY - 1, 2 * EVERY, 2 * EVERY + 1]


def test_prompts_around_multiples_are_found():
    """Prompts of about k blocks or intervals hit the last multiple."""
    sequence = SHARED[:3] + SHARED
    cache = jkv.init(make_config("state"))
    for length in LENGTHS:
        known = jkv.match(cache, padded([[*sequence[:length], 4]]))
        cache, result = generate("state", cache, [sequence[:length]], max_running=1)
        # The last token of a prompt is always computed.
        found = int(jkv.match(cache, padded([sequence[:length]]))[0])
        assert found == (length - 1) // EVERY * EVERY
        # A longer prompt continues from its end, if that is a multiple.
        longer = int(jkv.match(cache, padded([[*sequence[:length], 4]]))[0])
        assert longer == length // EVERY * EVERY >= int(known[0])
        np.testing.assert_array_equal(
            result.tokens, expect("state", [sequence[:length]])
        )


def test_an_extended_sequence_has_snapshots():
    """Snapshots are before its end, and at the divergence from a cached prompt."""
    cache, opened = jkv.allocate(jkv.init(make_config("state")), [0, 0])
    made = []
    for seq_id, sequence in enumerate([PROMPTS[5], [*SHARED, *[4] * 10]]):
        ids = np.array([opened.seq_ids[seq_id], -1], np.int32)
        cache, turn = extend("state", 4, cache, ids, padded([sequence, []]))
        np.testing.assert_array_equal(turn.tokens[:1], expect("state", [sequence], 4))
        made.append(jkv.snapshots(cache, seq_id)[: len(sequence)].nonzero()[0].tolist())
    assert made == [[24], [16, 24]]


def test_unsupported_state_options_are_named():
    cache = jkv.init(make_config("keys+state"))
    with pytest.raises(UsageError, match="max_pending=4"):
        generate("keys+state", cache, PROMPTS, speculate=PromptLookup(num_tokens=4))
    cache, batch = jkv.append(cache, -1, 1)
    rows = np.zeros((1, 2, 4), np.float32)
    with pytest.raises(UsageError, match="layer 0 keeps no keys and values.*a state"):
        jkv.attend(cache, 0, batch, rows)
    with pytest.raises(UsageError, match="layer 1 keeps no state"):
        jkv.read_state(cache, 1, batch)
    state = jkv.read_state(cache, 0, batch)
    with pytest.raises(
        UsageError, match=r"int32\[B, 2\] with B = 1.*got float32\[1, 2\]"
    ):
        jkv.write_state(cache, 0, batch, {"fold": state["fold"].astype("float32")})
    with pytest.raises(UsageError, match=r"\['fold'\], got \[\]"):
        jkv.write_state(cache, 0, batch, {})
    with pytest.raises(UsageError, match="num_pending is at most 0"):
        jkv.append(cache, -1, 1, num_pending=1)
    with pytest.raises(ValueError, match="snapshot_every must be a multiple"):
        make_config("keys+state", every=6)
    with pytest.raises(
        ValueError, match="num_snapshots .* must be given to StateConfig"
    ):
        make_config("keys+state", num_snapshots=0)


def test_debug_mode_checks_state_writes():
    """A state that is not written, or is written twice, is reported."""
    cache = jkv.debug(jkv.init(make_config("state", caching=False)))
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
    assert "written to all layers" in str(found.value)
    assert "write_state to layer 0 for the second time" in str(found.value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Until(jkv.LogitsProcessor):
    """Mask every token after `most` tokens."""

    most: int = dataclasses.field(metadata={"static": True})

    def begin(self, variants, _prompts):
        return jnp.zeros(variants.shape, jnp.int32)

    def process(self, state, logits):
        return jnp.where((state >= self.most)[:, None], -jnp.inf, logits)

    def advance(self, state, tokens):
        return state + (tokens >= 0).astype(jnp.int32)


@pytest.mark.further
@pytest.mark.parametrize("kind", ["state", "window"])
def test_a_refused_last_token_leaves_the_cache_of_a_plain_step(kind):
    """Also with draft tokens behind it: they are rolled back, and it stays."""
    text, found = [0, 1, 2, 3, 4, 3, 2, 1, 0, 1, 2, 3, 4, 0], []
    for speculate in (None, PromptLookup(num_tokens=3, min_ngram=1, cost=1.0)):
        sizes = dict(pending=3, num_snapshots=0, every=None) if kind == "state" else {}
        cache = jkv.init(make_config(kind, caching=False, **sizes))
        cache, opened = jkv.allocate(cache, [0])
        options = dict(logits_processor=Until(4), speculate=speculate, max_new_tokens=9)
        cache, answer = jkv.jitted.extend(
            MODELS[kind], None, cache, opened.seq_ids, [text], **options
        )
        assert answer.reasons.tolist() == [jkv.FinishReason.NOTHING_ALLOWED]
        assert int(jkv.context_lengths(cache)[0]) == len(text) + 4
        new = answer.tokens[0, :4].tolist()
        assert new == continue_prompt(text, 4, kind)
        cache, after = extend(kind, 3, cache, opened.seq_ids, np.array([[1]]))
        assert after.tokens[0].tolist() == continue_prompt([*text, *new, 1], 3, kind)
        found.append(int(answer.statistics.draft_tokens))
    assert found[1] > found[0] == 0
