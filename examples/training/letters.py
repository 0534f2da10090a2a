"""Task of `train_with_tunix.py`: letters as tokens, a reward, and a small Qwen3."""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.rollout import base_rollout

LETTERS = "abcdefgh"
ALPHABET = "\0\1" + LETTERS + "sy "  # padding and end-of-sequence first
PROMPT, ANSWER = 8, 8  # maximum tokens
PROMPTS, SAMPLES = 16, 8  # prompts per step, samples per prompt


class Alphabet:
    """A tokenizer with one token per letter, with tunix's interface."""

    def encode(self, text: str) -> list[int]:
        return [ALPHABET.index(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(ALPHABET[token] for token in tokens)

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def bos_id(self) -> int:
        return 0  # no such token


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Return, per completion, its count of the prompt's last letter over ANSWER."""
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
    """Return tunix's trainer and rollout engine, on one device."""
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
