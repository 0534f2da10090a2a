"""Beam search on shared blocks: the most likely completions of a prompt.

    python examples/beam_search.py --beams 4 "The with statement"

The beams of a prompt share the blocks of their common prefix; a beam that branches
copies only the partly filled block. The script prints the beams, best first, the result
of greedy decoding, and the peak number of blocks with and without sharing.
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
context manager. This allows"""

beam_search = jkv.jitted.beam_search


def main():
    parser = Parser(__doc__)
    parser.add_argument("prompt", nargs="?", type=text, default=PROMPT)
    parser.add_argument("--model", default=BUNDLED, help="a Hugging Face folder")
    parser.add_argument("--beams", type=at_least(1), default=6)
    parser.add_argument("--max-new-tokens", type=at_least(1), default=32)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    options = parser.parse_args()
    jkv.keep_compiled_programs()
    with answering_errors():
        model, params = pretrained.load(options.model)
        tokenizer = pretrained.load_tokenizer(options.model)
        prompt = tokenizer.encode(options.prompt).ids
        length = len(prompt) + options.max_new_tokens
        if length > model.config.max_context_length:
            raise ValueError(
                f"{length} tokens do not fit the context of "
                f"{model.config.max_context_length}"
            )

    cache = jkv.init(
        model.cache_config(
            length, max_sequences=options.beams, dtype=params["embedding"].dtype
        )
    )
    found = {}
    for num_beams in (1, options.beams):
        cache, found[num_beams] = beam_search(
            model,
            params,
            cache,
            np.array([prompt], np.int32),
            num_beams=num_beams,
            max_new_tokens=options.max_new_tokens,
            stop_tokens=model.config.stop_tokens,
            length_penalty=options.length_penalty,
            num_return=num_beams,
        )

    def show(title, result, i):
        tokens = np.asarray(result.tokens[0, i, : result.lengths[0, i]]).tolist()
        text = " ".join(tokenizer.decode(tokens).split())
        print(f"{title} {result.scores[0, i]:7.3f}  {text}")

    print(f"{options.prompt}\n")
    show("greedy", found[1], 0)
    best = found[options.beams]
    for i in range(options.beams):
        show(f"beam {i}", best, i)

    statistics = best.statistics
    shared, alone = statistics.peak_blocks, statistics.unshared_peak_blocks
    print(f"\n{len(prompt)} prompt tokens were computed once; ", end="")
    print(f"{statistics.forked_beams} times a beam went on from another's past")
    print(f"{shared} blocks of {cache.block_size} tokens at the peak; ", end="")
    print(f"copies of the cache would take {alone}: {1 - shared / alone:.0%} saved")
    print(f"{jkv.num_free_blocks(cache)} of {cache.num_blocks} blocks free at the end")


if __name__ == "__main__":
    with errors_in_one_line():
        main()
