"""Texts as JSON writes them between quotes: some characters escaped.

An escape stands for one byte of the text, so an automaton of texts becomes one of JSON
by other ways from state to state. A quote and a backslash have one escape; control
characters (and U+007F, which many tools write so) have `\\u00XX`, five of them a short
one too. Other characters are written as they are.
"""

import numpy as np

from jkv.grammar.automaton import Automaton

_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 0x22: '"', 0x5C: "\\"}
_BY_NUMBER = [*range(0x20), 0x7F]
_ESCAPED = sorted({*_SHORT, *_BY_NUMBER})


def quote(texts: Automaton) -> Automaton:
    """Return what stands between the quotes for each text of a language."""
    inner = texts.transitions
    rows = [inner.copy()]
    rows[0][:, _ESCAPED] = -1
    count = len(inner)
    escaping = np.flatnonzero((inner[:, _ESCAPED] >= 0).any(axis=1))

    def add(num: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        nonlocal count
        count += num
        rows.append(np.full((num, 256), -1, np.int32))
        return rows[-1]

    for state in escaping.tolist():
        behind = inner[state]
        first = count
        after = add(1)[0]  # behind the backslash
        rows[0][state, ord("\\")] = first
        for byte, letter in _SHORT.items():
            after[ord(letter)] = behind[byte]
        tens = sorted({byte >> 4 for byte in _BY_NUMBER if behind[byte] >= 0})
        if not tens:
            continue
        # Behind "\\u", "\\u0" and "\\u00", and behind each next digit.
        after[ord("u")] = first + 1
        digits = add(3 + len(tens))
        digits[0, ord("0")], digits[1, ord("0")] = first + 2, first + 3
        for rank, ten in enumerate(tens):
            digits[2, ord(str(ten))] = first + 4 + rank
            for byte in _BY_NUMBER:
                if byte >> 4 == ten:
                    for digit in f"{byte & 15:x}{byte & 15:X}":
                        digits[3 + rank, ord(digit)] = behind[byte]
    accepting = np.zeros(count, bool)
    accepting[: len(inner)] = texts.accepting
    return Automaton(np.concatenate(rows), accepting)
