"""Train the draft model of `speculate.py` to predict the bundled model's tokens.

    python examples/train_draft.py

A Llama of an eighth of the bundled model's size, with its tokenizer. The bundled model
reads the documents that it was trained on, goes on from the beginnings of some, and
says after each token which one it holds the most likely; the draft learns to say the
same. That is the distillation of Hinton et al. (2015) with the hardest of targets, as a
greedy draft is right or wrong, and of Kim and Rush (2016) where the text is the model's
own, as it is where the draft will guess. Held-out documents serve to measure alone.

It takes some ten minutes on two cores (estimated). A short run, to see that it works:

    python examples/train_draft.py --steps 20 --continued 8 --output /tmp/draft
"""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pretrained
from generating.arguments import Parser, at_least
from generating.exiting import answering_errors, errors_in_one_line
from pydoc_model import CONFIG, FOLDER, Params, encode, forward, init_params, load
from train_pydoc import learning_rate, make_optimizer, save, take_step

import jkv

DRAFT_FOLDER = FOLDER.parent / "pydoc_draft"
DRAFT_CONFIG = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NUM_STEPS, NUM_CONTINUED, SEED = 1300, 256, 0
# Windows of so many tokens; of a continued one the first are a document's.
WINDOW, START, WINDOWS_PER_STEP = 320, 128, 12
RUNNING = 64


def cut(documents: list[np.ndarray]) -> np.ndarray:
    """Return the documents in windows, i32[N, WINDOW], N a multiple of a step's."""
    stream = np.concatenate(documents)
    count = len(stream) // WINDOW // WINDOWS_PER_STEP * WINDOWS_PER_STEP
    return stream[: count * WINDOW].reshape(count, WINDOW)


def go_on(windows: np.ndarray) -> np.ndarray:
    """Return the windows with the bundled model's continuation of their beginnings."""
    model, params = pretrained.load(FOLDER)
    config = jkv.CacheConfig.for_context_length(
        WINDOW, max_sequences=RUNNING, dtype=jnp.float32, **model.cache_fields
    )
    generate = jkv.jitted.generate
    starts = windows[:, :START]
    _, result = generate(
        model,
        params,
        jkv.init(config),
        starts,
        max_new_tokens=WINDOW - START,
        max_running=RUNNING,
    )
    return np.concatenate([starts, result.tokens], axis=1)


@jax.jit
def choose(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the most likely token after each one, i32[N, T]."""
    return jnp.argmax(forward(params, tokens), axis=-1).astype(jnp.int32)


def label(params: Params, windows: np.ndarray) -> np.ndarray:
    """Return which token a model holds the most likely after each one, i32[N, T].

    Args:
      params: the model.
      windows: i32[N, T], N a multiple of a step's.
    """
    parts = windows.reshape(-1, WINDOWS_PER_STEP, windows.shape[1])
    return np.concatenate([np.asarray(choose(params, part)) for part in parts])


def train(
    windows: np.ndarray,
    labels: np.ndarray,
    num_steps: int,
    minutes: float | None = None,
) -> Iterator[Params]:
    """Train from scratch, for `minutes` or else for `num_steps`.

    Yields the parameters after 50 steps each, which the next step overwrites;
    the last of it is the result.
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
        chosen = rng.choice(len(windows), WINDOWS_PER_STEP, replace=False)
        rate = np.float32(learning_rate(progress))
        params, state, found = step(
            params, state, windows[chosen], labels[chosen], rate
        )
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


def measure(params: Params, teacher: Params, windows: np.ndarray) -> np.ndarray:
    """Return where the draft agrees with the teacher, bool[N, T]."""
    return label(params, windows) == label(teacher, windows)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=at_least(1), default=NUM_STEPS)
    minutes = at_least(0.1, float)
    parser.add_argument("--minutes", type=minutes, help="instead of a number of steps")
    parser.add_argument("--continued", type=at_least(1), default=NUM_CONTINUED)
    parser.add_argument("--output", type=Path, default=DRAFT_FOLDER)
    options = parser.parse_args()
    with answering_errors():
        options.output.mkdir(parents=True, exist_ok=True)
        config = json.dumps(DRAFT_CONFIG, indent=2) + "\n"
        (options.output / "config.json").write_text(config)
    teacher, tokenizer = load(FOLDER)
    documents, held_out = (cut(encode(tokenizer, each)) for each in corpus.split())

    some = np.random.default_rng(SEED).permutation(len(documents))
    continued = go_on(documents[some[: options.continued]])
    windows = np.concatenate([documents, continued])
    windows = windows[: len(windows) // WINDOWS_PER_STEP * WINDOWS_PER_STEP]
    print(f"{windows.size:,} tokens, {continued.size:,} of texts gone on", flush=True)
    labels = label(teacher, windows)
    for params in train(windows, labels, options.steps, options.minutes):
        save(params, options.output)

    agrees = measure(params, teacher, held_out)
    print(f"on held-out documents the draft agrees in {agrees.mean():.1%}")
    written = go_on(held_out[: 4 * WINDOWS_PER_STEP])
    agrees = measure(params, teacher, written)[:, START - 1 : -1]
    print(f"on what the model writes from their beginnings in {agrees.mean():.1%}")


if __name__ == "__main__":
    with errors_in_one_line():
        main()
