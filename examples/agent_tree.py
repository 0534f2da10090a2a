"""An agent with a calculator: a rollout tree and its policy gradient.

    python examples/agent_tree.py --turns 8 --branches 8

In each turn the bundled model samples one line per branch. The calculator adds the
numbers of a line; a line with numbers has reward 1, and the first of them continues,
followed by the sum. `jkv.score` computes each token of the recorded tree once, in the
forward pass and in the gradient of the policy loss. The agent is in `agents/`.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
from agents.rollout import Agent
from generating.arguments import Parser, at_least, text
from generating.exiting import answering_errors, errors_in_one_line

import jkv
from jkv import trees

BUNDLED = Path(__file__).parent / "models" / "pydoc"
PROMPT = """Adding up

>>> x = 2 + 2
4
>>> print(50, 5)
55
>>> y = 7 + 3.20
30
>>>"""
CONTEXT = 512


def main():
    parser = Parser(__doc__)
    add, number = parser.add_argument, at_least(1)
    add("prompt", nargs="?", type=text, default=PROMPT)
    add("--model", default=BUNDLED, help="a Hugging Face folder; default: bundled")
    add("--turns", type=number, default=8, help="per rollout; %(default)s")
    add("--branches", type=number, default=8, help="per turn; %(default)s")
    add("--rate", type=at_least(0, float), default=0.1, help="step size; %(default)s")
    options = parser.parse_args()
    jkv.keep_compiled_programs()
    with answering_errors():
        show(options)


def show(options):
    """Run a rollout and two policy gradient steps; print rewards and shared tokens."""
    model, params = pretrained.load(options.model, dtype=jnp.float32)
    tokenizer = pretrained.load_tokenizer(options.model)
    config = model.cache_config(
        CONTEXT, max_sequences=options.branches + 1, dtype=jnp.float32
    )
    agent = Agent(model, params, tokenizer, options.branches)
    _, played = agent.play(jkv.init(config), options.prompt, options.turns)
    record, tree = played.record, played.record.tree
    print(agent.read(trees.read_sequence(tree, played.trunk)))
    lengths = [len(trees.read_sequence(tree, segment)) for segment in played.rewards]
    print(f"{sum(played.rewards.values()):.0f} of {len(lengths)} lines have numbers")
    print(f"{tree.num_rows} rows instead of {sum(lengths)} of separate texts")

    advantages = find_advantages(played)
    learn = jax.jit(partial(improve, model, config, options.rate))
    (_, difference), params = learn(params, record, advantages)
    (after, _), _ = learn(params, record, advantages)
    print(f"scores differ from the rollout's by {difference:.0e} at most")
    print(f"the policy's gain on these lines after one step: {after:.3f}")


def find_advantages(played):
    """Return the advantage of each segment over its siblings, f32[S]."""
    advantages = np.zeros(played.record.tree.num_segments, np.float32)
    for segments in played.siblings:
        rewards = np.array([played.rewards[segment] for segment in segments])
        advantages[segments] = rewards - rewards.mean()
    return advantages


def improve(model, config, rate, params, record, advantages):
    """Take a gradient step.

    Returns:
        The gain, the largest difference of log-probabilities, and new parameters.
    """
    segments = record.tree.segments
    counts = record.is_generated[segments] & (segments >= 0)

    def gain(params):
        scores = jkv.score(model, params, record.tree, config=config)
        differences = jnp.where(counts, scores - record.logprobs, 0.0)
        gains = jnp.where(counts, jnp.exp(differences) * advantages[segments], 0.0)
        return gains.mean(), jnp.abs(differences).max()

    found, gradient = jax.value_and_grad(gain, has_aux=True)(params)
    better = jax.tree.map(lambda old, slope: old + rate * slope, params, gradient)
    return found, better


if __name__ == "__main__":
    with errors_in_one_line():
        main()
