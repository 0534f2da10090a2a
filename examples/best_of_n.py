"""Best-of-n sampling by mean log-probability or majority vote.

    python examples/best_of_n.py --samples 8 "The with statement"
    python examples/best_of_n.py --by majority --answer '\\b(\\w+)\\.' "A tuple is"

Each prompt is computed once. Its samples share the prompt's blocks (`fork`) and
allocate their own as they grow. By majority (self-consistency), each sample votes with
the first match of `--answer` in its completion, or with the whole completion.
"""

from pathlib import Path

import jax
import numpy as np
import pretrained
from generating.arguments import Parser, at_least, pattern, text
from generating.exiting import answering_errors, errors_in_one_line
from generating.prompts import pad

import jkv
from jkv.decoding import select_best

BUNDLED = Path(__file__).parent / "models" / "pydoc"
PROMPTS = [
    'The with statement\n\nThe "with" statement is used to wrap the execution of a '
    "block with methods defined by a context manager. This allows usage patterns to be",
    "Dictionaries\n\nA dictionary maps keys to values. Keys must be hashable, and "
    "values may be anything. Two dictionaries compare equal if and only if they",
]

# Rows per step, for prompts and decoding alike: one shape, one compilation.
ROWS = 32

generate = jkv.jitted.generate
choose = jax.jit(select_best, static_argnames=("num_samples", "by"))


def main():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("prompts", nargs="*", type=text, default=PROMPTS)
    add("--model", default=BUNDLED, help="a Hugging Face folder; default: bundled")
    add("--samples", type=at_least(1), default=8, help="per prompt; %(default)s")
    add("--max-new-tokens", type=at_least(1), default=48)
    add("--temperature", type=at_least(0, float), default=0.9)
    add("--by", choices=["mean_logprob", "majority"], default="mean_logprob")
    add("--answer", type=pattern, help="regular expression of the answer to vote on")
    options = parser.parse_args()
    jkv.keep_compiled_programs()
    with answering_errors():
        show(options)


def show(options):
    """Generate, and print the best completions with their log-probabilities."""
    model, params = pretrained.load(options.model)
    tokenizer = pretrained.load_tokenizer(options.model)
    prompts = [tokenizer.encode(text).ids for text in options.prompts]
    num_sequences = len(prompts) * options.samples
    config = model.cache_config(
        max(map(len, prompts)) + options.max_new_tokens,
        max_sequences=num_sequences,
        dtype=params["embedding"].dtype,
    )
    cache, result = generate(
        model,
        params,
        jkv.init(config),
        pad(prompts, model.config.max_context_length),
        max_new_tokens=options.max_new_tokens,
        num_samples=options.samples,
        row_counts=(max(ROWS, num_sequences),),
        stop_tokens=np.array(model.config.stop_tokens, np.int32),
        sampling=jkv.Sampling(temperature=options.temperature, top_p=0.95, seeds=1),
    )
    lengths, tokens = np.asarray(result.lengths), np.asarray(result.tokens)
    rows = zip(tokens, lengths, strict=True)
    texts = [tokenizer.decode(row[:length].tolist()) for row, length in rows]
    answers = find_answers(texts, options.answer)
    best = choose(result, options.samples, by=options.by, answers=answers)
    means = np.asarray(result.logprobs).sum(axis=1) / np.maximum(lengths, 1)
    for i, row in enumerate(best.tolist()):
        samples = slice(i * options.samples, (i + 1) * options.samples)
        votes = int(np.sum(answers[samples] == answers[row]))
        print(f"--- prompt {i}: sample {row - samples.start}", end="")
        print(f", mean log-probability {means[row]:.2f} of", end=" ")
        print(*(f"{mean:.2f}" for mean in means[samples]), end="; ")
        print(f"{votes} of {options.samples} votes\n{options.prompts[i]}{texts[row]}\n")
    # The last token of a sequence is not in the cache.
    whole = np.repeat([len(ids) for ids in prompts], options.samples) + lengths - 1
    blocks = int(np.sum(-(-whole // cache.block_size)))
    peak = int(result.statistics.peak_blocks)
    print(f"{peak} blocks at the peak, {blocks} if each sample had its own prompt")


def find_answers(texts, pattern):
    """Number the distinct answers, i32[N]; -1 marks a completion without an answer."""
    answers = list(texts)
    if pattern:
        matches = [pattern.search(text) for text in texts]
        answers = [m.group(m.lastindex or 0) if m else None for m in matches]
    names = list(dict.fromkeys(answer for answer in answers if answer is not None))
    return np.array([-1 if a is None else names.index(a) for a in answers], np.int32)


if __name__ == "__main__":
    with errors_in_one_line():
        main()
