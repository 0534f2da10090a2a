"""Turns and branches of a chat over one cache."""

import argparse
import dataclasses
from functools import partial
from itertools import takewhile

import jax
import numpy as np
import pretrained
from generating.output import TextStream

import jkv

PIECE = 8  # tokens per call
WIDTH = 64  # prompts are padded to multiples, for few compilations
SINKS = 4  # first tokens kept with --roll


@dataclasses.dataclass
class Branch:
    """A conversation: its sequence, the tokens of the turns, and the messages."""

    seq_id: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)  # before each turn


class Chat:
    """All branches of a chat, and the current one."""

    def __init__(self, options: argparse.Namespace):
        """Load the checkpoint and open an empty conversation."""
        self.options = options
        loops = pretrained.prefers_loops()
        model, self._params = pretrained.load(options.model, loop_layers=loops)
        self._tokenizer = pretrained.load_tokenizer(options.model)
        self._has_template = pretrained.has_chat_template(options.model)
        self._sampling = {"temperature": 0.0} | pretrained.read_sampling(options.model)
        if options.temperature is not None:
            self._sampling["temperature"] = options.temperature
        self._stop_tokens = np.array(model.config.stop_tokens, np.int32)
        config = model.cache_config(
            min(options.context, model.config.max_context_length),
            max_sequences=options.branches,
            dtype=options.kv_dtype or self._params["embedding"].dtype,
            value_dtype=options.value_dtype,
            prefix_caching=model.config.has_states,
            pruning=options.roll is not None,
        )
        system = options.system
        messages = [{"role": "system", "content": system}] if system else []
        roll = None
        if options.roll is not None:
            # Never drop the system message and the first tokens.
            is_encoded = messages and self._has_template
            first = len(self._encode(messages)) if is_encoded else 0
            roll = jkv.Roll(first=max(first, SINKS), step=options.roll)
        extend = partial(
            jkv.extend, model, max_new_tokens=PIECE, chunk_size=WIDTH // 4, roll=roll
        )
        self._extend = jax.jit(extend, donate_argnames="cache")
        self.cache, opened = jkv.allocate(jkv.init(config), [0])
        self.branches: list[Branch] = []
        self.add(Branch(int(opened.seq_ids[0]), messages=messages))

    def add(self, branch: Branch) -> None:
        """Add a copy of `branch` and make it the current one."""
        branch = dataclasses.replace(
            branch,
            tokens=list(branch.tokens),
            messages=list(branch.messages),
            lengths=list(branch.lengths),
        )
        self.branches.append(branch)
        self.branch = branch

    def cut(self, length: int) -> int:
        """Truncate the current branch to `length` tokens; return the new length.

        It is shorter if layers have a recurrent state, which can be truncated to
        snapshots only, and 0 if tokens after the snapshot were dropped.
        """
        seq_id = self.branch.seq_id
        dropped = self.count_dropped()
        copies = np.flatnonzero(jkv.snapshots(self.cache, seq_id)[:length])
        for kept in (length, *copies[::-1].tolist(), 0):
            if 0 < kept <= dropped:
                continue
            slots = kept - dropped if kept else 0
            cache, status = jkv.truncate(self.cache, [seq_id], [slots])
            if status[0] == jkv.Status.OK:
                break
        jkv.raise_for_status(status)
        self.cache = cache
        del self.branch.tokens[kept:]
        return kept

    def count_dropped(self) -> int:
        """Return the number of tokens that --roll dropped from the branch."""
        seq_id = self.branch.seq_id
        slots = jkv.context_lengths(self.cache)[seq_id]
        return int(jkv.next_positions(self.cache)[seq_id] - slots)

    def take_turn(self, line: str) -> None:
        """Answer a message; the unchanged prefix is not recomputed."""
        branch = self.branch
        messages = [*branch.messages, {"role": "user", "content": line}]
        ids = self._encode(messages)
        # At least one token is computed, since its logits are needed.
        pairs = zip(ids[:-1], branch.tokens, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        kept = self.cut(kept)
        answer, reason = self._generate(ids, kept)
        if not answer:
            print(f"(no room: {reason.name}; /undo, or start with a larger --context)")
            return
        branch.tokens = ids + answer[:-1]
        branch.lengths.append(kept)
        text = self._tokenizer.decode(self._without_stops(answer))
        branch.messages = [*messages, {"role": "assistant", "content": text}]
        computed = len(ids) - kept
        report = f"{computed} tokens computed, {kept} kept, {len(answer)} generated"
        if dropped := self.count_dropped():
            report += f", the {dropped} oldest dropped"
        print(f"\n({report})")

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation up to the next answer."""
        if not self._has_template:
            text = "".join(message["content"] for message in messages)
            return list(self._tokenizer.encode(text).ids)
        text = pretrained.render_chat(self.options.model, messages)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _generate(
        self, ids: list[int], kept: int
    ) -> tuple[list[int], jkv.FinishReason]:
        """Print an answer as it is generated; return its tokens and finish reason."""
        stream, given = TextStream(self._tokenizer, ids, is_chat=True), ids[kept:]
        answer: list[int] = []
        reason = jkv.FinishReason.LENGTH
        while reason == reason.LENGTH and len(answer) < self.options.max_new_tokens:
            self.cache, piece = self._extend(
                self._params,
                cache=self.cache,
                seq_ids=np.array([self.branch.seq_id], np.int32),
                tokens=_padded(given),
                limits=np.minimum(self.options.max_new_tokens - len(answer), [PIECE]),
                stop_tokens=self._stop_tokens,
                sampling=jkv.Sampling(**self._sampling, seeds=len(ids) + len(answer)),
            )
            reason = jkv.FinishReason(piece.reasons[0])
            answer += piece.tokens[0, : piece.lengths[0]].tolist()
            given = answer[-1:]  # not in the cache yet
            print(stream.advance(self._without_stops(answer)), end="", flush=True)
        return answer, reason

    def _without_stops(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens if token not in self._stop_tokens]


def _padded(tokens: list[int]) -> np.ndarray:
    """Return tokens as i32[1, P]; P is a multiple of `WIDTH`."""
    padded = np.full((1, -(-len(tokens) // WIDTH) * WIDTH), -1, np.int32)
    padded[0, : len(tokens)] = tokens
    return padded
