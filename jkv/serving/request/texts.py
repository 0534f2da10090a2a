"""Tokens become text while they come; a text ends where a stop string begins.

A tokenizer's `decode` is all that is asked for. A text is decoded in pieces: the last
few tokens once more together with the new ones, since what a token reads like depends
on those before it (the idea of Hugging Face's text-generation-inference). A piece
begins at a whole character: of a run of tokens for single bytes that begins or ends
inside one, some decoders make broken characters alone. Half a character waits for its
other half, and what may be the beginning of a stop string waits, too, so that what was
shown is never taken back.
"""

import copy
from collections.abc import Callable, Sequence

# Tokens decoded again so that the next ones read as they do in the whole text.
OVERLAP = 8
# Of a prompt, which may end in a long run of tokens for single bytes.
MOST_OF_PROMPT = 1024
# Bytes of a character that lacks its last one.
MOST_LEFT_OVER = 3

# Tokens that are decoded together at most: bytes that form no character never end one.
MOST_TOGETHER = 64

# What a decoder makes of bytes that are no character, or only a part of one.
BROKEN = "\ufffd"

Detokenize = Callable[[list[int]], str]


class TextStream:
    """The text of one sequence.

    Attributes:
      text: what can be shown so far, never more than the final text.
    """

    def __init__(
        self, detokenize: Detokenize, prompt: Sequence[int], stops: Sequence[str]
    ):
        self.text = ""
        self._detokenize, self._stops = detokenize, tuple(stops)
        # Tokens that are decoded together, and the characters of them that are known.
        self._ids = list(prompt[self._find_start(prompt) :])
        self._known = self._count_prompt()
        self._whole: tuple[int, ...] = ()  # how many of the first of them end a text
        self._hidden = ""  # what follows the text, but may begin a stop string
        self._num_tokens = 0

    def advance(self, tokens: Sequence[int], *, has_ended: bool = False) -> int | None:
        """Take the next tokens, and what is left if no more will come.

        Returns the tokens of the whole text, should it end at a stop string: as few as
        have it. None if it goes on.
        """
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
        if text == decoded:
            self._whole += (len(self._ids),)
            self._forget()
        elif len(self._ids) > MOST_TOGETHER:
            self._split(decoded)

    def _forget(self) -> None:
        """Leave out tokens that the next ones can be read without."""
        most = len(self._ids) - OVERLAP
        start = max((count for count in self._whole if count <= most), default=0)
        if start and len(self._ids) > 4 * OVERLAP:
            self._ids = self._ids[start:]
            self._whole = tuple(n - start for n in self._whole if n > start)
            self._known = len(self._detokenize(self._ids))

    def _split(self, decoded: str) -> None:
        """Show what all tokens but the last few read like: no later one changes it."""
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
        """Return from where a prompt's last tokens begin with a whole character."""
        start = max(0, len(prompt) - OVERLAP)
        least = max(0, len(prompt) - MOST_OF_PROMPT)
        while start > least and BROKEN in self._detokenize([prompt[start]]):
            start -= 1
        return start

    def _count_prompt(self) -> int:
        """Return the characters of the prompt's tokens, but for half a one behind."""
        ends = range(max(1, len(self._ids) - MOST_LEFT_OVER), len(self._ids) + 1)
        texts = [self._detokenize(self._ids[:end]) for end in ends]
        if texts and all(text.endswith(BROKEN * 2) for text in texts):
            # A run of bytes that form no character: the last one may begin one.
            return len(texts[-1]) - 1
        return max((len(text.rstrip(BROKEN)) for text in texts), default=0)

    def _finish(self) -> None:
        """Take what is left of a text that ends inside a character, or with U+FFFD."""
        decoded = self._detokenize(self._ids)
        if len(decoded.rstrip(BROKEN)) < self._known:
            # A run of bytes was shown up to its last character: half a one is left.
            decoded = decoded[: self._known] + BROKEN
        self._hidden += decoded[self._known :]

    def _find_stop(self) -> int | None:
        """Return where the first stop string begins, in what was not shown."""
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
        """Return the characters at the end that may begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._hidden)), 0, -1):
            if any(stop.startswith(self._hidden[-count:]) for stop in self._stops):
                return count
        return 0
