"""The state of a sequence is the fold of its tokens, after any rollback.

The reference is a plain numpy loop over the tokens of each sequence: the cache must
equal it after steps of uneven rows, rejected draft tokens, forks, and new sequences in
reused rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import few, further
from support.small_caches import with_storage_filled

import jkv

S, R, Q = 3, 24, 3
DIM = 3


def rule(state, given):
    total = 0.7 * state["total"] + given["x"] * given["scale"]
    count = state["count"] + 1
    return {"total": total, "count": count}, total @ given["query"] + count


def chunk_rule(state, inputs, count):
    past = jnp.arange(inputs["x"].shape[0]) >= count

    def step(state, given):
        new, output = rule(state, {name: given[name] for name in inputs})
        kept = jax.tree.map(lambda a, b: jnp.where(given["past"], b, a), new, state)
        return kept, output

    return jax.lax.scan(step, state, inputs | {"past": past})


def make_config(max_pending):
    inputs = {"x": ((DIM,), "float32"), "scale": ((), "float32")}
    return jkv.StateConfig(
        num_layers=2,
        arrays={"total": ((DIM,), "float32"), "count": ((), "float32")},
        max_sequences=S,
        max_context_length=64,
        max_pending=max_pending,
        inputs=inputs if max_pending else None,
    )


@functools.lru_cache
def make_step(has_chunks):
    def step(cache, seq_ids, counts, num_pending, inputs):
        cache, batch = jkv.append(
            cache, seq_ids, counts, capacity=R, num_pending=num_pending
        )
        outputs = []
        for layer in range(2):
            given = inputs | {"x": inputs["x"] + layer}
            output, cache = jkv.fold_state(
                cache,
                layer,
                batch,
                rule,
                given,
                chunk_rule=chunk_rule if has_chunks else None,
                chunk_size=8,
            )
            outputs.append(output)
        return jkv.commit(cache, batch), batch, outputs

    return jax.jit(step, donate_argnums=0)


class Sequences:
    """The tokens of each sequence, and a plain loop's state after them."""

    def __init__(self, generator):
        self.generator = generator
        self.tokens = {}

    def draw(self, counts):
        """Draw tokens for the rows of a step; unused rows are NaN."""
        draw = self.generator.normal
        inputs = dict(
            x=draw(size=(R, DIM)), scale=draw(size=R), query=draw(size=(R, DIM))
        )
        inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
        for array in inputs.values():
            array[sum(counts) :] = np.nan
        return inputs

    def read(self, seq_ids, counts, inputs):
        """Return the outputs of both layers."""
        expected, row = np.zeros((2, R)), 0
        for seq_id, count in zip(seq_ids, counts, strict=True):
            for i in range(row, row + count):
                token = {name: array[i] for name, array in inputs.items()}
                self.tokens[seq_id].append(token)
                for layer in range(2):
                    total, number = self.fold(seq_id, layer)
                    expected[layer, i] = total @ token["query"] + number
            row += count
        return expected

    def fold(self, seq_id, layer):
        total = np.zeros(DIM)
        for token in self.tokens[seq_id]:
            total = 0.7 * total + (token["x"] + layer) * token["scale"].astype(float)
        return total, len(self.tokens[seq_id])


@pytest.mark.newest_further
@pytest.mark.parametrize(
    "max_pending, has_chunks",
    few([(Q, True), *further([(0, True), (Q, False)])], (Q, True)),
)
def test_steps_and_rollbacks(max_pending, has_chunks):
    generator = np.random.default_rng(3 + max_pending)
    sequences, step = Sequences(generator), make_step(has_chunks)
    cache = with_storage_filled(jkv.init(make_config(max_pending)), np.nan)
    cache, opened = jkv.allocate(cache, np.zeros(3, np.int32))
    seq_ids = np.asarray(opened.seq_ids)
    sequences.tokens = {int(seq_id): [] for seq_id in seq_ids}
    before = dict.fromkeys(sequences.tokens, 0)
    for number in range(30):
        # Mostly single tokens, sometimes a prompt or several draft tokens.
        counts = generator.integers(0, 2, 3) * generator.choice([1, 1, 1, 4, 11], 3)
        counts = np.minimum(counts, R - np.cumsum(counts) + counts).clip(0)
        lengths = [len(sequences.tokens[seq_id]) for seq_id in seq_ids.tolist()]
        counts = np.where(np.add(lengths, counts) > 60, 0, counts)
        counts = counts.astype(np.int32)
        pending = np.minimum(generator.integers(0, Q + 1, 3), max_pending)
        # At most the pending and the new tokens; some stay pending for several steps.
        most = counts + [before[seq_id] for seq_id in seq_ids.tolist()]
        pending = np.where(counts > 0, np.minimum(pending, most), 0).astype(np.int32)
        inputs = sequences.draw(counts)
        cache, batch, outputs = step(cache, seq_ids, counts, pending, inputs)
        jkv.raise_for_status(batch.status)
        expected = sequences.read(seq_ids.tolist(), counts, inputs)
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)

        # Roll back some of the pending tokens, or none.
        for i, seq_id in enumerate(seq_ids.tolist()):
            if counts[i]:
                before[seq_id] = int(pending[i])
        cut = [int(generator.integers(0, before[i] + 1)) for i in sequences.tokens]
        lengths = np.asarray(
            [
                len(tokens) - c
                for tokens, c in zip(sequences.tokens.values(), cut, strict=True)
            ]
        )
        cache, status = jkv.truncate(cache, seq_ids, lengths.astype(np.int32))
        jkv.raise_for_status(status)
        for seq_id, length, c in zip(sequences.tokens, lengths, cut, strict=True):
            del sequences.tokens[seq_id][length:]
            before[seq_id] -= c
        jkv.check(cache)
        if number == 20:
            # A reused row starts from zeros.
            cache, _ = jkv.free(cache, seq_ids[:1])
            cache, opened = jkv.allocate(cache, np.zeros(1, np.int32))
            assert int(opened.seq_ids[0]) == int(seq_ids[0])
            sequences.tokens[int(seq_ids[0])], before[int(seq_ids[0])] = [], 0


@pytest.mark.one_end
def test_a_plain_step_makes_one_pass():
    """Without pending tokens, nothing is replayed or drafted."""
    passes = []

    def noting(state, given):
        jax.debug.callback(lambda _: passes.append(1), given["scale"])
        return rule(state, given)

    @jax.jit
    def step(cache, num_pending):
        cache, batch = jkv.append(cache, seq_ids, num_pending=num_pending)
        outputs, cache = jkv.fold_state(cache, 0, batch, noting, inputs)
        return cache

    cache, opened = jkv.allocate(jkv.init(make_config(Q)), np.zeros(2, np.int32))
    seq_ids = np.asarray(opened.seq_ids)
    inputs = dict(x=np.ones((2, DIM)), scale=np.ones(2), query=np.ones((2, DIM)))
    inputs = {name: jnp.asarray(array, jnp.float32) for name, array in inputs.items()}
    for num_pending, expected in ((0, 2), (1, 4), (0, 4), (0, 2)):
        cache = step(cache, jnp.int32(num_pending))
        jax.effects_barrier()
        assert len(passes) == expected
        passes.clear()


@pytest.mark.one_end
def test_invalid_use_is_named():
    cache, opened = jkv.allocate(jkv.init(make_config(Q)), np.zeros(1, np.int32))
    cache, batch = jkv.append(cache, opened.seq_ids)
    inputs = dict(x=jnp.ones((1, DIM)), scale=jnp.ones(1), query=jnp.ones((1, DIM)))
    with pytest.raises(ValueError, match=r"\['scale'\] are missing"):
        jkv.fold_state(cache, 0, batch, rule, {"x": inputs["x"]})
    with pytest.raises(ValueError, match="must return a state of the same shapes"):
        jkv.fold_state(cache, 0, batch, lambda s, _: (s["total"], s["total"]), inputs)
    plain = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=4,
        max_sequences=2,
        max_context_length=16,
    )
    cache, opened = jkv.allocate(jkv.init(plain), [0])
    cache, batch = jkv.append(cache, opened.seq_ids)
    with pytest.raises(ValueError, match="state"):
        jkv.fold_state(cache, 0, batch, rule, inputs)
