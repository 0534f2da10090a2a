"""Monte Carlo tree search over sequences in one jit: lines that end in a given column.

    python examples/tree_search.py --width 24 --simulations 64 "The with statement"

The model writes 32 lines at a time. The full stop of the first line must stand in
column 24, of the next one in column 25, and so on, and every token must be one of the
model's 8 most likely. Greedy decoding fails on nearly every line. The search explores
others: a node is a sequence of the cache, `fork` expands it, `truncate` rolls a rollout
back and `free` prunes. The script prints the lines, and the peak number of blocks with
and without sharing. The search is in `searching/`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
from generating.arguments import Parser, at_least, text
from generating.exiting import answering_errors, errors_in_one_line
from searching.output import print_lines
from searching.paged_sequences import PagedSequences
from searching.puzzle import Puzzle, read_vocabulary
from searching.search import Settings, Writer, search

import jkv

BUNDLED = Path(__file__).parent / "models" / "pydoc"
PROMPT = """The with statement

The "with" statement is used to wrap the execution of a block with methods defined by a
context manager. The block is executed, and the context manager is told of its end.
If the block raises an exception, the context manager is told of it, too.
The"""
BLOCK_SIZE = 8  # small, since each node takes a block


def main():
    parser = Parser(__doc__)
    add, number = parser.add_argument, at_least(1)
    add("prompt", nargs="?", type=text, default=PROMPT)
    add("--model", default=BUNDLED, help="a Hugging Face folder; default: bundled")
    add("--lines", type=number, default=32, help="number of lines; %(default)s")
    add("--width", type=number, default=24, help="of the first line; %(default)s")
    add("--simulations", type=number, default=64, help="per line; %(default)s")
    add("--choices", type=at_least(2), default=8, help="top tokens; %(default)s")
    options = parser.parse_args()
    jkv.keep_compiled_programs()
    with answering_errors():
        show(options)


def show(options):
    """Run the search; print the lines and the block counts."""
    model, params = pretrained.load(options.model, dtype=jnp.float32, scan_layers=True)
    if model.config.has_states:
        raise ValueError(
            "layers with a recurrent state cannot take rollouts back; use another model"
        )
    tokenizer = pretrained.load_tokenizer(options.model)
    widths = np.arange(options.width, options.width + options.lines, dtype=np.int32)
    vocabulary = read_vocabulary(tokenizer, model.config.vocab_size)
    prompt = np.array(tokenizer.encode(options.prompt).ids, np.int32)
    # A token has about four characters; this limit allows for two.
    max_tokens = max(4, int(widths[-1]) // 2)
    if len(prompt) + max_tokens > model.config.max_context_length:
        raise ValueError(
            f"{len(prompt)} tokens and {max_tokens} of a line do not fit the context "
            f"of {model.config.max_context_length}"
        )
    settings = Settings(options.simulations, options.choices, max_tokens)
    config = choose_config(model, len(prompt), options.lines, settings)
    sequences, tree, found = solve(
        model, params, jkv.init(config), prompt, Puzzle(widths, **vocabulary), settings
    )
    print_lines(tokenizer, widths, jax.device_get(found))
    cache, shared = sequences.cache, sequences.peak_blocks
    print(f"{int(tree.visits[:, 0].sum())} simulations of {options.lines} trees")
    print(f"{shared} blocks of {cache.block_size} tokens at the peak, ", end="")
    print(f"{sequences.unshared_peak_blocks} if each node had copied its text")
    print(f"{jkv.num_free_blocks(cache)} of {cache.num_blocks} blocks free at the end")


def choose_config(model, prompt_length, num_lines, settings):
    """Return a cache configuration with enough blocks for the whole search.

    Each node needs one block: a copy of its parent's partly filled block, or a new one.
    A rollout needs the blocks of one line until it is rolled back.
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
    """Search for a continuation of the prompt for each width, from an empty cache."""
    count = puzzle.widths.shape[0]
    sequences, seq_ids, logits = PagedSequences.open(
        model, params, cache, prompt, count
    )
    writer = Writer(model, params, puzzle, settings)
    tree, sequences, found = search(writer, sequences, seq_ids, logits)
    return sequences, tree, found


if __name__ == "__main__":
    with errors_in_one_line():
        main()
