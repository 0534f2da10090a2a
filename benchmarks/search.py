"""Monte Carlo tree search: blocks, bytes and time, compared to copied dense caches.

    python benchmarks/search.py [--rounds 5]

The search of `examples/tree_search.py` with the bundled model in float32: 32 lines, 64
simulations of each, eight choices. Both contenders find the same trees:

* paged: a node is a sequence, a branch is `jkv.fork`.
* cloned: a node has a row of a dense array, which a branch copies, in plain JAX
  (`tests/support/decoding/cloned_sequences.py`).

Load-independent counts: the peak number of blocks, the same without sharing between
live nodes, and the bytes of the blocks and of the dense array, which releases no row.
Results: the lines that fit, by greedy decoding, by the search, and by 64 samples of
each line under the same rules (sampled among the eight choices). Likelihood is the
geometric mean of a line's probabilities, averaged over the best lines where search and
samples fit.
"""

import argparse
import functools
import pathlib
import sys
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]  # they are not packages

import pretrained  # noqa: E402
import tree_search  # noqa: E402
from searching.paged_sequences import PagedSequences  # noqa: E402
from searching.puzzle import Puzzle, read_vocabulary  # noqa: E402
from searching.search import Settings, Writer, search  # noqa: E402
from support.decoding.cloned_sequences import (  # noqa: E402, as in the tests
    ClonedSequences,
    dense_step,
    read_weights,
)

import jkv  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results" / "search.json"
LINES, FIRST_WIDTH = 32, 24
SETTINGS = Settings(num_simulations=64, num_choices=8, max_tokens=27)


@jax.jit
def solve_cloned(weights, prompt, puzzle):
    """Search with a dense row per node."""
    sequences, rows, logits = ClonedSequences.open(
        dense_step,
        weights,
        prompt,
        num_sequences=LINES * (SETTINGS.num_simulations + 1) + 1,
        max_length=prompt.shape[0] + SETTINGS.max_tokens,
        count=LINES,
    )
    found = search(
        Writer(dense_step, weights, puzzle, SETTINGS), sequences, rows, logits
    )
    return found.tree, found.found


@functools.partial(jax.jit, static_argnames="model")
def sample(model, params, cache, prompt, puzzle):
    """Return the likelihoods of samples under the search's rules, f32[n, B]."""
    sequences, roots, logits = PagedSequences.open(model, params, cache, prompt, LINES)

    def write(carry):
        sequences, seq_ids, logits, line, key = carry
        key, of_step = jax.random.split(key)
        choices = puzzle.choose(logits, line, SETTINGS.num_choices)
        drawn = jax.random.categorical(of_step, choices.logprobs)[:, None]
        tokens, logprobs = (
            jnp.take_along_axis(array, drawn, axis=1)[:, 0] for array in choices
        )
        line = puzzle.advance(line, tokens, logprobs)
        going = jnp.where(line.is_over, jkv.NO_SEQUENCE, seq_ids)
        sequences, logits = sequences.extend(model, params, going, tokens)
        return sequences, seq_ids, logits, line, key

    def draw(sequences, key):
        sequences, seq_ids = sequences.branch(roots)
        line = puzzle.begin(SETTINGS.max_tokens)
        sequences, _, _, line, _ = jax.lax.while_loop(
            lambda carry: ~carry[3].is_over.all(),
            write,
            (sequences, seq_ids, logits, line, key),
        )
        return sequences.drop(seq_ids), puzzle.judge(line)

    keys = jax.random.split(jax.random.key(0), SETTINGS.num_simulations)
    return jax.lax.scan(draw, sequences, keys)[1]


def measure(rounds: int) -> dict[str, Any]:
    """Run both searches, interleaved, and draw the samples."""
    model, params = pretrained.load(tree_search.BUNDLED, dtype=jnp.float32)
    tokenizer = pretrained.load_tokenizer(tree_search.BUNDLED)
    prompt = np.array(tokenizer.encode(tree_search.PROMPT).ids, np.int32)
    widths = np.arange(FIRST_WIDTH, FIRST_WIDTH + LINES, dtype=np.int32)
    vocabulary = read_vocabulary(tokenizer, model.config.vocab_size)
    puzzle, weights = Puzzle(widths, **vocabulary), read_weights()
    config = tree_search.choose_config(model, len(prompt), LINES, SETTINGS)
    found: dict[str, Any] = {}

    def paged(cache):
        found["paged"] = jax.block_until_ready(
            tree_search.solve(model, params, cache, prompt, puzzle, SETTINGS)
        )

    def cloned(_):
        found["cloned"] = jax.block_until_ready(solve_cloned(weights, prompt, puzzle))

    samples = harness.interleave(
        [
            harness.Case(name="paged", prepare=lambda: jkv.init(config), run=paged),
            harness.Case(name="cloned", prepare=lambda: None, run=cloned),
        ],
        rounds=rounds,
        warmup=1,
    )
    sequences, tree, lines = found["paged"]
    drawn = np.asarray(sample(model, params, jkv.init(config), prompt, puzzle))
    best = drawn.max(axis=0)
    peak, alone = int(sequences.peak_blocks), int(sequences.unshared_peak_blocks)
    pools = sequences.cache.storage[0]
    of_block = (pools.key_pool.nbytes + pools.value_pool.nbytes) / config.num_blocks
    of_token = of_block / config.block_size
    num_rows = LINES * (SETTINGS.num_simulations + 1) + 1
    values, first = np.asarray(lines.values), np.asarray(lines.first)
    return {
        "lines": LINES,
        "simulations": SETTINGS.num_simulations,
        "peak blocks": peak,
        "if copied": alone,
        "share": peak / alone,
        "MiB of blocks": peak * of_block / 2**20,
        "MiB of clones": num_rows * config.max_context_length * of_token / 2**20,
        "s paged": samples["paged"].median,
        "s cloned": samples["cloned"].median,
        "same visits": bool((tree.visits == found["cloned"][0].visits).all()),
        "greedy fits": int((first == 1).sum()),
        "search fits": int((first > 0).sum()),
        "samples fit": int((best > 0).sum()),
        "likely, search": float(values[(first > 0) & (best > 0)].mean()),
        "likely, samples": float(best[(first > 0) & (best > 0)].mean()),
        "seconds": {name: each.row(1) for name, each in samples.items()},
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    where = harness.machine()
    print(harness.header("Monte Carlo tree search", where), flush=True)
    row = measure(options.rounds)
    shown = [{"": name, "value": row[name]} for name in row if name != "seconds"]
    print("\n" + harness.table(shown, {"": "", "value": "value"}))
    where["load after"] = harness.machine()["load"]
    run = {"benchmark": "tree search", "machine": where, "rows": [row]}
    harness.save(RESULTS, run)


if __name__ == "__main__":
    main()
