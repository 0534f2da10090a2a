"""Incremental detokenization with stop strings.

It requires only a tokenizer's `decode`. Each new piece is decoded together with the
last few tokens, since the text of a token depends on the previous ones (the idea of
Hugging Face's text-generation-inference). A piece starts at a character boundary: from
a run of byte tokens that starts or ends inside a character, some decoders produce
broken characters. An incomplete character is held back until it is complete, and so is
a possible start of a stop string, so that shown text is final.
"""

import copy
from collections.abc import Callable, Sequence

from jkv.arguments import explains_class

# Tokens decoded again, so that the next ones read as in the full text.
OVERLAP = 8
# Limit for a prompt that ends in a long run of byte tokens.
MOST_OF_PROMPT = 1024
# Most bytes of an incomplete character.
MOST_LEFT_OVER = 3

# Limit of tokens decoded together: invalid bytes may never complete a character.
MOST_TOGETHER = 64

# Decoders return this for invalid bytes and incomplete characters.
BROKEN = "\ufffd"

Detokenize = Callable[[list[int]], str]


@explains_class
class TextStream:
    """Text of one sequence, decoded token by token.

    Args:
      detokenize: from a list of token ids to a string, such as a tokenizer's `decode`.
      prompt: token ids before the sequence.
      stops: strings that end the text.

    Attributes:
      text: final text so far, a prefix of the complete text.

    Example:
      >>> from jkv.serving import TextStream
      >>> def decode(ids):
      ...     return bytes(ids).decode(errors="replace")
      >>> stream = TextStream(decode, [], ["!"])
      >>> for token in "né!".encode():
      ...     print(stream.advance([token]), stream.text)
      None n
      None n
      None né
      4 né
    """

    def __init__(
        self, detokenize: Detokenize, prompt: Sequence[int], stops: Sequence[str]
    ):
        self.text = ""
        self._detokenize, self._stops = detokenize, tuple(stops)
        # Tokens decoded together, and how many of their characters are known.
        self._ids = list(prompt[self._find_start(prompt) :])
        self._known = self._count_prompt()
        self._whole: tuple[int, ...] = ()  # lengths of `_ids` with a complete text
        self._hidden = ""  # follows `text`; may start a stop string
        self._num_tokens = 0

    def advance(self, tokens: Sequence[int], *, has_ended: bool = False) -> int | None:
        """Append tokens; with `has_ended`, also release the held-back text.

        Returns the number of tokens of the sequence, as few as contain a stop string;
        None if there is no stop string.
        """
        before = self.copy()
        self._extend(tokens)
        if self._find_stop() is not None:
            # Token by token, to count the tokens up to the stop string.
            vars(self).update(vars(before))
            for token in tokens:
                self._extend([token])
                start = self._find_stop()
                if start is not None:
                    self.text += self._hidden[:start]
                    self._hidden = ""
                    return self._num_tokens
        self._show(has_ended)
        return None

    def copy(self) -> "TextStream":
        """Return an independent copy of the stream."""
        other = copy.copy(self)
        other._ids = list(self._ids)
        return other

    def _extend(self, tokens: Sequence[int]) -> None:
        self._ids += tokens
        self._num_tokens += len(tokens)
        decoded = self._detokenize(self._ids)
        text = decoded.rstrip(BROKEN)
        self._hidden += text[self._known :]
        self._known = max(self._known, len(text))
        if text == decoded:
            self._whole += (len(self._ids),)
            self._forget()
        elif len(self._ids) > MOST_TOGETHER:
            self._split(decoded)

    def _forget(self) -> None:
        """Drop tokens that the next ones do not need for decoding."""
        most = len(self._ids) - OVERLAP
        start = max((count for count in self._whole if count <= most), default=0)
        if start and len(self._ids) > 4 * OVERLAP:
            self._ids = self._ids[start:]
            self._whole = tuple(n - start for n in self._whole if n > start)
            self._known = len(self._detokenize(self._ids))

    def _split(self, decoded: str) -> None:
        """Release all but the last few tokens, which alone can still change."""
        most = len(self._ids) - OVERLAP
        starts = range(most, most - MOST_LEFT_OVER - 1, -1)
        heads = {start: self._detokenize(self._ids[:start]) for start in starts}
        start = next(
            (start for start, head in heads.items() if not head.endswith(BROKEN)),
            None,
        ) or next(
            (
                start
                for start, head in heads.items()
                if head + self._detokenize(self._ids[start:]) == decoded
            ),
            most,
        )
        self._hidden += heads[start][self._known :]
        self._known = max(0, self._known - len(heads[start]))
        self._ids, self._whole = self._ids[start:], ()

    def _find_start(self, prompt: Sequence[int]) -> int:
        """Return the start of the prompt's last tokens, at a character boundary."""
        start = max(0, len(prompt) - OVERLAP)
        least = max(0, len(prompt) - MOST_OF_PROMPT)
        while start > least and BROKEN in self._detokenize([prompt[start]]):
            start -= 1
        return start

    def _count_prompt(self) -> int:
        """Return the number of complete characters of the prompt's tokens."""
        ends = range(max(1, len(self._ids) - MOST_LEFT_OVER), len(self._ids) + 1)
        texts = [self._detokenize(self._ids[:end]) for end in ends]
        if texts and all(text.endswith(BROKEN * 2) for text in texts):
            # After a run of invalid bytes, the last one may start a character.
            return len(texts[-1]) - 1
        return max((len(text.rstrip(BROKEN)) for text in texts), default=0)

    def _finish(self) -> None:
        """Release the rest of a text that ends inside a character, with U+FFFD."""
        decoded = self._detokenize(self._ids)
        if len(decoded.rstrip(BROKEN)) < self._known:
            # An invalid run was released up to its last character.
            decoded = decoded[: self._known] + BROKEN
        self._hidden += decoded[self._known :]

    def _find_stop(self) -> int | None:
        """Return the position of the first stop string in the hidden text."""
        starts = [self._hidden.find(stop) for stop in self._stops]
        return min((start for start in starts if start >= 0), default=None)

    def _show(self, has_ended: bool) -> None:
        if has_ended and self._ids:
            self._finish()
        held = 0 if has_ended else self._count_held()
        shown = len(self._hidden) - held
        self.text += self._hidden[:shown]
        self._hidden = self._hidden[shown:]

    def _count_held(self) -> int:
        """Return the number of last characters that may start a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._hidden)), 0, -1):
            if any(stop.startswith(self._hidden[-count:]) for stop in self._stops):
                return count
        return 0
