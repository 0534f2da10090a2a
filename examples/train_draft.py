"""Train the draft model of `speculate.py` to predict the bundled model's tokens.

    python examples/train_draft.py

The draft model is a Llama of an eighth of the bundled model's size, with the same
tokenizer. It learns the bundled model's most likely token after each token of the
training documents and of the model's own completions (hard distillation; Kim and Rush,
2016).

Training takes about ten minutes on two cores (estimated). A short test run:

    python examples/train_draft.py --steps 20 --continued 8 --output /tmp/draft
"""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bundled import corpus
from bundled.model import CONFIG, FOLDER, Params, encode, forward, init_params, load
from bundled.training import learning_rate, make_optimizer, save, take_step
from generating.arguments import Parser, at_least
from generating.exiting import answering_errors, errors_in_one_line
from training import draft_windows

DRAFT_FOLDER = FOLDER.parent / "pydoc_draft"
DRAFT_CONFIG = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NUM_STEPS, NUM_CONTINUED, SEED = 1300, 256, 0


def train(
    windows: np.ndarray,
    labels: np.ndarray,
    num_steps: int,
    minutes: float | None = None,
) -> Iterator[Params]:
    """Train from scratch, for `minutes` if given, else for `num_steps`.

    Yields the parameters every 50 steps; the next step donates them.
    """
    optimizer = make_optimizer()

    def find_loss(params, tokens, wanted):
        logits = forward(params, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
        return losses.mean(), jnp.mean(jnp.argmax(logits, axis=-1) == wanted)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens, wanted, rate):
        found, gradients = jax.value_and_grad(find_loss, has_aux=True)(
            params, tokens, wanted
        )
        return *take_step(optimizer, params, state, gradients, rate), found

    params = init_params(jax.random.key(SEED), DRAFT_CONFIG)
    state, rng = optimizer.init(params), np.random.default_rng(SEED)
    recent, progress, start = [], 0.0, time.perf_counter()
    while progress < 1:
        chosen = rng.choice(len(windows), draft_windows.WINDOWS_PER_STEP, replace=False)
        rate = np.float32(learning_rate(progress))
        given = windows[chosen], labels[chosen], rate
        params, state, found = step(params, state, *given)
        recent.append(np.asarray(found))
        spent = (time.perf_counter() - start) / 60
        progress = spent / minutes if minutes else len(recent) / num_steps
        if len(recent) % 50 == 0 or progress >= 1:
            loss, agrees = np.mean(recent[-50:], axis=0)
            print(
                f"step {len(recent):4}  loss {loss:.3f}  agrees {agrees:.1%}  "
                f"{progress:4.0%}, {spent * (1 / progress - 1):4.1f} min left",
                flush=True,
            )
            yield params


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=at_least(1), default=NUM_STEPS)
    parser.add_argument("--minutes", type=at_least(0.1, float), help="instead of steps")
    parser.add_argument("--continued", type=at_least(1), default=NUM_CONTINUED)
    parser.add_argument("--output", type=Path, default=DRAFT_FOLDER)
    options = parser.parse_args()
    with answering_errors():
        options.output.mkdir(parents=True, exist_ok=True)
        config = json.dumps(DRAFT_CONFIG, indent=2) + "\n"
        (options.output / "config.json").write_text(config)
    teacher, tokenizer = load(FOLDER)
    cut, go_on = draft_windows.cut, draft_windows.go_on
    documents, held_out = (cut(encode(tokenizer, each)) for each in corpus.split())
    some = np.random.default_rng(SEED).permutation(len(documents))
    continued = go_on(documents[some[: options.continued]])
    windows = np.concatenate([documents, continued])
    size = draft_windows.WINDOWS_PER_STEP
    windows = windows[: len(windows) // size * size]
    print(f"{windows.size:,} tokens, {continued.size:,} of texts gone on", flush=True)
    labels = draft_windows.label(teacher, windows)
    for params in train(windows, labels, options.steps, options.minutes):
        save(params, options.output)

    agrees = draft_windows.measure(params, teacher, held_out)
    print(f"on held-out documents the draft agrees in {agrees.mean():.1%}")
    agrees = draft_windows.measure(params, teacher, go_on(held_out[: 4 * size]))
    agrees = agrees[:, draft_windows.START - 1 : -1]
    print(f"on what the model writes from their beginnings in {agrees.mean():.1%}")


if __name__ == "__main__":
    with errors_in_one_line():
        main()
