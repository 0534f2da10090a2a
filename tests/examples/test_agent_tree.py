"""The agent example records its rollout as a trajectory tree."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from agent_tree import BUNDLED, PROMPT, find_advantages, improve
from agents.calculator import calculate
from agents.rollout import Agent

import jkv

pytestmark = pytest.mark.one_end


def test_the_calculator_adds():
    assert calculate(" x = 2 + 30\n") == 32
    assert calculate(" none\n") is None


@pytest.mark.further
def test_a_rollout_has_a_gradient():
    """The scored tokens are the sampled ones, and each distinct token occurs once."""
    model, params = pretrained.load(BUNDLED, dtype=jnp.float32, scan_layers=True)
    agent = Agent(
        model,
        params,
        pretrained.load_tokenizer(BUNDLED),
        num_branches=3,
        max_new_tokens=6,
        width=48,
    )
    config = model.cache_config(96, max_sequences=4, dtype=jnp.float32)
    cache, played = agent.play(jkv.init(config), PROMPT, num_turns=2)
    tree, record = played.record.tree, played.record
    jkv.check(cache)
    sequences = [jkv.trees.read_sequence(tree, segment) for segment in played.rewards]
    assert agent.read(jkv.trees.read_sequence(tree, played.trunk)).startswith(PROMPT)
    # Siblings that start alike were sampled twice and stay separate.
    begins = collections.Counter(
        tuple(sequence[: i + 1]) for sequence in sequences for i in range(len(sequence))
    )
    assert len(begins) <= tree.num_rows < sum(map(len, sequences)) / 2
    assert (
        int(jkv.context_lengths(cache).max())
        == len(jkv.trees.read_sequence(tree, played.trunk)) - 1
    )

    worth = find_advantages(played)
    for segments in played.siblings:
        found = [played.rewards[segment] for segment in segments]
        np.testing.assert_allclose(worth[segments], np.subtract(found, np.mean(found)))
    weights = np.cos(np.arange(tree.num_segments, dtype=np.float32))
    step = jax.jit(functools.partial(improve, model, config, 0.01))
    (gain, difference), better = step(params, record, weights)
    assert difference < 1e-4
    (later, _), _ = step(better, record, weights)
    assert later > gain + 1e-3
