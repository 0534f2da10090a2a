"""Parallel sampling: several completions of one prompt share its blocks.

    python examples/parallel_sampling.py --samples 4 "The with statement"

The prompt is computed once. `fork` then opens one sequence per sample on the same
blocks and copies only the partly filled last one. The script prints the block tables
after the fork, and the peak number of blocks with and without sharing.
"""

from pathlib import Path

import numpy as np
import pretrained
from generating.arguments import Parser, at_least, text
from generating.exiting import answering_errors, errors_in_one_line

import jkv

BUNDLED = Path(__file__).parent / "models" / "pydoc"
PROMPT = """The with statement

The "with" statement is used to wrap the execution of a block with methods defined by a
context manager. This allows common "try"..."except"..."finally" usage patterns to be
encapsulated for convenient reuse. The execution of the "with" statement proceeds as
follows:

"""

# Rows per step, for prompts and decoding alike: one shape, one compilation.
ROWS = 16

begin = jkv.jitted.begin
decode = jkv.jitted.decode


def main():
    parser = Parser(__doc__)
    parser.add_argument("prompt", nargs="?", type=text, default=PROMPT)
    parser.add_argument("--model", default=BUNDLED, help="a Hugging Face folder")
    parser.add_argument("--samples", type=at_least(1), default=4)
    parser.add_argument("--max-new-tokens", type=at_least(1), default=40)
    parser.add_argument("--temperature", type=at_least(0, float), default=0.8)
    options = parser.parse_args()
    num_samples, num_new = options.samples, options.max_new_tokens
    jkv.keep_compiled_programs()

    with answering_errors():
        model, params = pretrained.load(options.model)
        tokenizer = pretrained.load_tokenizer(options.model)
        prompt = tokenizer.encode(options.prompt).ids
        length = len(prompt) + num_new
        if length > model.config.max_context_length:
            raise ValueError(
                f"{len(prompt)} tokens and {num_new} more do not fit the context of "
                f"{model.config.max_context_length}"
            )

    cache = jkv.init(
        model.cache_config(
            length, max_sequences=num_samples, dtype=params["embedding"].dtype
        )
    )
    # A scalar seed is the first of consecutive seeds, one per sample.
    sampling = jkv.Sampling(temperature=options.temperature, top_p=0.95, seeds=1)
    state = begin(
        model,
        params,
        cache,
        np.array([prompt], np.int32),
        max_new_tokens=num_new,
        num_samples=num_samples,
        row_counts=(max(ROWS, num_samples),),
        stop_tokens=np.array(model.config.stop_tokens, np.int32),
    )
    # The first steps compute the prompt; the next step forks.
    until_fork = np.int32(-(-len(prompt) // max(ROWS, num_samples)) + 1)
    cache, state = decode(
        model, params, cache, state, sampling=sampling, num_steps=until_fork
    )
    size = cache.block_size
    print(f"{len(prompt)} prompt tokens in blocks of {size}; after the fork")
    for i, seq_id in enumerate(np.asarray(state.seq_ids)):
        blocks = np.asarray(jkv.block_ids(cache, int(seq_id)))
        print(f"  sample {i}: blocks", *blocks[blocks < cache.num_blocks])

    most = np.int32(num_new)
    cache, state = decode(
        model, params, cache, state, sampling=sampling, num_steps=most
    )
    for i, tokens in enumerate(np.asarray(state.result.tokens)):
        print(f"\n--- sample {i}\n{tokenizer.decode(tokens[tokens >= 0].tolist())}")

    # The last token of a sequence is not in the cache.
    lengths = len(prompt) + np.asarray(state.result.lengths) - 1
    apart = int(np.sum(-(-lengths // size)))
    peak = int(state.result.statistics.peak_blocks)
    saved = f"{1 - peak / apart:.0%} saved"
    print(f"\n{peak} blocks at the peak, {apart} without sharing: {saved}")
    print(f"{jkv.num_free_blocks(cache)} of {cache.num_blocks} blocks free at the end")


if __name__ == "__main__":
    with errors_in_one_line():
        main()
