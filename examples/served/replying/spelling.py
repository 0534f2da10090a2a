"""Bytes of single tokens, and a distinct string for each token."""

import functools
from collections.abc import Sequence

from tokenizers import Tokenizer

from jkv.grammar import vocabulary_of


class Spelling:
    """Bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Store the tokenizer."""
        self._tokenizer = tokenizer

    def find_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; empty for special tokens."""
        known = self._bytes
        if known is None:
            return self._tokenizer.decode([token]).encode()
        return (known[token] if token < len(known) else None) or b""

    def find_text(self, token: int) -> str:
        """Return a token's string: special tokens by name, invalid UTF-8 escaped."""
        spelled = self.find_bytes(token)
        if not spelled:
            return self._tokenizer.id_to_token(token) or f"token:{token}"
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    @functools.cached_property
    def _bytes(self) -> Sequence[bytes | None] | None:
        """Bytes of each token; None if the tokenizer's decoder is not supported."""
        try:
            # Any end token will do; it has no bytes in the vocabulary.
            return vocabulary_of(self._tokenizer, [0]).tokens
        except ValueError:
            return None
