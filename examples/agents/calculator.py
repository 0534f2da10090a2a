"""The tool: it adds up the whole numbers of a line."""

import re

NUMBER = re.compile(r"\d{1,6}")


def calculate(line):
    """Return the sum of the numbers in a line, None where there is none."""
    numbers = [int(found) for found in NUMBER.findall(line)]
    return sum(numbers) if numbers else None
