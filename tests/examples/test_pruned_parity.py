"""Logits after a prune equal those of a `DynamicCache` indexed by hand.

Requires transformers. Its cache drops the same tokens of each layer and head, and
`position_ids` continue as if nothing had been dropped.
"""

import importlib.util
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from support.checkpoints import checkpoint_fixtures as fixtures

import jkv

NEEDED = ("transformers", "torch", "accelerate")
HAS_TRANSFORMERS = all(map(importlib.util.find_spec, NEEDED))
pytestmark = [
    pytest.mark.one_end,
    pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed"),
]
NUM_TOKENS, NUM_NEXT, TOLERANCE = 45, 5, 1e-4


@pytest.fixture(scope="module")
def folder():
    return fixtures.checkpoint_folder("llama2")


@pytest.fixture(scope="module")
def sequence():
    rng = np.random.default_rng(5)
    return rng.integers(3, fixtures.VOCAB_SIZE, NUM_TOKENS + NUM_NEXT)


def dropped_span(shape):
    """Return equal tokens for all heads: a span is removed from the middle."""
    kept = np.asarray([*range(11), *range(24, NUM_TOKENS)])
    return np.broadcast_to(kept, (*shape, len(kept)))


def own_tokens(shape):
    """Return separate tokens for each layer and head, including the newest."""
    rng = np.random.default_rng(8)
    rows = [
        [*np.sort(rng.permutation(NUM_TOKENS - 4)[:19]), *range(41, NUM_TOKENS)]
        for _ in range(np.prod(shape))
    ]
    return np.reshape(rows, (*shape, -1))


def expected_logits(folder, sequence, kept, positions):
    """Return transformers' logits of the next tokens, its cache indexed by hand."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = DynamicCache()
    arguments = inspect.signature(model.forward).parameters
    given = {"cache" if "cache" in arguments else "past_key_values": cache}
    found = []
    with torch.no_grad():
        model(torch.as_tensor(sequence[None, :NUM_TOKENS]), **given)
        for layer, rows in zip(cache.layers, kept, strict=True):
            index = torch.as_tensor(np.array(rows))[None, :, :, None]
            for name in ("keys", "values"):
                array = getattr(layer, name)
                whole = index.expand(-1, -1, -1, array.shape[-1])
                setattr(layer, name, array.gather(2, whole))
        for token, position in zip(sequence[NUM_TOKENS:], positions, strict=True):
            answer = model(
                torch.as_tensor([[token]]),
                **given,
                position_ids=torch.as_tensor([[position]]),
            )
            found.append(answer.logits[0, -1].numpy())
    return np.stack(found)


def found_logits(folder, sequence, kept, own):
    """Return jkv's logits for the next tokens."""
    model, params = pretrained.load(folder)
    config = model.cache_config(
        64, max_sequences=2, num_blocks=16, block_size=8, dtype="float32", pruning=True
    )

    @jax.jit
    def step(params, cache, tokens):
        cache, batch = jkv.append(cache, [0], [len(tokens)], capacity=len(tokens))
        return model(params, tokens, cache, batch), batch.positions

    cache, _ = jkv.allocate(jkv.init(config), [0])
    (_, cache), _ = step(params, cache, jnp.asarray(sequence[:NUM_TOKENS]))
    slots = kept[None] if own else kept[0, :1]
    cache, status = jkv.prune(cache, 0, slots, kept.shape[-1])
    assert status.tolist() == [0]
    found, positions = [], []
    for token in sequence[NUM_TOKENS:]:
        (logits, cache), at = step(params, cache, jnp.asarray([token]))
        found.append(np.asarray(logits[0]))
        positions += at.tolist()
    return np.stack(found), positions


@pytest.mark.parametrize("select", [dropped_span, own_tokens])
def test_logits_after_a_prune_equal_transformers(folder, sequence, select):
    model, _ = pretrained.load(folder)
    config = model.cache_config(64, max_sequences=2, num_blocks=16)
    kept = select((config.num_layers, config.num_kv_heads))
    found, positions = found_logits(folder, sequence, kept, select is own_tokens)
    assert positions == [*range(NUM_TOKENS, NUM_TOKENS + NUM_NEXT)]
    wanted = expected_logits(folder, sequence, kept, positions)
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    # Positions that count slots give other logits.
    slots = np.asarray(positions) - NUM_TOKENS + kept.shape[-1]
    wrong = expected_logits(folder, sequence, kept, slots)
    assert np.abs(found - wrong).max() > 100 * TOLERANCE
