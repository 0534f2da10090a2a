"""Train a small random Qwen3 with GRPO in google-tunix, with rollouts from jkv.

    pip install '.[tunix]'
    python examples/train_with_tunix.py --engine jkv --seed 0
    python examples/train_with_tunix.py --reported [--exact]

The prompt names a letter ("say c"); the reward is the fraction of the answer's letters
that match it, and exceeds one half after a few dozen steps. The trainer is Tunix's own:
the two engines differ only in the argument `rollout_engine`.

With `--reported`, importance ratios use the rollout's reported log-probabilities, and
the last line shows their distance from 1. It is not zero, as rollout and trainer round
differently; with `--exact` they are bit-identical.
"""

import functools
import random
import time

import numpy as np
from generating.arguments import Parser, at_least
from generating.exiting import errors_in_one_line

with errors_in_one_line():
    from training.letters import LETTERS, PROMPTS, SAMPLES, make_cluster, reward
    from training.reported import ReportedLearner, format_ratios, read_measures
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    from jkv.integrations.tunix import JkvRollout

ENGINES = {"jkv": JkvRollout, "vanilla": "vanilla"}


def train(
    cluster: rl_cluster.RLCluster, seed: int, num_steps: int, reported: bool = False
) -> dict[str, list[float]]:
    """Return each step's mean reward, rollout seconds, and ratios if `reported`."""
    rewards, seconds, generate = [], [], cluster.rollout.generate

    def timed(*args: object) -> base_rollout.RolloutOutput:
        start = time.perf_counter()
        output = generate(*args)
        seconds.append(time.perf_counter() - start)
        return output

    def recorded(prompts, completions, **_: object) -> list[float]:
        found = reward(prompts, completions)
        rewards.append(float(np.mean(found)))
        print(f"step {len(rewards):3}  reward {rewards[-1]:.3f}  {completions[0]!r}")
        return found

    cluster.rollout.generate = timed
    options = grpo_learner.GRPOConfig(num_generations=SAMPLES, beta=0.0)
    draw = random.Random(seed)
    batches = [
        {"prompts": np.array([f"say {draw.choice(LETTERS)}" for _ in range(PROMPTS)])}
        for _ in range(num_steps)
    ]
    make_learner = ReportedLearner if reported else grpo_learner.GRPOLearner
    make_learner(cluster, options, recorded).train(batches)
    found = {"rewards": rewards, "rollout_seconds": seconds}
    return found | (read_measures(cluster) if reported else {})


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="jkv")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=at_least(1), default=60)
    parser.add_argument("--reported", action="store_true")
    parser.add_argument("--exact", action="store_true", help="bit-identical; jkv only")
    options = parser.parse_args()
    reported, engine = options.reported or options.exact, ENGINES[options.engine]
    if reported and options.engine != "jkv":
        parser.error("--reported and --exact are of --engine jkv")
    if options.exact:
        engine = functools.partial(JkvRollout, exact=True)
    run = options.seed, options.steps, reported
    found = train(make_cluster(engine, *run), *run)
    typical = 1000 * sorted(found["rollout_seconds"])[options.steps // 2]
    print(f"{options.engine}: a rollout took {typical:.0f} ms, compiling aside")
    if reported:
        print(format_ratios(found))


if __name__ == "__main__":
    with errors_in_one_line():
        main()
