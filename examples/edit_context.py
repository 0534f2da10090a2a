"""Remove a tool result and a reasoning span from the middle of an agent's context.

    python examples/edit_context.py [--model path/to/checkpoint]

Each edit is one call of `jkv.prune`. The kept tokens are not recomputed, so the next
token costs one step. Results may differ from recomputing the shorter context, since the
kept tokens attended to the removed ones; the script prints both.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
from generating.arguments import Parser, at_least
from generating.exiting import answering_errors, errors_in_one_line
from generating.options import BUNDLED

import jkv

# The context: spans by name, in order.
CONTEXT = {
    "task": "Return the number of lines in a file. ",
    "reasoning": "First open the file. Then read the lines, and count each of them. ",
    "tool result": "The file has a first line, a second line and a last line. " * 6,
    "answer": "The number of lines in the file is the length of the list. ",
}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--model", default=BUNDLED, help="a Hugging Face folder")
    parser.add_argument("--new-tokens", type=at_least(1), default=12)
    options = parser.parse_args()
    with answering_errors():
        edit(options)


def edit(options):
    model, params = pretrained.load(options.model)
    tokenizer = pretrained.load_tokenizer(options.model)
    encoded = {
        name: tokenizer.encode(text, add_special_tokens=False).ids
        for name, text in CONTEXT.items()
    }
    length = sum(map(len, encoded.values()))
    config = model.cache_config(
        length + options.new_tokens,
        max_sequences=2,
        dtype=params["embedding"].dtype,
        pruning=True,
    )
    cache, opened = jkv.allocate(jkv.init(config), [0, 0])
    extend = partial(jkv.extend, model, max_new_tokens=options.new_tokens)
    extend = jax.jit(extend, donate_argnames="cache")
    prune = jax.jit(jkv.prune, donate_argnames="cache")

    def go_on(cache, seq_id, tokens):
        """Generate greedily from a sequence, then truncate it to its old length."""
        given = np.full((1, length), -1, np.int32)
        given[0, : len(tokens)] = tokens
        before = int(jkv.context_lengths(cache)[seq_id])
        cache, found = extend(params, cache=cache, seq_ids=[seq_id], tokens=given)
        cache, _ = jkv.truncate(cache, seq_id, before)
        return cache, tokenizer.decode(found.tokens[0].tolist())

    # The last token is recomputed with each completion, since it needs logits.
    spans, last = dict(encoded), encoded["answer"].pop()
    edited, fresh = opened.seq_ids.tolist()
    tokens = [token for span in spans.values() for token in span]
    cache, _ = jkv.extend(
        model, params, cache, [edited], [tokens], max_new_tokens=1, chunk_size=64
    )
    # Compile with a padding request.
    cache, _ = prune(cache, [jkv.NO_SEQUENCE], jnp.zeros((1, length), jnp.int32), [0])
    for name in ("tool result", "reasoning"):
        start = 0
        for other, span in spans.items():
            if other == name:
                break
            start += len(span)
        stop, end = (
            start + len(spans.pop(name)),
            int(jkv.context_lengths(cache)[edited]),
        )
        kept = [*range(start), *range(stop, end)]
        padded = jnp.asarray([np.pad(kept, (0, length - len(kept)))])
        began = time.perf_counter()
        cache, status = prune(cache, [edited], padded, [len(kept)])
        jkv.raise_for_status(jax.block_until_ready(status))
        seconds = time.perf_counter() - began
        tokens = [token for span in spans.values() for token in span]
        print(
            f"without the {name}: {end} -> {len(kept)} tokens, {1e3 * seconds:.0f} ms"
        )
        cache, text = go_on(cache, edited, [last])
        print(f"  edited      {text!r}")
        cache, text = go_on(cache, fresh, [*tokens, last])
        print(f"  recomputed  {text!r}")
    print(f"next position {int(jkv.next_positions(cache)[edited])} of {length} tokens")


if __name__ == "__main__":
    with errors_in_one_line():
        main()
