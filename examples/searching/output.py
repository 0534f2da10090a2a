"""Results of a search as a table."""

from rich.console import Console
from rich.table import Table


def print_lines(tokenizer, widths, found):
    """Print each line, its mean token probability and its first solving simulation."""
    table = Table(
        "column", "line", "likely", "found in", box=None, padding=(0, 1, 0, 0)
    )
    table.columns[1].no_wrap = True
    for i, width in enumerate(widths):
        tokens = found.lines.tokens[i, : found.lines.num_tokens[i]]
        line = tokenizer.decode(tokens.tolist())
        first = found.first[i]
        numbers = (f"{found.values[i]:.2f}", str(first)) if first else ("", "none fits")
        table.add_row(str(width), line, *numbers)
    Console().print(table)
    greedy, solved = int((found.first == 1).sum()), int((found.first > 0).sum())
    print(f"\ngreedy text fits {greedy} of {len(widths)} lines, search {solved}")
