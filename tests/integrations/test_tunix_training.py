"""Tunix's GRPO trainer with JkvRollout as its engine, and the documented example."""

import doctest
import functools

import jax
import numpy as np
import pytest
import train_with_tunix
from flax import nnx
from support.paths import ROOT
from tunix.rl import rl_cluster
from tunix.rl import utils as rl_utils

from jkv.integrations.tunix import JkvRollout

# The trainer enters its meshes in a way that JAX deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.with mesh.*:DeprecationWarning")


def test_rollouts_follow_the_weights_of_the_trainer():
    cluster = train_with_tunix.make_cluster(JkvRollout, seed=0, num_steps=3)
    before = np.array(cluster.rollout.model().embedder.input_embedding[...])
    found = train_with_tunix.train(cluster, seed=0, num_steps=3)
    assert len(found["rewards"]) == 3 and all(0 < r < 0.2 for r in found["rewards"])

    trained = cluster.actor_trainer.model
    assert rl_utils.is_sharing_weights(trained, cluster.rollout.model())
    assert (before != trained.embedder.input_embedding[...]).all()
    # Each step had new weights, so no cache hits on the previous step; equal prompts of
    # a step were computed once.
    tokens = len("say c")
    computed = int(cluster.rollout.statistics.prompt_tokens)
    assert computed <= tokens * train_with_tunix.PROMPTS


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_rollouts_on_other_devices_get_all_weights(monkeypatch):
    """The trainer passes them by `update_params`; the engine has arguments."""
    engine = functools.partial(JkvRollout, num_blocks=300, prefix_caching=False)
    device = np.array(jax.devices()[1:2]).reshape(1, 1)
    elsewhere = jax.sharding.Mesh(device, ("fsdp", "tp"))
    configure = rl_cluster.ClusterConfig

    def configure_apart(*, role_to_mesh, **fields):
        meshes = role_to_mesh | {rl_cluster.Role.ROLLOUT: elsewhere}
        return configure(role_to_mesh=meshes, **fields)

    monkeypatch.setattr(rl_cluster, "ClusterConfig", configure_apart)
    cluster = train_with_tunix.make_cluster(engine, seed=0, num_steps=2)
    train_with_tunix.train(cluster, seed=0, num_steps=2)
    trained, run = cluster.actor_trainer.model, cluster.rollout.model()
    pairs = zip(
        jax.tree.leaves(nnx.state(trained, nnx.Param)),
        jax.tree.leaves(nnx.state(run, nnx.Param)),
        strict=True,
    )
    for ours, theirs in pairs:
        assert ours.devices().isdisjoint(theirs.devices())
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("exact", [False, (64, 64)], ids=["usual", "exact"])
def test_ratios_to_reported_logps(exact):
    """Ratios are exactly 1 with `exact`, in a differentiated pass."""
    engine = functools.partial(JkvRollout, exact=exact)
    run = dict(seed=0, num_steps=2, reported=True)
    cluster = train_with_tunix.make_cluster(engine, **run)
    found = train_with_tunix.train(cluster, **run)
    assert len(found["log_ratio/abs_max"]) == 2
    most = max(found["log_ratio/abs_max"])
    if exact:
        assert most == 0
        assert found["is_ratio/min"] == found["is_ratio/max"] == [1, 1]
    else:
        assert 0 < most < 1e-4


def test_the_page_runs():
    page = ROOT / "docs" / "how-to" / "tunix-rollouts.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted and not failed
