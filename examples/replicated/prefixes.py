"""A router's record of the texts that replicas hold: hashes of their beginnings.

A text is cut into pieces, and each piece is known by a hash of all text up to its end.
So two texts share as many hashes as pieces at their beginning. A router notes what it
sends where. The record is a guess: a replica's own index finds the cached blocks, by
the tokens themselves.
"""

import hashlib
import json
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

# Some 16 tokens of English, the usual block. The partial piece at the end is left out.
PIECE_CHARACTERS = 64
HASH_BYTES = 8
# A token of English has some four characters.
CHARACTERS_PER_TOKEN = 4
# Interval of the replicas' reports about their room.
STATS_SECONDS = 0.5


def hash_beginnings(text: str) -> tuple[bytes, ...]:
    """Return a hash for each whole piece of a text, of all text up to its end."""
    running = hashlib.blake2b(digest_size=HASH_BYTES)
    hashes = []
    for end in range(PIECE_CHARACTERS, len(text) + 1, PIECE_CHARACTERS):
        piece = text[end - PIECE_CHARACTERS : end]
        running.update(piece.encode("utf-8", "surrogatepass"))
        hashes.append(running.copy().digest())
    return tuple(hashes)


def read_beginning(body: bytes) -> str:
    """Return a request's prompt or its beginning, as text for hashing.

    Fields distinguish bodies of the completions and the chat endpoint. The text of an
    invalid body is empty; the replica reports the error.

    Args:
      body: JSON, as the client sent it.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(fields, Mapping):
        return ""
    # Blocks are never shared between salts, and the template puts tools first.
    before = json.dumps([fields.get("cache_salt"), fields.get("tools")])
    messages = fields.get("messages")
    if isinstance(messages, list):
        return before + "".join(json.dumps(message) for message in messages)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # the first of several
    if isinstance(prompt, list):
        return before + "".join(f"{token} " for token in prompt)
    return before + str(prompt or "")


class PrefixTable:
    """The newest beginnings that each replica was sent, at most so many of each.

    Example:
      >>> table, (first, other) = PrefixTable(max_pieces=4), ("a" * 256, "a" * 128)
      >>> table.note("replica 1", hash_beginnings(first))
      >>> table.count("replica 1", hash_beginnings(other + "b" * 128))
      2
      >>> table.count("replica 2", hash_beginnings(first))
      0
    """

    def __init__(self, max_pieces: int):
        """Take how many pieces a replica is thought to hold."""
        self._max_pieces = max_pieces
        self._held: dict[str, dict[bytes, None]] = {}

    def count(self, replica: str, hashes: Sequence[bytes]) -> int:
        """Return how many pieces at a text's beginning a replica was sent lately."""
        held = self._held.get(replica, {})
        # All pieces before a held piece are held, too: they are forgotten later.
        return bisect_left(hashes, True, key=lambda piece: piece not in held)

    def note(self, replica: str, hashes: Sequence[bytes]) -> None:
        """Note that a replica is sent a text.

        The oldest are forgotten first, and of a text its end, as a replica's own index
        does it.
        """
        held = self._held.setdefault(replica, {})
        for piece in reversed(hashes):
            held.pop(piece, None)
            held[piece] = None
        while len(held) > self._max_pieces:
            del held[next(iter(held))]

    def keep_only(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""
        self._held = {name: self._held[name] for name in replicas if name in self._held}

    def forget(self, replica: str) -> None:
        """Forget a replica's texts: its weights have changed."""
        self._held.pop(replica, None)

    def count_bytes(self) -> int:
        """Return the bytes of all hashes, and of their dictionaries."""
        tables = self._held.values()
        entries = sum(sys.getsizeof(piece) for held in tables for piece in held)
        return entries + sum(map(sys.getsizeof, tables))
