"""Logits processors in plain Python: the masked tokens of one sequence.

Each rule takes the prompt, the new tokens and the vocabulary as lists, and returns the
set of forbidden tokens.
"""


def repeated_ngrams(size):
    """Forbid tokens that would repeat an n-gram of the sequence."""

    def forbid(prompt, new, vocabulary):
        sequence = prompt + new
        seen = [sequence[i : i + size] for i in range(len(sequence) - size + 1)]
        return {t for t in vocabulary if (sequence + [t])[-size:] in seen}

    return forbid


def early_ends(end_tokens, least):
    """Forbid end tokens before `least` new tokens."""

    def forbid(prompt, new, vocabulary):
        del prompt, vocabulary
        return set(end_tokens) if len(new) < least else set()

    return forbid


def other_tokens(allowed):
    """Forbid all tokens except `allowed`."""

    def forbid(prompt, new, vocabulary):
        del prompt, new
        return {*vocabulary} - {*allowed}

    return forbid


def banned_sequences(banned):
    """Forbid tokens that would complete a banned sequence."""

    def forbid(prompt, new, vocabulary):
        sequence = prompt + new
        return {
            t for t in vocabulary for b in banned if (sequence + [t])[-len(b) :] == b
        }

    return forbid


def find_forced(sequence, opening, closing, budget):
    """Return the forced token of the closing tag, or -1 if thinking may continue."""
    is_thinking, count = False, 0
    for length, _ in enumerate(sequence, 1):
        count += is_thinking
        if sequence[:length][-len(closing) :] == closing:
            is_thinking = False
        elif not is_thinking and sequence[:length][-len(opening) :] == opening:
            is_thinking, count = True, 0
    if not is_thinking or count < budget:
        return -1
    begun = [
        n for n in range(len(closing)) if sequence[len(sequence) - n :] == closing[:n]
    ]
    return closing[max(begun)]


def spent_budgets(opening, closing, budget):
    """Forbid all tokens except the forced one of the closing tag."""

    def forbid(prompt, new, vocabulary):
        forced = find_forced(prompt + new, opening, closing, budget)
        return {t for t in vocabulary if forced not in (-1, t)}

    return forbid


class PlainProcessor:
    """Several rules for one sequence, for `PlainCompletions`."""

    def __init__(self, rules, prompt, vocabulary, ends=()):
        """Store the rules, and the tokens that end the sequence."""
        self.rules, self.prompt, self.vocabulary = rules, prompt, range(vocabulary)
        self.ends = ends

    def allowed(self, new):
        """Return the mask of allowed next tokens, a list of bool."""
        forbidden = set()
        for rule in self.rules:
            forbidden |= rule(self.prompt, new, self.vocabulary)
        return [token not in forbidden for token in self.vocabulary]

    def has_ended(self, new):
        """Return True if the newest token ends the sequence."""
        return new[-1] in self.ends
