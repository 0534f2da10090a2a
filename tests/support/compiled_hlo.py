"""Find copies of a pool in compiled modules."""

import collections
import math
import re

# Suites disable XLA passes that only make programs faster (`tools/tasks.py`). Tests
# that inspect a program compile it with these options: with all passes.
ALL_PASSES = {"xla_disable_hlo_passes": ""}

# An operation of a compiled module: its result type, possibly a tuple, and its name.
OPERATION = re.compile(r"= (.+?) ([\w-]+)\(")
SHAPE = re.compile(r"\w+\[([\d,]+)\]")
# Operations that call or wait for the host, in StableHLO and in compiled modules.
OF_HOST = re.compile(
    r"[\w.]*callback[\w.]*|\b(?:infeed|outfeed|send|recv)(?:-done)?(?=\W*\()"
)
# Operations that forward or update their operand without a pass over it.
IN_PLACE = {
    "bitcast",
    "call",
    "conditional",
    "dynamic-update-slice",
    "fusion",  # its inner operations are listed, too
    "get-tuple-element",
    "parameter",
    "scatter",
    "tuple",
    "while",
}


def pool_sized_operations(compiled, size):
    """Return operations of at least `size` elements that may copy an array."""
    found = []
    for line in compiled.as_text().splitlines():
        match = OPERATION.search(line)
        if match and match[2] not in IN_PLACE:
            for shape in SHAPE.findall(match[1]):
                if math.prod(map(int, shape.split(","))) >= size:
                    found.append(f"{match[2]}[{shape}]")
    return found


def host_operations(text):
    """Return a module's host operations: Python callbacks, infeeds, sends and so on."""
    # Without the names of files and functions in the metadata.
    lines = (line.partition(" metadata={")[0] for line in text.splitlines())
    return [found for line in lines for found in OF_HOST.findall(line)]


def in_the_steps_of_a_loop(text, size):
    """Return instructions of outermost loops with a dimension of this size.

    Nested loops are excluded: they may run zero times.
    """
    lines = collections.defaultdict(list)
    for line in text.splitlines():
        if name := re.match(r"(?:ENTRY )?%([\w.-]+) \(", line):
            computation = "ENTRY" if line.startswith("ENTRY") else name[1]
        elif line.startswith("  "):
            lines[computation].append(line.strip())
    bodies = [re.search(r" while\(.*body=%([\w.-]+)", line) for line in lines["ENTRY"]]
    steps = [line for body in bodies if body for line in lines[body[1]]]
    assert steps
    of_size = re.compile(rf"= [^(]*\[(?:\d+,)*{size}(?:,\d+)*\]")
    return [
        line
        for line in steps
        if of_size.match(line.split(" ", 1)[1]) and " get-tuple-element(" not in line
    ]
