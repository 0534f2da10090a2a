"""Random operations on a cache with recurrent states in some layers.

The state of a sequence is an exact fold of its tokens. After each call it must equal
the oracle's: the fold up to the sequence's base, with the inputs of the tokens after
it; so must all snapshots, in eviction order. Unused rows, and rows of states without
tokens, are full of noise.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from support.caches.random_operations import (
    BATCH_SIZE,
    CAPACITY,
    QUERY_LENGTH,
    i32,
    same,
)
from support.caches.random_reuse import ReuseGame, make_reuse_verbs
from support.oracle.cache import OK, PADDING

RUBBISH = -77_777
ARRAYS = {"fold": ((2,), "int32"), "last": ((), "bfloat16")}
INPUTS = {"token": ((), "int32")}


def append_packed_pending(cache, seq_ids, num_tokens, tokens, num_pending):
    return jkv.append(
        cache,
        seq_ids,
        num_tokens,
        capacity=CAPACITY,
        tokens=tokens,
        num_pending=num_pending,
    )


def append_padded_pending(cache, seq_ids, num_tokens, tokens, num_pending):
    return jkv.append(
        cache,
        seq_ids,
        num_tokens,
        max_query_length=QUERY_LENGTH,
        tokens=tokens,
        num_pending=num_pending,
    )


def state_layers(cache):
    """Return the indices of the recurrent layers."""
    layers = enumerate(cache.layer_groups)
    numbers = {*cache.metadata.block_numbers}
    return [i for i, of in layers if {*of} - numbers]


def read_states(cache, batch):
    return [
        (jkv.read_state(cache, layer, batch), jkv.read_pending(cache, layer, batch))
        for layer in state_layers(cache)
    ]


def write_states(cache, batch, states, inputs):
    for layer, state in zip(state_layers(cache), states, strict=True):
        cache = jkv.write_state(cache, layer, batch, state, inputs)
    return cache


def make_state_verbs(mode):
    """Return the verbs of `ReuseGame`, and the verbs of states."""
    verbs = make_reuse_verbs(mode)
    for verb in (
        append_packed_pending,
        append_padded_pending,
        write_states,
        read_states,
    ):
        donate = (0,) if mode == "donated" and verb is not read_states else ()
        verbs[verb.__name__] = (
            verb if mode == "eager" else jax.jit(verb, donate_argnums=donate)
        )
    return verbs


def fold(state, tokens, layer):
    """Return the state of a layer after more tokens."""
    values, last = np.array(state["fold"], np.int64), state["last"]
    for token in tokens:
        values = values * (31, 17) + (token + 2) * (layer + 3)
        values = (values + 2**31) % 2**32 - 2**31
        last = jnp.bfloat16(token % 128)
    return {"fold": values.astype(np.int32), "last": np.asarray(last, jnp.bfloat16)}


NOTHING = {"fold": np.zeros(2, np.int32), "last": np.asarray(0, jnp.bfloat16)}


class StateGame(ReuseGame):
    """Random operations with states in three layers, one of them beside keys."""

    def __init__(self, groups, shape, states, verbs, seed, *, place=0, **options):
        """Insert the group of states at `place` among the others."""
        self.rules, self.place = states, place
        self.num_cuts_to_snapshots = 0
        super().__init__(shape, verbs, seed, groups=groups, states=states, **options)

    def make_config(self, configs):
        """Return the groups with blocks, and one of states among them."""
        rules, (block_size, max_sequences, max_context) = self.rules, self.sizes
        state = jkv.StateConfig(
            num_layers=3 if configs else 2,
            arrays=ARRAYS,
            inputs=INPUTS if rules.max_pending else None,
            max_pending=rules.max_pending,
            num_snapshots=rules.num_snapshots,
            snapshot_every=rules.snapshot_every,
            block_size=block_size,
            max_sequences=max_sequences,
            max_context_length=max_context,
        )
        if not configs:
            return jkv.GroupedConfig(
                groups=(state,), layer_groups=(0, 0), prefix_caching=True
            )
        place = self.place
        numbers = [g for g in range(len(configs) + 1) if g != place]
        layers = [(numbers[g],) for g in self.layer_groups]
        layers[0] += (place,)  # also in the first layer
        groups = [*configs[:place], state, *configs[place:]]
        return jkv.GroupedConfig(
            groups=groups, layer_groups=(*layers, place, place), prefix_caching=True
        )

    def number_of(self, g):
        """Return the index of a group with blocks, counting the group of states."""
        return g + (g >= self.place)

    # Operations.

    def pick_prompt(self):
        """Return a prompt, often one that continues a snapshot."""
        prompt, salt = super().pick_prompt()
        if self.oracle.snapshots and self.rng.random() < 0.6:
            known = list(self.oracle.snapshots)
            salt, tokens = known[int(self.rng.integers(len(known)))]
            more = int(self.rng.integers(-1, self.oracle.block_size + 3))
            prompt = list(tokens[: len(tokens) + min(more, 0)])
            prompt += self.rng.integers(2, size=max(more, 0)).tolist()
        return prompt[: self.width], salt

    def pick_lengths(self, seq_ids):
        """Return lengths, often multiples of the interval and those of snapshots."""
        lengths, every = super().pick_lengths(seq_ids), self.rules.snapshot_every
        for i, seq_id in enumerate(seq_ids):
            mine = self.oracle.open.get(seq_id)
            if mine and self.rng.random() < 0.6:
                ends = range(0, len(mine.tokens), every)
                known = [n for n in ends if self.has_snapshot(mine, n)]
                lengths[i] = int(self.rng.choice(known or ends or [0]))
        return lengths

    def has_snapshot(self, mine, length):
        return (mine.salt, tuple(mine.written[:length])) in self.oracle.snapshots

    def pick_counts(self):
        """Return counts, often one token, or up to the next multiple exactly."""
        counts = super().pick_counts()
        if self.rng.random() < 0.3:
            counts = [1 if self.rng.random() < 0.7 else c for c in counts]
        elif self.rng.random() < 0.5:
            every = self.rules.snapshot_every
            counts = [every if self.rng.random() < 0.5 else c for c in counts]
        return counts

    def pick_pending(self):
        """Return pending counts, mostly valid, rarely too large."""
        most, pending = self.rules.max_pending, []
        for _ in range(BATCH_SIZE):
            wrong = self.rng.random() < 0.05
            pending.append(int(self.rng.integers(most + 1)) + wrong * (most + 1))
        return pending

    def play_step(self, name, max_query_length, seq_ids, counts, contents):
        """Append, write keys, values and states, and perhaps commit and attend."""
        before = {i: self.state_of(i) for i in self.oracle.open}
        pending = self.pick_pending() if self.rules.max_pending else None
        expected = self.oracle.append(
            seq_ids, counts, contents, max_query_length, pending
        )
        arguments = i32(seq_ids), i32(counts), i32(contents)
        self.cache, batch = self.verbs[f"{name}_pending"](
            self.cache, *arguments, None if pending is None else i32(pending)
        )
        self.compare_batch(batch, expected, seq_ids)
        same(batch.pending_before, expected.pending_before)
        same(batch.pending_after, expected.pending_after)
        if self.has_storage:
            if self.pools:
                rows = [
                    [table[contents] for table in tables]
                    for tables in (self.keys, self.values)
                ]
                self.cache = self.verbs["write"](self.cache, batch, *rows)
            self.step_states(batch, expected, before, contents)
        self.compare_status(batch.status, expected.status)
        self.play_commit(batch, expected)
        if self.has_storage and self.pools and self.rng.random() < 0.2:
            self.compare_attention(batch, expected)

    def play_aborted_step(self):
        """Write a step of draft tokens, and roll it back completely."""
        most = self.rules.max_pending
        seq_ids = self.pick_seq_ids()
        counts = [min(count, most) for count in self.pick_counts()]
        contents = self.pick_contents()
        before = {i: self.state_of(i) for i in self.oracle.open}
        expected = self.oracle.append(seq_ids, counts, contents)
        self.cache, batch = self.verbs["append_packed"](
            self.cache, i32(seq_ids), i32(counts), i32(contents)
        )
        self.compare_batch(batch, expected, seq_ids)
        self.compare_status(batch.status, expected.status)
        if self.has_storage:
            self.step_states(batch, expected, before, contents)
        lengths = np.subtract(expected.context_lengths, expected.query_lengths).tolist()
        served = [length > 0 for length in expected.query_lengths]
        back = [s if ok else PADDING for s, ok in zip(seq_ids, served, strict=True)]
        status = self.oracle.truncate(back, lengths)
        assert {*status} == {OK}
        self.cache, found = self.call("truncate", back, lengths)
        same(found, status)
        self.pending = [*self.pending[-3:], (batch, expected)]

    def step_states(self, batch, expected, before, contents):
        """Compare the states before the step, and write the states after it."""
        found = jax.device_get(self.verbs["read_states"](self.cache, batch))
        states = []
        for layer, (state, pending) in enumerate(found):
            after = {name: np.array(array) for name, array in state.items()}
            for i, seq_id in enumerate(expected.seq_ids):
                refused = expected.status[i] or seq_id == PADDING
                start, tokens = (0, []) if refused else before[seq_id]
                wanted = fold(NOTHING, tokens[:start], layer)
                for name, value in wanted.items():
                    same(state[name][i], value)
                if pending:
                    rest = [*tokens[start:], *[0] * self.rules.max_pending]
                    same(pending["token"][i], rest[: self.rules.max_pending])
                if not refused:
                    mine = self.oracle.open[seq_id]
                    end = mine.base + mine.dropped
                    now = fold(wanted, mine.past[start:end], layer)
                    for name, value in now.items():
                        after[name][i] = value
            states.append(after)
        inputs = {"token": i32(contents)} if self.rules.max_pending else None
        self.cache = self.verbs["write_states"](self.cache, batch, states, inputs)

    def state_of(self, seq_id):
        """Return the token count of a sequence's state, and its tokens."""
        mine = self.oracle.open[seq_id]
        return mine.base + mine.dropped, list(mine.past)

    def play_truncate(self):
        known = len(self.oracle.snapshots)
        bases = {i: each.base for i, each in self.oracle.open.items()}
        super().play_truncate()
        assert len(self.oracle.snapshots) == known
        self.num_cuts_to_snapshots += sum(
            0 < len(each.tokens) < bases.get(i, 0)
            for i, each in self.oracle.open.items()
        )

    def plays(self):
        return [*super().plays(), (self.play_truncate, 4)]

    # Comparisons.

    def compare_state(self):
        super().compare_state()
        oracle, sequences = self.oracle, jax.device_get(self.cache.metadata.sequences)
        if self.rules.max_pending:
            for seq_id, mine in oracle.open.items():
                pending = len(mine.tokens) - mine.base
                assert int(sequences.num_pending[seq_id]) == pending
        self.compare_snapshots()
        if self.has_storage:
            for storage in jax.device_get(self.cache.storage):
                if storage.kind == "states":
                    self.compare_rows(storage)
            if self.rng.random() < 0.2:
                self.fill_unused()

    def compare_snapshots(self):
        """Compare the snapshots in eviction order."""
        index = jax.device_get(self.cache.metadata.index)
        oracle, snapshots = self.oracle, index.snapshots
        order = np.argsort(snapshots.last_used, kind="stable")
        places = [int(p) for p in order if snapshots.lengths[p]]
        found = {}
        for place in places:
            length = int(snapshots.lengths[place])
            key = int(snapshots.salts[place]), tuple(snapshots.tokens[place, :length])
            found[key] = length - int(snapshots.num_pending[place])
        assert list(found.items()) == list(oracle.snapshots.items())
        self.places = dict(zip(found, places, strict=True))
        for seq_id in self.rng.permutation(oracle.max_sequences)[:2]:
            mine = oracle.open.get(int(seq_id))
            at = jkv.snapshots(self.cache, i32(seq_id))
            ends = range(len(mine.tokens) + 1) if mine else ()
            known = [n for n in ends if self.has_snapshot(mine, n)]
            same(np.flatnonzero(at), known)

    def compare_rows(self, storage):
        """Compare the state of each sequence and of each snapshot, in each layer."""
        rows = [
            (seq_id, *self.state_of(seq_id), storage.rows, storage.inputs)
            for seq_id in self.oracle.open
        ]
        for seq_id, base, *_ in rows:
            same(storage.bases[:, seq_id], [base] * len(storage.bases))
        rows += [
            (place, base, key[1], storage.snapshot_rows, storage.snapshot_inputs)
            for (key, place), base in zip(
                self.places.items(), self.oracle.snapshots.values(), strict=True
            )
        ]
        for row, base, tokens, arrays, inputs in rows:
            for layer in range(len(storage.bases)):
                wanted = fold(NOTHING, tokens[:base], layer)
                if base:
                    same(arrays["fold"][layer, row], wanted["fold"])
                    last = arrays["last"][layer, row].view(jnp.bfloat16)
                    assert last == wanted["last"]
                if inputs:
                    pending = inputs["token"][layer, row, : len(tokens) - base]
                    same(pending, tokens[base:])

    def fill_unused(self):
        """Fill unused rows and snapshots with noise."""
        used = {i for i in self.oracle.open if self.state_of(i)[0]}
        rows = [i for i in range(self.oracle.max_sequences) if i not in used]
        places = {*range(self.rules.num_snapshots)} - {*self.places.values()}

        def fill(arrays, unused):
            filled = {}
            for name, array in arrays.items():
                changed = np.array(array)
                number = RUBBISH if changed.dtype == np.int32 else 0x7FC0  # NaN
                changed[:, sorted(unused)] = number
                filled[name] = jnp.asarray(changed)
            return filled

        storage = tuple(
            each
            if each.kind == "blocks"
            else dataclasses.replace(
                each,
                rows=fill(each.rows, rows),
                snapshot_rows=fill(each.snapshot_rows, places),
            )
            for each in self.cache.storage
        )
        self.cache = self.cache.with_storage(storage)
