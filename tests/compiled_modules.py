"""Compiled modules show every copy that XLA makes: which operations may copy a pool."""

import math
import re

# One operation of a compiled module: its result's type, a tuple's too, and its name.
OPERATION = re.compile(r"= (.+?) ([\w-]+)\(")
SHAPE = re.compile(r"\w+\[([\d,]+)\]")
# These hand on or update their operand without a pass over it.
IN_PLACE = {
    "bitcast",
    "call",
    "conditional",
    "dynamic-update-slice",
    "fusion",  # its inner operations are listed too
    "get-tuple-element",
    "parameter",
    "scatter",
    "tuple",
    "while",
}


def pool_sized_operations(compiled, size):
    """Names of operations of at least this many elements that may copy an array."""
    found = []
    for line in compiled.as_text().splitlines():
        match = OPERATION.search(line)
        if match and match[2] not in IN_PLACE:
            for shape in SHAPE.findall(match[1]):
                if math.prod(map(int, shape.split(","))) >= size:
                    found.append(f"{match[2]}[{shape}]")
    return found
