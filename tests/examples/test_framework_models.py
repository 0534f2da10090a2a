"""The Flax NNX and Equinox examples agree with plain attention over whole sequences."""

import dataclasses
import inspect
from functools import partial

import equinox_model
import flax.nnx as nnx
import flax_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv

# Absolute, for logits up to about 10 in float32.
TOLERANCE = 2e-5

SEQUENCES = ([5, 17, 80, 3, 9, 33, 2, 61, 44, 90, 7], [42, 7, 18], [1, 2, 3, 4, 5, 6])
# Tokens of each sequence by call: uneven chunks, then single tokens.
CHUNKS = ((4, 0, 1), (5, 1, 3), (1, 1, 1), (1, 1, 1))


NEVER = 2**30


def flax_example():
    decoder = flax_model.Decoder(nnx.Rngs(0))
    model, params = flax_model.paged(decoder)
    return flax_model, model, params, partial(flax_model.dense, decoder)


def equinox_example():
    decoder = equinox_model.Decoder(jax.random.key(0))
    decoder = jax.tree.map(jnp.float32, decoder)  # float64 under x64 otherwise
    dense = partial(equinox_model.dense, decoder)
    return equinox_model, equinox_model.model, decoder, dense


@pytest.fixture(scope="module", params=[flax_example, equinox_example])
def example(request):
    return request.param()


@pytest.fixture(scope="module")
def expected(example):
    """Return each sequence's logits by plain attention."""
    dense = jax.jit(example[-1])
    # Padded to one length: the padding is causally masked.
    padded = [
        sequence + [0] * (len(SEQUENCES[0]) - len(sequence)) for sequence in SEQUENCES
    ]
    rows = [np.asarray(dense(jnp.asarray(sequence, jnp.int32))) for sequence in padded]
    return [row[: len(sequence)] for row, sequence in zip(rows, SEQUENCES, strict=True)]


@pytest.fixture(scope="module")
def step(example):
    """Return a jitted step; from `start` on, positions are one too low."""
    _, model, params, _ = example

    @jax.jit
    def step(cache, seq_ids, counts, tokens, start):
        cache, batch = jkv.append(cache, seq_ids, counts, capacity=12)
        late = (batch.positions >= start).astype(jnp.int32)
        moved = dataclasses.replace(batch, positions=batch.positions - late)
        logits, cache = model(params, tokens, cache, moved, all_rows=True)
        return jkv.commit(cache, batch), batch.status, logits

    return step


def paged_logits(module, step, start=NEVER):
    """Compute the sequences in packed chunks; return each one's logits."""
    config = jkv.CacheConfig(
        num_layers=module.LAYERS,
        num_kv_heads=module.KV_HEADS,
        head_dim=module.HEAD_DIM,
        num_blocks=12,
        block_size=4,
        max_sequences=4,
        max_context_length=16,
        dtype=jnp.float32,
    )
    cache, opened = jkv.allocate(jkv.init(config), jnp.zeros(3, jnp.int32))
    rows = [[] for _ in SEQUENCES]
    done = np.zeros(3, int)
    for counts in CHUNKS:
        pieces = [t[n : n + c] for t, n, c in zip(SEQUENCES, done, counts, strict=True)]
        tokens = np.full(12, -1, np.int32)
        tokens[: sum(counts)] = sum(pieces, [])
        cache, status, logits = step(
            cache,
            opened.seq_ids,
            jnp.asarray(counts, jnp.int32),
            jnp.asarray(tokens),
            jnp.asarray(start, jnp.int32),
        )
        jkv.raise_for_status(status)
        ends = np.cumsum(counts)
        for row, end, count in zip(rows, ends, counts, strict=True):
            row.extend(np.asarray(logits[end - count : end]))
        done += counts
    assert done.tolist() == [len(sequence) for sequence in SEQUENCES]
    return [np.stack(row) for row in rows]


@pytest.mark.newest_further
def test_paged_logits_equal_plain_attention(example, step, expected):
    for got, want in zip(paged_logits(example[0], step), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.one_end
def test_tolerance_catches_wrong_answers(example, step, expected):
    first, second, _ = expected
    shifted = paged_logits(example[0], step, start=4)[0]
    np.testing.assert_allclose(shifted[:4], first[:4], rtol=0, atol=TOLERANCE)
    assert np.abs(shifted[4:] - first[4:]).max(axis=-1).min() > 100 * TOLERANCE
    # Other sequences' logits and zeros differ, too.
    assert np.abs(first[:3] - second).max(axis=-1).min() > 100 * TOLERANCE
    assert np.abs(first).max(axis=-1).min() > 100 * TOLERANCE


@pytest.mark.one_end
def test_models_have_the_signature_of_the_protocol(example):
    _, model, _, _ = example
    protocol = list(inspect.signature(jkv.Model.__call__).parameters)[1:]  # no self
    found = inspect.signature(model).parameters
    assert list(found)[: len(protocol)] == protocol
    more = list(found.values())[len(protocol) :]
    assert all(each.default is not inspect.Parameter.empty for each in more)


@pytest.mark.one_end
def test_scripts_run(example, capsys):
    module = example[0]
    module.main(num_tokens=6)
    lines = capsys.readouterr().out.splitlines()
    for line, prompt in zip(lines, (5, 2), strict=False):
        assert len(line.partition("|")[0].split()) == prompt + 6
