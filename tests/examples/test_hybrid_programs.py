"""Programs on a hybrid model: tokens equal transformers'.

Cold and warm, with rejected draft tokens, and in a conversation with undo.
"""

import argparse
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
import tokenizers
from support.checkpoints import checkpoint_fixtures as fixtures

import jkv
from jkv.decoding import PromptLookup

pytestmark = pytest.mark.one_end
NAME = "qwen3_5"
NUM_NEW = 12


@pytest.mark.further  # decoding/test_states.py has a small model
@pytest.mark.slow
def test_cold_and_warm_prompts_with_speculation():
    """Two at a time: every completion equals that of the prompt alone and whole."""
    folder = fixtures.checkpoint_folder(NAME)
    model, params = pretrained.load(folder)
    expected = dict(np.load(fixtures.FIXTURES / NAME / "expected.npz"))
    ends = expected["prompt_lengths"].cumsum()
    prompts = np.split(expected["prompts"], ends[:-1])
    config = model.cache_config(
        96,
        max_sequences=3,
        block_size=4,
        dtype=jnp.float32,
        max_pending=3,
        prefix_caching=True,
        snapshot_every=8,
        num_snapshots=40,
    )
    generate = jax.jit(
        jkv.generate,
        static_argnames=("model", "max_new_tokens", "row_counts", "max_running"),
        donate_argnames="cache",
    )
    cache, counts = jkv.init(config), []
    for _ in range(2):
        cache, found = generate(
            model,
            params,
            cache,
            prompts,
            max_new_tokens=fixtures.NUM_STEPS + 1,
            row_counts=(16,),
            max_running=2,
            speculate=PromptLookup(num_tokens=3),
        )
        np.testing.assert_array_equal(found.tokens, expected["generated"])
        counts.append(found.statistics)
        jkv.check(cache)
    cold, warm = counts
    assert 0 < cold.accepted_tokens < cold.draft_tokens
    # The snapshots at 24 and 8 tokens of prompts of 26 and 11.
    assert (int(cold.cached_tokens), int(warm.cached_tokens)) == (0, 32)


OTHERS = ["qwen3_5", "falcon_h1", "mamba2"]


@pytest.mark.further
@pytest.mark.parametrize("name", ["lfm2", *OTHERS])
def test_sequences_continue_after_swap_and_save(name, tmp_path):
    """Swapped out and in, then saved and loaded, while others used their rows."""
    model, params = pretrained.load(fixtures.checkpoint_folder(name))
    expected = dict(np.load(fixtures.FIXTURES / name / "expected.npz"))
    ends = expected["prompt_lengths"].cumsum()[:2]
    prompts = [prompt.tolist() for prompt in np.split(expected["prompts"], ends)[:2]]
    config = model.cache_config(96, max_sequences=4, block_size=4, dtype=jnp.float32)
    run = jax.jit(
        functools.partial(jkv.extend, model), static_argnames="max_new_tokens"
    )

    def extend(cache, seq_ids, given):
        rows = np.full((2, 32), -1, np.int32)
        for row, tokens in zip(rows, given, strict=True):
            row[: len(tokens)] = tokens
        cache, found = run(params, cache, seq_ids, rows, max_new_tokens=NUM_NEW)
        return cache, found.tokens.tolist()

    def let_others_in(cache):
        cache, opened = jkv.allocate(cache, [0] * 4)
        for seq_ids in np.split(opened.seq_ids, 2):
            cache, _ = extend(cache, seq_ids, [[7, 5, 3], [2]])
        return jkv.free(cache, opened.seq_ids)[0]

    cache, opened = jkv.allocate(jkv.init(config), [0, 0])
    cache, first = extend(cache, opened.seq_ids, prompts)
    cache, swapped = jkv.swap_out(cache, opened.seq_ids)
    cache, back = jkv.swap_in(let_others_in(cache), swapped)
    # The last token of a turn is not cached yet.
    cache, second = extend(cache, back.seq_ids, [new[-1:] for new in first])
    jkv.save(tmp_path / "texts", cache, back.seq_ids)
    cache, _ = jkv.free(cache, back.seq_ids)
    cache, back = jkv.load(tmp_path / "texts", let_others_in(cache))
    cache, third = extend(cache, back.seq_ids, [new[-1:] for new in second])
    jkv.check(cache)
    made = np.concatenate([first, second, third], axis=1)
    np.testing.assert_array_equal(made, expected["generated"][:2, : 3 * NUM_NEW])


@pytest.mark.further
def test_undo_in_a_conversation(tmp_path, capsys):
    """Without a state at that point the sequence is recomputed; the answer is equal."""
    from chatting import commands, turns

    shutil.copytree(fixtures.checkpoint_folder(NAME), tmp_path / NAME)
    words = {f"w{i}": i for i in range(fixtures.VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / NAME / "tokenizer.json"))
    options = argparse.Namespace(
        model=tmp_path / NAME,
        context=64,
        branches=2,
        max_new_tokens=6,
        temperature=0.0,
        system=None,
        kv_dtype=None,
        value_dtype=None,
        roll=None,
    )
    chat = turns.Chat(options)
    chat.take_turn("w1 w2 w3")
    chat.take_turn(" w7 w8")
    answer, tokens = chat.branch.messages[-1], list(chat.branch.tokens)
    commands.undo(chat, "")
    assert len(chat.branch.tokens) < len(tokens)
    chat.take_turn(" w7 w8")
    assert chat.branch.messages[-1] == answer
    assert chat.branch.tokens == tokens
    assert "kept" in capsys.readouterr().out
    jkv.check(chat.cache)
