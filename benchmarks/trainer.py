"""Training with rollouts from jkv and from Tunix's own engine.

    python benchmarks/trainer.py [--seeds 6] [--steps 60]

Requires the extra `tunix`: run it with the python of `.venv-tunix` (installed by `make
tunix`). First the runs of `examples/train_with_tunix.py`, engine by engine for each
seed:
the rewards of each step, which must rise equally. Then one rollout of longer sequences,
interleaved.
"""

import argparse
import pathlib
import sys
from importlib import metadata

import jax
import numpy as np

FOLDER = pathlib.Path(__file__).parent
sys.path.append(str(FOLDER.parent / "examples"))

import harness  # noqa: E402
import train_with_tunix as example  # noqa: E402
from flax import nnx  # noqa: E402
from training import letters  # noqa: E402
from tunix.rl.rollout import base_rollout, vanilla_rollout  # noqa: E402

from jkv.integrations.tunix import JkvRollout  # noqa: E402

RESULTS = FOLDER / "results" / "trainer.json"

# The timed rollout.
PROMPT, ANSWER = 256, 64  # maximum tokens
PROMPTS, SAMPLES = 8, 8


def train_all(num_seeds: int, num_steps: int) -> list[dict]:
    """Return the rewards of each run, by engine and seed."""
    runs = []
    for seed in range(num_seeds):
        for name, engine in example.ENGINES.items():
            cluster = example.make_cluster(engine, seed, num_steps)
            rewards = example.train(cluster, seed, num_steps)["rewards"]
            runs.append({"engine": name, "seed": seed, "rewards": rewards})
            jax.clear_caches()
    return runs


def make_prompts() -> list[str]:
    """Return prompts of 128 to 256 letters, each repeated for its samples."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(PROMPT // 2, PROMPT, PROMPTS, endpoint=True)
    prompts = ["".join(draw.choice(list(letters.LETTERS), size)) for size in lengths]
    return [prompt for prompt in prompts for _ in range(SAMPLES)]


def time_rollouts(rounds: int) -> dict:
    """Return a rollout's time with each engine, all completions of full length."""
    model = letters.make_model(0)
    # An end token outside the vocabulary, so that all completions have equal length.
    never = len(letters.ALPHABET)
    config = base_rollout.RolloutConfig(
        max_tokens_to_generate=ANSWER,
        max_prompt_length=PROMPT,
        kv_cache_size=PROMPT + ANSWER,
        temperature=1.0,
        seed=0,
        eos_tokens=[never],
    )
    sizes = model.config.num_layers, model.config.num_kv_heads, model.config.head_dim
    engines = {
        "jkv": JkvRollout(model, letters.Alphabet()),
        "vanilla": vanilla_rollout.VanillaRollout(
            model,
            letters.Alphabet(),
            base_rollout.CacheConfig(config.kv_cache_size, *sizes),
        ),
    }
    prompts = make_prompts()

    def forget() -> None:
        """Change the weights before each sample, as a trainer does."""
        state = nnx.state(model)
        nnx.update(model, jax.tree.map(lambda leaf: leaf + 0, state))

    cases = [
        harness.Case(
            name=name,
            prepare=forget,
            run=lambda _, engine=engine: engine.generate(prompts, config),
            check=check_lengths,
        )
        for name, engine in engines.items()
    ]
    samples = harness.interleave(cases, rounds=rounds, warmup=2)
    given = sum(len(prompt) for prompt in prompts)
    # The vanilla engine computes the padding, too.
    computed = {
        "jkv": int(engines["jkv"].statistics.prompt_tokens),
        "vanilla": len(prompts) * PROMPT,
    }
    rows = [
        {
            "engine": name,
            **taken.row(scale=1e3),
            "against vanilla": taken.ratio_to(samples["vanilla"]),
            "prompt tokens computed": computed[name],
        }
        for name, taken in samples.items()
    ]
    return {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "answer": ANSWER,
        "prompt tokens given": given,
        "share that jkv computed": computed["jkv"] / given,
        "rows": rows,
    }


def check_lengths(output: base_rollout.RolloutOutput) -> None:
    """Raise if a completion is shorter than its limit."""
    lengths = {len(row) for row in output.tokens}
    if lengths != {ANSWER}:
        raise ValueError(f"completions must have {ANSWER} tokens, got {lengths}")


def last_rewards(curves: list[dict]) -> dict[str, list[float]]:
    """Return each engine's mean rewards of the last ten steps, by seed."""
    return {
        engine: [
            float(np.mean(curve["rewards"][-10:]))
            for curve in curves
            if curve["engine"] == engine
        ]
        for engine in example.ENGINES
    }


def check_curves(curves: list[dict]) -> None:
    """Raise unless rewards rise, and each engine's are within the other's range."""
    for curve in curves:
        first, last = curve["rewards"][:10], curve["rewards"][-10:]
        if sum(last) <= 3 * sum(first):
            raise ValueError(f"rewards do not rise: {curve['engine']}, {curve['seed']}")
    rewards = last_rewards(curves)
    for one, other in (("jkv", "vanilla"), ("vanilla", "jkv")):
        if not min(rewards[other]) < np.mean(rewards[one]) < max(rewards[other]):
            raise ValueError(
                f"rewards of {one} are outside the other's range: {rewards}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    where = harness.machine()
    for package in ("flax", "google-tunix"):
        where["versions"][package] = metadata.version(package)
    rollout = time_rollouts(options.rounds)
    curves = train_all(options.seeds, options.steps)
    run = {"benchmark": "trainer", "machine": where, "rollout": rollout}
    harness.save(RESULTS, run | {"curves": curves})
    if options.seeds >= 3 and options.steps >= 60:  # fewer are not significant
        check_curves(curves)

    print(harness.header("a rollout of 64 sequences", where))
    columns = {"engine": "engine", "median": "ms", "p10": "p10", "p90": "p90"}
    columns["against vanilla"] = "x vanilla"
    columns["prompt tokens computed"] = "prompt tokens"
    print(harness.table(rollout["rows"], columns))
    for engine, rewards in last_rewards(curves).items():
        print(f"{engine}: reward of the last ten steps", np.round(rewards, 2).tolist())


if __name__ == "__main__":
    main()
