"""GRPO on reported log-probabilities: a tunix learner and a bit-identical loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl import common
from tunix.rl.grpo import grpo_learner
from tunix.rl.rl_cluster import Mode

from jkv.integrations.tunix import JkvRollout

# Metrics of the loss, and the reduction over the parts of a step.
MEASURES = {
    "pg_clipfrac": np.mean,
    "log_ratio/abs_max": np.max,
    "is_ratio/min": np.min,
    "is_ratio/max": np.max,
}


class ReportedLearner(grpo_learner.GRPOLearner):
    """GRPO learner with the rollout's log-probabilities as the old policy's.

    tunix's learner uses the trainer's own, for which the ratio is 1 with any rollout.
    The loss is `make_loss`: tunix's own masks padding ids inside a completion out of
    attention, which changes later tokens by far more than rounding.
    """

    def __init__(self, cluster: Any, options: Any, reward: Any) -> None:
        super().__init__(cluster, options, reward)
        trainer = cluster.actor_trainer
        trainer.with_loss_fn(make_loss(cluster.rollout), has_aux=True)
        trainer.with_rl_metrics_to_log(MEASURES)

    def _generate_and_compute_advantage(
        self, training_input: Any, mode: Mode = Mode.TRAIN
    ) -> Any:
        rollout = self.rl_cluster.rollout
        generate, reported = rollout.generate, []

        def noted(*args: Any, **options: Any) -> Any:
            output = generate(*args, **options)
            reported.extend(output.logprobs)
            return output

        rollout.generate = noted
        try:
            example = super()._generate_and_compute_advantage(training_input, mode)
        finally:
            rollout.generate = generate
        old = np.zeros(example.completion_ids.shape, np.float32)
        for row, logprobs in zip(old, reported, strict=True):
            row[: len(logprobs)] = logprobs
        return dataclasses.replace(example, old_per_token_logps=jnp.array(old))


def make_loss(rollout: JkvRollout) -> Callable[..., tuple[jax.Array, dict[str, Any]]]:
    """Return GRPO's loss (https://arxiv.org/abs/2402.03300) on `JkvRollout.score`.

    With `JkvRollout(exact=)` the differentiated pass is bit-identical to the values
    reported by `generate`. Entropy and KL terms are omitted.
    """

    def loss(
        model: Any, train_example: Any, algo_config: Any
    ) -> tuple[jax.Array, dict[str, Any]]:
        mask = train_example.completion_mask
        logprobs = rollout.score(
            model,
            train_example.prompt_ids,
            train_example.completion_ids,
            temperature=algo_config.temperature,
        )
        log_ratio = jnp.where(mask, logprobs - train_example.old_per_token_logps, 0)
        ratio, epsilon = jnp.exp(log_ratio), algo_config.epsilon
        gains = ratio * train_example.advantages[:, None]
        clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
        least = jnp.minimum(gains, clipped * train_example.advantages[:, None])
        metrics = {
            "pg_clipfrac": (mask & (least < gains)).sum() / mask.sum(),
            "log_ratio/abs_max": jnp.abs(log_ratio).max(),
            "is_ratio/min": jnp.min(ratio, where=mask, initial=jnp.inf),
            "is_ratio/max": jnp.max(ratio, where=mask, initial=0.0),
        }
        mode = algo_config.loss_agg_mode
        return common.aggregate_loss(-least, mask, mode), metrics

    return loss


def read_measures(cluster: Any) -> dict[str, list[float]]:
    """Return the loss's metrics of each step of a run, by name."""
    metrics = cluster.actor_trainer.metrics_logger
    return {
        name: metrics.get_metric_history("actor", name, "train").tolist()
        for name in MEASURES
    }


def format_ratios(found: dict[str, list[float]]) -> str:
    """Return a line about the differences in the metrics of `read_measures`."""
    differences = found["log_ratio/abs_max"]
    least, most = min(found["is_ratio/min"]), max(found["is_ratio/max"])
    return (
        f"log-probabilities of rollout and trainer differ in "
        f"{sum(each > 0 for each in differences)} of {len(differences)} steps, by "
        f"{max(differences):.1e} at most; importance ratios from {least:.8f} to "
        f"{most:.8f}"
    )
