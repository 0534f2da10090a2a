"""Train a small random Qwen3 with GRPO in google-tunix, with rollouts from jkv.

    pip install '.[tunix]'
    python examples/train_with_tunix.py --engine jkv --seed 0
    python examples/train_with_tunix.py --reported [--exact]

The prompt names a letter ("say c"), and the reward is the share of the answer's letters
that match it; after a few dozen steps most do. The trainer is tunix's own: between
the two engines nothing differs but the argument `rollout_engine`.

With `--reported` the importance ratios are relative to the rollout's reported values,
and the last line shows their distance from 1: the bits of rollout and trainer differ.
With `--exact` they do not.
"""

import functools
import random
import time
from typing import Any

import jax
import numpy as np
import optax
from generating.arguments import Parser, at_least
from generating.exiting import errors_in_one_line

with errors_in_one_line():
    from flax import nnx
    from training.reported import ReportedLearner, format_ratios, read_measures
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    from jkv.integrations.tunix import JkvRollout

ENGINES = {"jkv": JkvRollout, "vanilla": "vanilla"}
LETTERS = "abcdefgh"
ALPHABET = "\0\1" + LETTERS + "sy "  # padding and the end of a text come first
PROMPT, ANSWER = 8, 8  # most tokens of either
PROMPTS, SAMPLES = 16, 8  # of a step, and of each prompt


class Alphabet:
    """A tokenizer with a token for each letter, as tunix asks for one."""

    def encode(self, text: str) -> list[int]:
        return [ALPHABET.index(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(ALPHABET[token] for token in tokens)

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def bos_id(self) -> int:
        return 0  # none


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Return for each answer the share of its letters that match the prompt's."""
    pairs = zip(prompts, completions, strict=True)
    return [text.count(prompt[-1]) / ANSWER for prompt, text in pairs]


def make_model(seed: int) -> qwen3.Qwen3:
    sizes = dict(num_layers=2, embed_dim=64, hidden_dim=128, vocab_size=len(ALPHABET))
    heads = dict(num_heads=4, num_kv_heads=2, head_dim=16, rope_theta=1_000_000)
    config = qwen3.ModelConfig(**sizes, **heads, norm_eps=1e-6, use_tied_embedding=True)
    return qwen3.Qwen3(config, rngs=nnx.Rngs(seed))


def make_cluster(
    engine: Any, seed: int, num_steps: int, reported: bool = False
) -> rl_cluster.RLCluster:
    """Return tunix's trainer and rollouts, on one device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    config = rl_cluster.ClusterConfig(
        role_to_mesh={rl_cluster.Role.ACTOR: mesh, rl_cluster.Role.ROLLOUT: mesh},
        rollout_engine=engine,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(5e-3),
            max_steps=num_steps,
            eval_every_n_steps=num_steps + 1,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=ANSWER,
            max_prompt_length=PROMPT,
            kv_cache_size=PROMPT + ANSWER,
            temperature=1.0,
            return_logprobs=reported,
            seed=seed,
        ),
    )
    return rl_cluster.RLCluster(
        actor=make_model(seed), tokenizer=Alphabet(), cluster_config=config
    )


def train(
    cluster: rl_cluster.RLCluster, seed: int, num_steps: int, reported: bool = False
) -> dict[str, list[float]]:
    """Return of each step the mean reward, a rollout's seconds, ratios if reported."""
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
    parser.add_argument("--exact", action="store_true", help="the same bits; of jkv")
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
