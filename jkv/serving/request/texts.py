"""Tokens become text while they come; a text ends where a stop string begins.

A tokenizer's `decode` is all that is asked for. A text is decoded in pieces: the last
few tokens once more together with the new ones, since what a token reads like depends
on those before it (the idea of Hugging Face's text-generation-inference). Half a
character waits for its other half, and what may be the beginning of a stop string
waits, too, so that what was shown is never taken back.
"""

import copy
from collections.abc import Callable, Sequence

# Tokens decoded again so that the next ones read as they do in the whole text.
OVERLAP = 8

# What a decoder makes of bytes that are no character, or only a part of one.
BROKEN = "\ufffd"

Detokenize = Callable[[list[int]], str]


class TextStream:
    """The text of one sequence.

    Attributes:
      text: what can be shown so far, never more than the final text.

    Example:
      >>> stream = TextStream(lambda ids: "".join(map(chr, ids)), [], ["END"])
      >>> stream.advance([72, 105, 69])
      >>> stream.text
      'Hi'
      >>> stream.advance([78, 68, 33])
      5
      >>> stream.text
      'Hi'
    """

    def __init__(
        self, detokenize: Detokenize, prompt: Sequence[int], stops: Sequence[str]
    ):
        self.text = ""
        self._detokenize, self._stops = detokenize, tuple(stops)
        # Tokens that are decoded together, and the characters of them that are known.
        self._ids = list(prompt[-OVERLAP:])
        self._known = len(self._decode()) if self._ids else 0
        self._hidden = ""  # what follows the text, but may begin a stop string
        self._num_tokens = 0

    def advance(self, tokens: Sequence[int], *, has_ended: bool = False) -> int | None:
        """Take the next tokens.

        Args:
          tokens: those that follow.
          has_ended: whether no more will come.

        Returns:
          The tokens of the whole text, should it end at a stop string: as few as have
          it. None if it goes on.
        """
        if not self._stops:
            self._extend(tokens)
            self._show(has_ended)
            return None
        before = self.copy()
        self._extend(tokens)
        if self._find_stop() is not None:
            # One after the other: how many tokens it takes.
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
        """Return a stream that goes on from here, and leaves this one as it is."""
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
        if len(self._ids) > 4 * OVERLAP and text == decoded:
            self._ids = self._ids[-OVERLAP:]
            self._known = len(self._decode())

    def _decode(self) -> str:
        return self._detokenize(self._ids).rstrip(BROKEN)

    def _find_stop(self) -> int | None:
        """Return where the first stop string begins, in what was not shown."""
        starts = [self._hidden.find(stop) for stop in self._stops]
        return min((start for start in starts if start >= 0), default=None)

    def _show(self, has_ended: bool) -> None:
        held = 0 if has_ended else self._count_held()
        shown = len(self._hidden) - held
        self.text += self._hidden[:shown]
        self._hidden = self._hidden[shown:]

    def _count_held(self) -> int:
        """Return the characters at the end that may begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._hidden)), 0, -1):
            if any(stop.startswith(self._hidden[-count:]) for stop in self._stops):
                return count
        return 0
