"""Training windows of the draft model, completed and labelled by the bundled model."""

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
from bundled.model import FOLDER, Params, forward

import jkv

# Tokens of a window, tokens of a document in a completed window, windows per step.
WINDOW, START, WINDOWS_PER_STEP = 320, 128, 12
RUNNING = 64


def cut(documents: list[np.ndarray]) -> np.ndarray:
    """Cut documents into windows, i32[N, WINDOW]; WINDOWS_PER_STEP divides N."""
    stream = np.concatenate(documents)
    count = len(stream) // WINDOW // WINDOWS_PER_STEP * WINDOWS_PER_STEP
    return stream[: count * WINDOW].reshape(count, WINDOW)


def go_on(windows: np.ndarray) -> np.ndarray:
    """Replace all but the first START tokens of windows by the model's completion."""
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
    """Return the model's most likely token after each one, in batches, i32[N, T].

    Args:
      params: the model's parameters.
      windows: i32[N, T]; WINDOWS_PER_STEP divides N.
    """
    parts = windows.reshape(-1, WINDOWS_PER_STEP, windows.shape[1])
    return np.concatenate([np.asarray(choose(params, part)) for part in parts])


def measure(params: Params, teacher: Params, windows: np.ndarray) -> np.ndarray:
    """Return True where draft model and teacher agree on the next token, bool[N, T]."""
    return label(params, windows) == label(teacher, windows)
