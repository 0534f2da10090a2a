"""The Llama example gives the logits that transformers gives.

Every test runs on the committed checkpoints and logits and, where transformers and
torch are installed, on ones written and computed on the spot. With JKV_REQUIRE_PARITY
in the environment the latter must be installed. Most of the work of a real model is
checked here at once: packing, positions, windows, block tables, all layers.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
import write_llama_fixtures as fixtures
from caches import with_storage_filled
from ends import dealt

import jkv

# Absolute, for logits of 5 to 15 in float32. The largest difference seen was 2.4e-5,
# the mildest wrong answer below is off by 0.9.
TOLERANCE = 2e-4

HAS_TRANSFORMERS = all(map(importlib.util.find_spec, ("transformers", "torch")))
if os.environ.get("JKV_REQUIRE_PARITY") and not HAS_TRANSFORMERS:
    raise ImportError("JKV_REQUIRE_PARITY is set, but transformers or torch is missing")
NAMES = (*fixtures.CASES, "pydoc")
CHECKPOINTS = [(name, "committed") for name in dealt(NAMES, share=4)]
if HAS_TRANSFORMERS:
    CHECKPOINTS += [(name, "live") for name in NAMES]

# Tokens that each prompt of the tiny checkpoints gets in each call.
UNEVEN_CHUNKS = ((1, 3, 0), (0, 9, 5), (0, 1, 1), (0, 13, 0), (0, 0, 5))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint with what transformers computed from it."""

    name: str
    model: Any
    params: Any
    expected: dict[str, np.ndarray]

    @property
    def prompts(self) -> list[np.ndarray]:
        return self._split(self.expected["prompts"])

    @property
    def prefill(self) -> list[np.ndarray]:
        return self._split(self.expected["prefill"])

    def _split(self, rows: np.ndarray) -> list[np.ndarray]:
        return np.split(rows, np.cumsum(self.expected["prompt_lengths"])[:-1])


def load(name: str, source: str, folder: Path) -> Checkpoint:
    if source == "committed" or name == "pydoc":
        folder = fixtures.checkpoint_folder(name)
    else:
        fixtures.write_checkpoint(name, folder)
    if source == "live":
        expected = fixtures.expected(name, folder)
    else:
        expected = dict(np.load(fixtures.FIXTURES / name / "expected.npz"))
    return Checkpoint(name, *llama.load(folder), expected)


@pytest.fixture(
    scope="module",
    params=CHECKPOINTS,
    ids="-".join,
)
def checkpoint(request, tmp_path_factory):
    return load(*request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=dealt(fixtures.CASES))
def tiny_checkpoint(request):
    return load(request.param, "committed", Path())


forward = jax.jit(
    lambda model, *args, all_rows: model(*args, all_rows=all_rows),
    static_argnums=0,
    static_argnames="all_rows",
    donate_argnums=3,
)


def step(model, params, cache, seq_ids, counts, tokens, *, all_rows):
    """Append rows for the tokens and run the model; return the cache and logits."""
    # Apart from the model, so that it is compiled for all checkpoints only once.
    cache, batch = jkv.append(
        cache,
        np.asarray(seq_ids, np.int32),
        np.asarray(counts, np.int32),
        capacity=len(tokens),
    )
    jkv.raise_for_status(batch.status)
    tokens = np.asarray(tokens, np.int32)
    logits, cache = forward(model, params, tokens, cache, batch, all_rows=all_rows)
    return jkv.commit(cache, batch), np.asarray(logits)


def open_sequences(model, num_sequences):
    """Return a cache of small blocks, its storage full of NaN, and open sequences."""
    config = jkv.CacheConfig(
        **model.cache_fields,
        num_blocks=72,
        block_size=4,
        max_sequences=num_sequences + 1,
        max_context_length=96,
        dtype=jnp.float32,
    )
    cache = with_storage_filled(jkv.init(config), np.nan)
    cache, opened = jkv.allocate(cache, np.zeros(num_sequences, np.int32))
    jkv.raise_for_status(opened.status)
    return cache, np.asarray(opened.seq_ids)


def feed(model, params, cache, seq_ids, pieces: Sequence[np.ndarray], *, all_rows):
    """Feed a piece of text to each sequence, in one call with two rows of padding.

    Returns the cache and, per sequence, its logits: [len(piece), V] or [V].
    """
    # The padding request sits between the others, so every later row is displaced.
    ids = np.insert(seq_ids, 1, jkv.NO_SEQUENCE)
    padded = [pieces[0], np.full(2, -1, np.int32), *pieces[1:]]
    counts = np.asarray([len(piece) for piece in padded], np.int32)
    capacity = -(-counts.sum() // 16) * 16  # few sizes, so few compilations
    tokens = np.full(capacity, -1, np.int32)
    tokens[: counts.sum()] = np.concatenate(padded)
    cache, logits = step(model, params, cache, ids, counts, tokens, all_rows=all_rows)
    if all_rows:
        logits = np.split(logits[: counts.sum()], np.cumsum(counts)[:-1])
    return cache, [logits[0], *logits[2:]]


def prefill(model, params, prompts):
    """Feed whole prompts at once; return cache, sequences and each prompt's logits."""
    cache, seq_ids = open_sequences(model, len(prompts))
    cache, logits = feed(model, params, cache, seq_ids, prompts, all_rows=True)
    return cache, seq_ids, logits


def decode(model, params, cache, seq_ids, tokens, num_steps):
    """Yield the logits [B, V] of greedy steps, the first one feeding `tokens`."""
    for _ in range(num_steps):
        cache, logits = step(
            model, params, cache, seq_ids, np.ones_like(seq_ids), tokens, all_rows=False
        )
        yield logits
        tokens = logits.argmax(-1)
    jkv.check(cache)


def assert_close(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def test_prompts_of_unequal_length_in_one_call(checkpoint):
    _, _, logits = prefill(checkpoint.model, checkpoint.params, checkpoint.prompts)
    for got, expected in zip(logits, checkpoint.prefill, strict=True):
        assert_close(got, expected)


def test_prompts_in_uneven_chunks(checkpoint):
    prompts = checkpoint.prompts
    chunks = UNEVEN_CHUNKS
    if checkpoint.name == "pydoc":
        chunks = ((1, 2), (2, 0), (len(prompts[0]) - 3, len(prompts[1]) - 2))
    assert np.sum(chunks, axis=0).tolist() == [len(prompt) for prompt in prompts]

    cache, seq_ids = open_sequences(checkpoint.model, len(prompts))
    done = np.zeros(len(prompts), int)
    for counts in chunks:
        ends = done + counts
        pieces = [p[a:b] for p, a, b in zip(prompts, done, ends, strict=True)]
        cache, logits = feed(
            checkpoint.model, checkpoint.params, cache, seq_ids, pieces, all_rows=False
        )
        # Each chunk gives the logits of its last row, as the whole prompt did there.
        for i in np.flatnonzero(counts):
            assert_close(logits[i], checkpoint.prefill[i][ends[i] - 1])
        done = ends
    jkv.check(cache)


def test_fifty_decode_steps(checkpoint):
    expected = checkpoint.expected
    # A choice is only worth comparing where no rounding could have turned it.
    assert expected["margin"] > 10 * TOLERANCE

    cache, seq_ids, logits = prefill(
        checkpoint.model, checkpoint.params, checkpoint.prompts
    )
    first = np.asarray([rows[-1].argmax() for rows in logits])
    steps = list(
        decode(
            checkpoint.model,
            checkpoint.params,
            cache,
            seq_ids,
            first,
            fixtures.NUM_STEPS,
        )
    )
    chosen = np.stack([first, *(step.argmax(-1) for step in steps)], axis=1)
    np.testing.assert_array_equal(chosen, expected["generated"])
    detailed = np.stack(steps)[expected["steps"], fixtures.DETAILED]
    assert_close(detailed, expected["decode"])


@dataclasses.dataclass(frozen=True)
class Shifted:
    """A model that believes every token from `start` on to stand one place earlier."""

    model: Any
    start: int

    @property
    def cache_fields(self):
        return self.model.cache_fields

    def __call__(self, params, tokens, cache, batch, *, all_rows=False):
        late = (batch.positions >= self.start).astype(jnp.int32)
        batch = dataclasses.replace(batch, positions=batch.positions - late)
        return self.model(params, tokens, cache, batch, all_rows=all_rows)


def wrong_models(checkpoint):
    """Yield mistakes a port could make: what, and the wrong model and parameters."""
    model, params, layers = (
        checkpoint.model,
        checkpoint.params,
        checkpoint.params["layers"],
    )
    config = model.config

    def changed(**changes):
        return llama.Llama(dataclasses.replace(config, **changes)), params

    def replaced(**changes):
        return model, {**params, "layers": {**layers, **changes}}

    # Of the mistakes that compile anew, only those that a checkpoint is made to show.
    if not any(config.windows):
        yield "positions shifted by one from the fifth on", (Shifted(model, 4), params)
    if config.rope.scaling != "default":
        yield "no scaling", changed(rope=llama.Rope(theta=config.rope.theta))
    if any(config.windows):
        windows = tuple(window and window + 1 for window in config.windows)
        yield "windows one token wider", changed(windows=windows)
    if len(set(config.windows)) > 1:
        everywhere = config.windows[-1:] * config.num_layers
        yield "windows in all layers", changed(windows=everywhere)
    if config.num_kv_heads > 1:
        keys = jnp.roll(layers["key"], config.head_dim, axis=1)
        yield "key heads of other groups", replaced(key=keys)
    for name in ("query_bias", "key_bias", "value_bias", "output_bias"):
        if name in layers:
            yield f"no {name}", replaced(**{name: jnp.zeros_like(layers[name])})
    if config.has_qk_norm:
        yield "no query norm", replaced(query_norm=jnp.ones_like(layers["query_norm"]))
        yield "no key norm", replaced(key_norm=jnp.ones_like(layers["key_norm"]))


@pytest.mark.one_end
def test_tolerance_catches_wrong_prefill(tiny_checkpoint):
    for mistake, (model, params) in wrong_models(tiny_checkpoint):
        _, _, logits = prefill(model, params, tiny_checkpoint.prompts)
        error = np.abs(logits[1] - tiny_checkpoint.prefill[1]).max()
        assert error > 100 * TOLERANCE, f"{mistake}: off by {error} only, or not finite"


def test_tolerance_catches_other_sequences_and_zeros(tiny_checkpoint):
    _, second, third = tiny_checkpoint.prefill
    # In every single row, so that one misplaced or empty row cannot pass.
    assert np.abs(second[: len(third)] - third).max(axis=-1).min() > 100 * TOLERANCE
    assert np.abs(second[1:] - second[:-1]).max(axis=-1).min() > 100 * TOLERANCE
    assert np.abs(second).max(axis=-1).min() > 100 * TOLERANCE


@pytest.mark.one_end
def test_tolerance_catches_a_lost_token_in_decoding(tiny_checkpoint):
    params, prompts = tiny_checkpoint.params, tiny_checkpoint.prompts
    cache, seq_ids, logits = prefill(tiny_checkpoint.model, params, prompts)
    lengths = [len(prompt) - 1 for prompt in prompts]
    cache, status = jkv.truncate(cache, seq_ids, jnp.asarray(lengths, jnp.int32))
    jkv.raise_for_status(status)
    first = np.asarray([rows[-1].argmax() for rows in logits])
    (step,) = decode(tiny_checkpoint.model, params, cache, seq_ids, first, 1)
    error = np.abs(step[fixtures.DETAILED] - tiny_checkpoint.expected["decode"][0])
    assert error.max() > 100 * TOLERANCE
