"""Regular expressions in plain Python, matched by derivatives.

The derivative of an expression by a byte matches the remainders of its strings that
start with the byte (J. Brzozowski, Derivatives of regular expressions, 1964). An
expression is a tuple of kind `nothing`, `empty`, `byte`, `then`, `either` or `many`;
the functions of these names normalize it, so that equal languages have few forms.
"""

import functools

NOTHING, EMPTY = ("nothing",), ("empty",)


def text(characters):
    return functools.reduce(then, [("byte", b) for b in characters.encode()], EMPTY)


def then(one, other):
    if NOTHING in (one, other):
        return NOTHING
    if EMPTY in (one, other):
        return other if one == EMPTY else one
    # Associate to the right, so that `(ab)c` and `a(bc)` are equal.
    return (
        ("then", one[1], then(one[2], other))
        if one[0] == "then"
        else (
            "then",
            one,
            other,
        )
    )


def either(*parts):
    found = set()
    for part in parts:
        found |= part[1] if part[0] == "either" else {part}
    found.discard(NOTHING)
    if len(found) < 2:
        return found.pop() if found else NOTHING
    return ("either", frozenset(found))


def many(part):
    return EMPTY if part in (NOTHING, EMPTY) else ("many", part)


def repeated(part, least, most):
    """Repeat a part `least` to `most` times; None is unbounded."""
    rest = many(part) if most is None else EMPTY
    for _ in range(0 if most is None else most - least):
        rest = either(EMPTY, then(part, rest))
    return functools.reduce(lambda behind, _: then(part, behind), range(least), rest)


@functools.cache
def has_empty(expression):
    match expression:
        case ("empty",) | ("many", _):
            return True
        case ("then", one, other):
            return has_empty(one) and has_empty(other)
        case ("either", parts):
            return any(map(has_empty, parts))
    return False


@functools.cache
def derive(expression, byte):
    match expression:
        case ("byte", value):
            return EMPTY if value == byte else NOTHING
        case ("many", part):
            return then(derive(part, byte), expression)
        case ("either", parts):
            return either(*(derive(part, byte) for part in parts))
        case ("then", one, other):
            found = then(derive(one, byte), other)
            return either(found, derive(other, byte)) if has_empty(one) else found
    return NOTHING


def derive_by(expression, spelled):
    """Return the derivative of an expression by several bytes."""
    return functools.reduce(derive, spelled, expression)


class TokenAutomaton:
    """Automaton over tokens; a state is the remaining expression."""

    def __init__(self, expression, tokens):
        self.tokens, self.start = tokens, expression
        self.follows = {}
        waiting = [expression]
        while waiting:
            state = waiting.pop()
            if state not in self.follows:
                self.follows[state] = [derive_by(state, token) for token in tokens]
                waiting += self.follows[state]
        # Live states: final, or with a path to a final one.
        self.alive = {state for state in self.follows if has_empty(state)}
        while more := {
            state
            for state, reached in self.follows.items()
            if state not in self.alive and self.alive & {*reached}
        }:
            self.alive |= more

    def allowed(self, state):
        """Return the ids of the allowed next tokens."""
        reached = enumerate(self.follows[state])
        return {token for token, behind in reached if behind in self.alive}
