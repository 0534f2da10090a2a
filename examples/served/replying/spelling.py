"""Spellings of single tokens: their bytes, and a distinct text for each."""

import functools
from collections.abc import Sequence

from tokenizers import Tokenizer

from jkv.grammar import vocabulary_of


class Spelling:
    """The bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Keep the tokenizer."""
        self._tokenizer = tokenizer

    def find_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; none for one that is no text."""
        known = self._bytes
        if known is None:
            return self._tokenizer.decode([token]).encode()
        return (known[token] if token < len(known) else None) or b""

    def find_text(self, token: int) -> str:
        """Return a token's text: a special one's name, and bytes that are no text."""
        spelled = self.find_bytes(token)
        if not spelled:
            return self._tokenizer.id_to_token(token) or f"token:{token}"
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    @functools.cached_property
    def _bytes(self) -> Sequence[bytes | None] | None:
        """Bytes of each token; None where the tokenizer has another kind of decoder."""
        try:
            # No end token is needed: it would only be left out.
            return vocabulary_of(self._tokenizer, [0]).tokens
        except ValueError:
            return None
