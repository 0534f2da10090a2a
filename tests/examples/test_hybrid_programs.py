"""Programs on a model whose layers keep a state: tokens are those of transformers.

Cold and warm, with guesses that are taken back, and in a conversation that goes back.
"""

import argparse
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from support import checkpoint_fixtures as fixtures

import jkv
from jkv.decoding import PromptLookup

tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.one_end
NAME = "qwen3_5"


@pytest.mark.slow
def test_prompts_cold_and_warm_with_guesses():
    """In a queue, two at a time: every text is what it is alone and computed whole."""
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


def test_a_conversation_goes_back(tmp_path, capsys):
    """Where no state is, the text is computed anew: the answer is the same."""
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
