"""A tool that adds the whole numbers of a line."""

import re

NUMBER = re.compile(r"\d{1,6}")


def calculate(line):
    """Return the sum of the numbers in a line, or None."""
    numbers = [int(found) for found in NUMBER.findall(line)]
    return sum(numbers) if numbers else None
