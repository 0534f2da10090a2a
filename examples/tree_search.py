"""Sentences that end in a given column, by tree search over texts in one jit.

    python examples/tree_search.py --width 24 --simulations 64 "The with statement"

The model writes 32 lines at a time. The full stop of the first one must stand in column
24, of the next one in column 25, and so on, and every token must be one of the 8 that
the model finds likeliest. Greedy text gets stuck before the end of nearly every line.
Monte Carlo tree search tries others: a node is a sequence of the cache, `fork` expands
it, `truncate` takes a rollout back and `free` prunes. The script shows the lines, and
the blocks at the peak beside those that copies of the cache would take. The search is
in `searching/`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
from generating.arguments import Parser, at_least, text
from generating.exiting import answering_errors, errors_in_one_line
from rich.console import Console
from rich.table import Table
from searching.paged_texts import PagedTexts
from searching.puzzle import Puzzle, read_vocabulary
from searching.search import Settings, Writer, search

import jkv

BUNDLED = Path(__file__).parent / "models" / "pydoc"
PROMPT = """The with statement

The "with" statement is used to wrap the execution of a block with methods defined by a
context manager. The block is executed, and the context manager is told of its end.
If the block raises an exception, the context manager is told of it, too.
The"""
BLOCK_SIZE = 8  # a node takes one block, so small ones


def main():
    parser = Parser(__doc__)
    add, number = parser.add_argument, at_least(1)
    add("prompt", nargs="?", type=text, default=PROMPT)
    add("--model", default=BUNDLED, help="a Hugging Face folder; the bundled model")
    add("--lines", type=number, default=32, help="searched at a time; %(default)s")
    add("--width", type=number, default=24, help="of the first line; %(default)s")
    add("--simulations", type=number, default=64, help="of each line; %(default)s")
    add("--choices", type=at_least(2), default=8, help="likeliest tokens; %(default)s")
    options = parser.parse_args()
    jkv.keep_compiled_programs()
    with answering_errors():
        show(options)


def show(options):
    """Search, and print the lines and their costs."""
    model, params = pretrained.load(options.model, dtype=jnp.float32, scan_layers=True)
    if model.config.has_states:
        raise ValueError(
            "a layer with a state takes no rollout back: choose a model without"
        )
    tokenizer = pretrained.load_tokenizer(options.model)
    widths = np.arange(options.width, options.width + options.lines, dtype=np.int32)
    vocabulary = read_vocabulary(tokenizer, model.config.vocab_size)
    prompt = np.array(tokenizer.encode(options.prompt).ids, np.int32)
    # A token of a line has four characters or so.
    max_tokens = max(4, int(widths[-1]) // 2)
    if len(prompt) + max_tokens > model.config.max_context_length:
        raise ValueError(
            f"{len(prompt)} tokens and {max_tokens} of a line do not fit the context "
            f"of {model.config.max_context_length}"
        )
    settings = Settings(options.simulations, options.choices, max_tokens)
    config = choose_config(model, len(prompt), options.lines, settings)
    texts, tree, found = solve(
        model, params, jkv.init(config), prompt, Puzzle(widths, **vocabulary), settings
    )
    print_lines(tokenizer, widths, jax.device_get(found))
    cache, shared, alone = texts.cache, texts.peak_blocks, texts.unshared_peak_blocks
    print(f"{int(tree.visits[:, 0].sum())} simulations of {options.lines} trees")
    print(f"{shared} blocks of {cache.block_size} tokens at the peak, ", end="")
    print(f"{alone} if each node had copied its text")
    print(f"{jkv.num_free_blocks(cache)} of {cache.num_blocks} blocks free at the end")


def choose_config(model, prompt_length, num_lines, settings):
    """Return a cache for the trees: the search never lacks a block.

    A node has one block of its own: a copy of its parent's partly filled one, or a new
    one. A rollout has the blocks of a line until it is taken back.
    """
    num_nodes = num_lines * (settings.num_simulations + 1)
    of_rollout = settings.max_tokens // BLOCK_SIZE + 1
    return jkv.CacheConfig(
        **model.cache_fields,
        block_size=BLOCK_SIZE,
        num_blocks=prompt_length // BLOCK_SIZE + 1 + num_nodes + num_lines * of_rollout,
        max_sequences=num_nodes + 1,
        max_context_length=prompt_length + settings.max_tokens,
        dtype=jnp.float32,
    )


@jax.jit(static_argnames=("model", "settings"), donate_argnames="cache")
def solve(model, params, cache, prompt, puzzle, settings):
    """Search a continuation of the prompt for each puzzle, from an empty cache."""
    count = puzzle.widths.shape[0]
    texts, seq_ids, logits = PagedTexts.open(model, params, cache, prompt, count)
    writer = Writer(model, params, puzzle, settings)
    tree, texts, found = search(writer, texts, seq_ids, logits)
    return texts, tree, found


def print_lines(tokenizer, widths, found):
    """Print each line, how likely its tokens are, and the simulation that found one."""
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


if __name__ == "__main__":
    with errors_in_one_line():
        main()
