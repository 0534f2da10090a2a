"""A regular expression to an automaton over bytes, in a process of its own.

The compiler has no limit of memory and ends its process where there is none left, so it
runs in one that the system bounds. This file is that process's program and imports
nothing of the package: it reads JSON ({"pattern": ..., "max_bytes": ...}) and writes an
answer, JSON in the first line and transitions as bytes behind it.

outlines-core's `Index` drops continuations that go on from a match through what is none
("(ab)+" stops after "ab"). With `\\z` at the end of the pattern a match is seen at the
end of the text alone, so that no state but the last is a match, and none is dropped. A
character that goes before keeps the assertion away from the automaton's start, where
the compiler would refuse it.
"""

import array
import json
import sys

END = 256  # a token that the compiler asks for and no text has


def main() -> None:
    """Answer the request on the standard input."""
    request = json.load(sys.stdin)
    _bound_memory(request["max_bytes"])
    # Imported here: the bound holds for the library, too.
    from outlines_core import Index, Vocabulary

    single_bytes: dict[str | bytes, list[int]] = {bytes([b]): [b] for b in range(END)}
    try:
        index = Index(rf"x(?:{request['pattern']})\z", Vocabulary(END, single_bytes))
    except (ValueError, RuntimeError) as error:
        _answer({"error": str(error)}, b"")
        return
    transitions, finals = index.get_transitions(), index.get_final_states()
    start = transitions.get(index.get_initial_state(), {}).get(ord("x"))
    if start is None:
        _answer({"finals": []}, b"")
        return
    number = {start: 0}
    for row in (*transitions.values(), dict.fromkeys(finals, start)):
        for state in row.values():
            number.setdefault(state, len(number))
    for state in finals:
        number.setdefault(state, len(number))
    table = array.array("i", [-1]) * (len(number) * END)
    for state, row in transitions.items():
        if state in number:
            for byte, target in row.items():
                if byte < END:
                    table[number[state] * END + byte] = number[target]
    _answer({"finals": [number[state] for state in finals]}, table.tobytes())


def _bound_memory(max_bytes: int) -> None:
    """Let the process have so many bytes more than it has now, where that is known."""
    try:
        import resource
    except ImportError:  # Windows has no such bound
        return
    has = 2**27  # of Python itself and of shared libraries
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = has + max_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _answer(head: dict[str, object], body: bytes) -> None:
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n" + body)


if __name__ == "__main__":
    main()
