"""Logits processors in plain Python: which tokens one text may have next.

Each takes the prompt and the new tokens, lists, and the tokens of the vocabulary; and
says which are forbidden.
"""


def repeated_ngrams(size):
    """Tokens that would end an n-gram that the text has."""

    def forbid(prompt, new, vocabulary):
        text = prompt + new
        seen = [text[i : i + size] for i in range(len(text) - size + 1)]
        return {t for t in vocabulary if (text + [t])[-size:] in seen}

    return forbid


def early_ends(end_tokens, least):
    """End tokens, while the text has fewer new ones."""

    def forbid(prompt, new, vocabulary):
        del prompt, vocabulary
        return set(end_tokens) if len(new) < least else set()

    return forbid


def other_tokens(allowed):
    """All tokens but some."""

    def forbid(prompt, new, vocabulary):
        del prompt, new
        return {*vocabulary} - {*allowed}

    return forbid


def banned_texts(banned):
    """Tokens that would complete a list that is banned."""

    def forbid(prompt, new, vocabulary):
        text = prompt + new
        return {t for t in vocabulary for b in banned if (text + [t])[-len(b) :] == b}

    return forbid


def find_forced(text, opening, closing, budget):
    """The token of the closing tag that must come, -1 where thought may go on."""
    is_thinking, count = False, 0
    for length, _ in enumerate(text, 1):
        count += is_thinking
        if text[:length][-len(closing) :] == closing:
            is_thinking = False
        elif not is_thinking and text[:length][-len(opening) :] == opening:
            is_thinking, count = True, 0
    if not is_thinking or count < budget:
        return -1
    begun = [n for n in range(len(closing)) if text[len(text) - n :] == closing[:n]]
    return closing[max(begun)]


def spent_budgets(opening, closing, budget):
    """All tokens but that of the closing tag which must come."""

    def forbid(prompt, new, vocabulary):
        forced = find_forced(prompt + new, opening, closing, budget)
        return {t for t in vocabulary if forced not in (-1, t)}

    return forbid


class PlainProcessor:
    """The rules of several such processors for one text, for `PlainTexts`."""

    def __init__(self, rules, prompt, vocabulary, ends=()):
        """Take the rules, and tokens that end the text."""
        self.rules, self.prompt, self.vocabulary = rules, prompt, range(vocabulary)
        self.ends = ends

    def allowed(self, new):
        """Which tokens may come next, a list of bool."""
        forbidden = set()
        for rule in self.rules:
            forbidden |= rule(self.prompt, new, self.vocabulary)
        return [token not in forbidden for token in self.vocabulary]

    def has_ended(self, new):
        """True if the text ends with its newest token."""
        return new[-1] in self.ends
