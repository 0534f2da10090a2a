"""tunix's GRPO trainer with JkvRollout as its engine, and the page that says how."""

import doctest

import numpy as np
import pytest
import train_with_tunix
from places import ROOT
from tunix.rl import utils as rl_utils

# The trainer enters its meshes the way that JAX would rather not see.
pytestmark = pytest.mark.filterwarnings("ignore:.with mesh.*:DeprecationWarning")


def test_the_trainer_runs_unmodified_and_rollouts_follow_its_weights():
    cluster = train_with_tunix.make_cluster("jkv", seed=0, num_steps=3)
    before = np.array(cluster.rollout.model().embedder.input_embedding[...])
    found = train_with_tunix.train(cluster, seed=0, num_steps=3)
    assert len(found["rewards"]) == 3 and all(0 < r < 0.2 for r in found["rewards"])

    trained = cluster.actor_trainer.model
    assert rl_utils.is_sharing_weights(trained, cluster.rollout.model())
    assert (before != trained.embedder.input_embedding[...]).all()
    # Each step had new weights: nothing of the step before was taken for cached, and
    # what equal prompts of a step share was computed once.
    tokens = len("say c")
    computed = int(cluster.rollout.statistics.prompt_tokens)
    assert computed <= tokens * train_with_tunix.PROMPTS


def test_the_page_runs():
    page = ROOT / "docs" / "how-to" / "trainer.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted and not failed
