"""A router's estimate of cached prefixes: hashes of the prompts sent to each replica.

A prompt is divided into pieces, and each piece is identified by a hash of the text up
to its end, so two prompts share as many hashes as leading pieces. A router records the
prompts that it sends. This is an estimate: each replica's prefix index matches tokens.
"""

import hashlib
import json
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

# About 16 tokens of English, the usual block size. A partial last piece is omitted.
PIECE_CHARACTERS = 64
HASH_BYTES = 8
# In English, approximately.
CHARACTERS_PER_TOKEN = 4
# Interval of the replicas' reports to the router.
STATS_SECONDS = 0.5


def hash_beginnings(text: str) -> tuple[bytes, ...]:
    """Return a hash for each complete piece, of the text up to the piece's end."""
    running = hashlib.blake2b(digest_size=HASH_BYTES)
    hashes = []
    for end in range(PIECE_CHARACTERS, len(text) + 1, PIECE_CHARACTERS):
        piece = text[end - PIECE_CHARACTERS : end]
        running.update(piece.encode("utf-8", "surrogatepass"))
        hashes.append(running.copy().digest())
    return tuple(hashes)


def read_beginning(body: bytes) -> str:
    """Return a request's prompt, or its first prompt, as text for hashing.

    Completions and chats are distinguished by their fields. The result is empty for an
    invalid body, for which the replica returns an error.

    Args:
      body: JSON from the client.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(fields, Mapping):
        return ""
    # Blocks are not shared between salts, and templates put tools first.
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
    """Recently sent prefixes of each replica, in LRU order.

    Example:
      >>> table, (first, other) = PrefixTable(max_pieces=4), ("a" * 256, "a" * 128)
      >>> table.note("replica 1", hash_beginnings(first))
      >>> table.count("replica 1", hash_beginnings(other + "b" * 128))
      2
      >>> table.count("replica 2", hash_beginnings(first))
      0
    """

    def __init__(self, max_pieces: int):
        """Create an empty table of at most `max_pieces` pieces per replica."""
        self._max_pieces = max_pieces
        self._held: dict[str, dict[bytes, None]] = {}

    def count(self, replica: str, hashes: Sequence[bytes]) -> int:
        """Return the number of leading pieces that were recently sent to a replica."""
        held = self._held.get(replica, {})
        # Earlier pieces of a prompt are evicted later, so held pieces form a prefix.
        return bisect_left(hashes, True, key=lambda piece: piece not in held)

    def note(self, replica: str, hashes: Sequence[bytes]) -> None:
        """Record a prompt that is sent to a replica.

        The least recently used pieces are evicted first, and the end of a prompt before
        its beginning, as in a replica's own index.
        """
        held = self._held.setdefault(replica, {})
        for piece in reversed(hashes):
            held.pop(piece, None)
            held[piece] = None
        while len(held) > self._max_pieces:
            del held[next(iter(held))]

    def keep_only(self, replicas: Iterable[str]) -> None:
        """Remove all other replicas."""
        self._held = {name: self._held[name] for name in replicas if name in self._held}

    def forget(self, replica: str) -> None:
        """Remove a replica's record, since its weights have changed."""
        self._held.pop(replica, None)

    def count_bytes(self) -> int:
        """Return the memory of hashes and dictionaries in bytes."""
        tables = self._held.values()
        entries = sum(sys.getsizeof(piece) for held in tables for piece in held)
        return entries + sum(map(sys.getsizeof, tables))
