"""Continuous batching in plain Python: completions, and the order of sequences.

`PlainCompletions` continues each prompt alone, without a cache. `PlainQueue` takes the
resulting lengths and simulates the scheduler with lists of sequences and
reference-counted blocks. Both are independent of `jkv.decoding`, except for sampling a
token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding import FinishReason, sample

VOCABULARY = 29


# A model whose logits depend on every token of its context and on nothing else. Keys
# store tokens and positions, so that a foreign block, a lost token or a wrong position
# changes the next token. All values are integers: nothing is rounded.


def hash_weights(position):
    """Return a factor for each position, u32."""
    position = position.astype(np.uint32) + np.uint32(1)
    return position * position * np.uint32(7919) + position * np.uint32(104729)


def logits_of(hashes, xp):
    """Return logits from the hash of the context: multiples of 1/16 from 0 to 8."""
    token = xp.arange(VOCABULARY, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    mixed = hashes[:, None] * (token * np.uint32(2654435761))[None]
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
    return (mixed >> np.uint32(25)).astype(np.float32) / np.float32(16)


def hash_model(params, tokens, cache, batch, *, all_rows=False):
    """The model for `jkv.generate`; `params` is the period of NaN logits."""
    import jkv

    rows = jnp.stack([tokens, batch.positions], axis=1).astype(jnp.float32)[:, None]
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, cache.head_dim - 2)))
    cache = jkv.write(cache, 0, batch, rows, rows)
    if all_rows:
        seq_ids, lengths = _owners(batch), batch.positions + 1
    else:
        seq_ids, lengths = batch.seq_ids, batch.context_lengths
    size = cache.block_size
    group = cache.find_layer(0).group  # not the first group for a draft model
    blocks = cache.metadata.groups[group].block_tables.at[seq_ids].get(mode="clip")
    found = (
        cache.storage[group].key_pool.at[0, blocks, 0].get(mode="fill", fill_value=0)
    )
    found = found.reshape(blocks.shape[0], blocks.shape[1] * size, -1)[..., :2]
    place = jnp.arange(found.shape[1], dtype=jnp.int32)[None]
    inside = place < lengths[:, None]
    found = jnp.where(inside[..., None], found, 0).astype(jnp.uint32)
    terms = (found[..., 0] + jnp.uint32(1)) * hash_weights(found[..., 1])
    hashes = jnp.sum(jnp.where(inside, terms, 0), axis=1, dtype=jnp.uint32)
    return _with_nan(logits_of(hashes, jnp), hashes, params, jnp), cache


def _owners(batch):
    """Return the sequence of each row."""
    row = jnp.arange(batch.num_rows, dtype=jnp.int32)[:, None]
    begins = batch.query_starts[None]
    is_mine = (begins <= row) & (row < begins + batch.query_lengths[None])
    return batch.seq_ids[jnp.argmax(is_mine, axis=1)]


def dense_logits(params, sequences):
    """Return the same logits from lists of tokens."""
    hashes = np.zeros(len(sequences), np.uint32)
    for i, sequence in enumerate(sequences):
        token = np.array(sequence, np.uint32) + np.uint32(1)
        weight = hash_weights(np.arange(len(sequence)))
        hashes[i] = np.sum(token * weight, dtype=np.uint32)
    return _with_nan(logits_of(hashes, np), hashes, np.uint32(params), np)


def _with_nan(logits, hashes, every, xp):
    """Set logits to NaN if the hash is a multiple of `every`; 0 disables it."""
    is_nan = (every > 0) & (hashes % xp.maximum(every, np.uint32(1)) == 0)
    return xp.where(is_nan[:, None], np.float32(np.nan), logits)


@dataclasses.dataclass
class Call:
    """Arguments of a call of `generate`."""

    prompts: list  # lists of tokens
    limits: list
    num_samples: int
    max_new_tokens: int
    stop_tokens: list
    stop_sequences: list
    sampling: object  # arrays, one number per sequence
    nan_every: int
    block_size: int
    max_context_length: int
    num_blocks: int  # free at the start of the call

    @property
    def num_sequences(self):
        return len(self.prompts) * self.num_samples

    def blocks_for(self, num_tokens):
        return -(-num_tokens // self.block_size)


_sample = jax.jit(sample)


class PlainCompletions:
    """Each prompt continued alone."""

    def __init__(self, call, find_logits=None, automata=None):
        """Take `find_logits(lists of tokens)`, f32[N, V], for another model.

        `automata` has a `PlainAutomaton` for each sequence, which masks its tokens.
        """
        self.call, self.automata = call, automata
        self.find_logits = find_logits or functools.partial(
            dense_logits, call.nan_every
        )
        count = call.num_sequences
        self.new = [[] for _ in range(count)]
        self.logprobs = [[] for _ in range(count)]
        self.reasons = [self._why_not(i // call.num_samples) for i in range(count)]
        while None in self.reasons:
            self._add_tokens()

    def _why_not(self, prompt):
        sequence, limit = self.call.prompts[prompt], self.call.limits[prompt]
        if not sequence:
            return FinishReason.EMPTY_PROMPT
        if limit <= 0:
            return FinishReason.LENGTH
        return self._too_long(len(sequence))

    def _too_long(self, length):
        if length > self.call.max_context_length:
            return FinishReason.CONTEXT_FULL
        if self.call.blocks_for(length) > self.call.num_blocks:
            return FinishReason.OUT_OF_BLOCKS
        return None

    def _add_tokens(self):
        call, count = self.call, self.call.num_sequences
        sequences = [
            call.prompts[i // call.num_samples] + self.new[i] for i in range(count)
        ]
        logits = self.find_logits(sequences)
        if self.automata is not None:
            allowed = [
                automaton.allowed(new)
                for automaton, new in zip(self.automata, self.new, strict=True)
            ]
            logits = np.where(allowed, logits, np.float32(-np.inf))
        seen = np.zeros(logits.shape, bool)
        for row, sequence in zip(seen, sequences, strict=True):
            row[sequence] = True
        counts = np.array([len(new) for new in self.new], np.int32)
        tokens, logprobs = _sample(logits, call.sampling, counts, seen=seen)
        tokens, logprobs = np.asarray(tokens), np.asarray(logprobs)
        for i in range(count):
            if self.reasons[i] is not None:
                continue
            if np.isnan(logits[i]).any():
                self.reasons[i] = FinishReason.NAN_LOGITS
                continue
            if np.max(logits[i]) == -np.inf:
                self.reasons[i] = FinishReason.NOTHING_ALLOWED
                continue
            self.new[i].append(int(tokens[i]))
            self.logprobs[i].append(logprobs[i])
            self.reasons[i] = self._why_over(i)

    def _why_over(self, i):
        call, new = self.call, self.new[i]
        stops = [[token] for token in call.stop_tokens] + call.stop_sequences
        if any(stop and new[-len(stop) :] == stop for stop in stops):
            return FinishReason.STOP
        if self.automata is not None and self.automata[i].has_ended(new):
            return FinishReason.STOP
        if len(new) >= min(call.limits[i // call.num_samples], call.max_new_tokens):
            return FinishReason.LENGTH
        return self._too_long(len(call.prompts[i // call.num_samples]) + len(new))


class Pool:
    """Blocks with reference counts; a sequence is a list of blocks."""

    def __init__(self, num_blocks, block_size):
        self.free, self.size = num_blocks, block_size
        self.owners, self.blocks, self.done, self.next = {}, {}, {}, 0

    def _take(self):
        assert self.free > 0
        self.free -= 1
        self.next += 1
        self.owners[self.next] = 1
        return self.next

    def reserve(self, name, num_tokens):
        blocks = self.blocks.setdefault(name, [])
        while len(blocks) * self.size < num_tokens:
            blocks.append(self._take())

    def open(self, name, num_tokens):
        self.done[name] = 0
        self.reserve(name, num_tokens)

    def fork(self, parent, name, length):
        full, tail = divmod(length, self.size)
        shared = self.blocks[parent][:full]
        for block in shared:
            self.owners[block] += 1
        self.blocks[name] = shared + ([self._take()] if tail else [])
        self.done[name] = length

    def cut(self, name, length):
        keep = -(-length // self.size)
        self._drop(self.blocks[name][keep:])
        self.blocks[name] = self.blocks[name][:keep]
        self.done[name] = length

    def _drop(self, blocks):
        for block in blocks:
            self.owners[block] -= 1
            self.free += self.owners[block] == 0

    def close(self, name):
        self._drop(self.blocks.pop(name))
        del self.done[name]

    def rename(self, old, new):
        self.blocks[new] = self.blocks.pop(old)
        self.done[new] = self.done.pop(old)


HOLDER = "holder"


class PlainQueue:
    """A simulated scheduler; `statistics` are the expected ones of the loop."""

    def __init__(self, call, sequences, num_places, row_counts, num_rows=10**9):
        self.call, self.alone = call, sequences
        self.places = min(num_places, num_rows)
        self.most_rows = row_counts[-1]
        self.pool = Pool(call.num_blocks, call.block_size)
        self.lengths = [0] * call.num_sequences
        begun = [i for i in range(call.num_sequences) if self.total(i) is not None]
        self.fresh, self.preempted, self.running = begun, [], []
        self.holder = None  # the prompt held for the next sequence
        self.statistics = dict.fromkeys(
            "num_steps sequence_steps prompt_tokens recomputed_tokens preemptions "
            "peak_blocks queue_steps idle_places".split(),
            0,
        )
        self.most_open = 0
        self.fill()
        while self.running:
            self.step()
        assert not (self.fresh or self.preempted or self.pool.blocks)

    def total(self, i):
        """Return the number of a sequence's new tokens, or None if it never starts."""
        reason = self.alone.reasons[i]
        if not self.alone.new[i] and reason != FinishReason.NAN_LOGITS:
            return None
        return len(self.alone.new[i])

    def is_over(self, i):
        is_nan = self.alone.reasons[i] == FinishReason.NAN_LOGITS
        return self.lengths[i] == self.total(i) and not (is_nan and not self.drawn(i))

    def drawn(self, i):
        return i in self.nan_drawn

    @functools.cached_property
    def nan_drawn(self):
        return set()

    def prompt(self, i):
        return i // self.call.num_samples

    def prompt_length(self, i):
        return len(self.call.prompts[self.prompt(i)])

    def sequence_length(self, i):
        return self.prompt_length(i) + self.lengths[i]

    def group(self, prompt):
        count = self.call.num_samples
        return range(prompt * count, (prompt + 1) * count)

    # Blocks.

    def beside_prompt(self, i):
        length = max(self.sequence_length(i), self.prompt_length(i) + 1)
        return self.call.blocks_for(length) - self.prompt_length(i) // self.pool.size

    def demand(self, i):
        if i not in self.pool.blocks:
            return self.beside_prompt(i)
        needs = self.call.blocks_for(self.sequence_length(i)) - len(self.pool.blocks[i])
        return max(needs, 0)

    def slack(self):
        return self.pool.free - sum(self.demand(i) for i in self.running)

    # One step.

    def step(self):
        cached = [i for i in self.running if i in self.pool.blocks]
        left = {i: self.sequence_length(i) - self.pool.done[i] for i in cached}
        rows = dict.fromkeys(cached, 1)
        spare = self.most_rows - len(cached)
        for i in cached:
            more = min(left[i] - 1, spare)
            rows[i] += more
            spare -= more
        self.count(rows)
        for i in cached:
            self.pool.reserve(i, self.pool.done[i] + rows[i])
        used = self.call.num_blocks - self.pool.free
        self.statistics["peak_blocks"] = max(self.statistics["peak_blocks"], used)
        whole = [i for i in cached if rows[i] == left[i]]
        for i in cached:
            self.pool.done[i] += rows[i]
        for i in whole:
            is_first = self.lengths[i] == 0
            self.draw(i)
            if is_first:
                for other in self.group(self.prompt(i)):
                    if (
                        other != i
                        and self.lengths[other] == 0
                        and not self.is_over(other)
                    ):
                        self.draw(other)
        self.close()
        self.make_room()
        self.fill()

    def draw(self, i):
        if self.lengths[i] < self.total(i):
            self.lengths[i] += 1
        else:
            self.nan_drawn.add(i)

    def count(self, rows):
        statistics = self.statistics
        statistics["num_steps"] += 1
        statistics["sequence_steps"] += len(rows)
        for i, num in rows.items():
            done, end = self.pool.done[i], self.pool.done[i] + num
            of_prompt = max(0, min(end, self.prompt_length(i)) - done)
            is_new = end == self.sequence_length(i) and of_prompt < num
            statistics["prompt_tokens"] += of_prompt
            statistics["recomputed_tokens"] += num - of_prompt - is_new
        if self.fresh or self.preempted:
            statistics["queue_steps"] += 1
            statistics["idle_places"] += self.places - len(rows)

    def close(self):
        ended = [i for i in self.running if self.is_over(i)]
        stays = [i for i in self.running if not self.is_over(i)]
        for prompt in {self.prompt(i) for i in ended}:
            self.hand_over(prompt, ended, stays)
        for i in ended:
            if i in self.pool.blocks:
                self.pool.close(i)
        self.running = stays

    def hand_over(self, prompt, ended, stays):
        """Pass a finished sequence's prompt blocks to another one of the prompt."""
        members = [i for i in stays if self.prompt(i) == prompt]
        if any(i in self.pool.blocks for i in members):
            return
        givers = [
            i
            for i in ended
            if self.prompt(i) == prompt
            and i in self.pool.blocks
            and self.pool.done[i] >= self.prompt_length(i)
        ]
        unfinished = [i for i in self.group(prompt) if not self.is_over(i)]
        if givers and members:
            self.pool.cut(givers[0], self.prompt_length(givers[0]))
            self.pool.rename(givers[0], members[0])
        elif givers and len(unfinished) > len(members):
            assert self.holder is None
            self.pool.cut(givers[0], self.prompt_length(givers[0]))
            self.pool.rename(givers[0], HOLDER)
            self.holder = prompt

    def make_room(self):
        while self.slack() < 0 and (self.holder is not None or len(self.running) > 1):
            if self.holder is not None:
                self.pool.close(HOLDER)
                self.holder = None
                continue
            youngest = self.running.pop()
            self.preempted.insert(0, youngest)
            if youngest in self.pool.blocks:
                self.pool.close(youngest)
                self.statistics["preemptions"] += 1

    # Admission, one at a time, strictly in order.

    def fill(self):
        while self.seat():
            pass
        self.open_seated()
        self.most_open = max(self.most_open, len(self.pool.blocks))

    def seat(self):
        while self.fresh and not self.preempted and self.is_over(self.fresh[0]):
            self.fresh.pop(0)
        queue = self.preempted or self.fresh
        if not queue or len(self.running) >= self.places:
            return False
        i = queue[0]
        whole = self.call.blocks_for(self.sequence_length(i))
        members = [j for j in self.running if self.prompt(j) == self.prompt(i)]
        if members:
            cost = self.beside_prompt(i)
        elif self.holder == self.prompt(i):
            cost = whole - self.call.blocks_for(self.prompt_length(i))
        else:
            cost = whole
        if cost > self.slack():
            return False
        self.running.append(queue.pop(0))
        if members:
            return True
        if self.holder == self.prompt(i):
            self.pool.rename(HOLDER, i)
            self.holder = None
        else:
            self.pool.open(i, self.sequence_length(i))
        return True

    def open_seated(self):
        """Fork waiting sequences as soon as another one has computed their prompt."""
        for i in self.running:
            if i in self.pool.blocks:
                continue
            length = self.prompt_length(i)
            for j in self.running:
                is_source = j in self.pool.blocks and self.prompt(j) == self.prompt(i)
                if is_source and self.pool.done[j] >= length:
                    self.pool.fork(j, i, length)
                    break
