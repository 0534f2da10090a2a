"""Continue prompts with a checkpoint of the Llama family on a paged cache.

    python examples/generate.py "The with statement" --temperature 0.8 --seeds 3
    python examples/generate.py --file prompts.txt --model FOLDER

Prompts are arguments or lines of a file; one is streamed, several run as one batch.
"""

import argparse
import functools
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import llama
import numpy as np
from rich.console import Console
from rich.progress import Progress

import jkv
from jkv import decoding

BUNDLED = Path(__file__).parent / "models" / "pydoc"
FILTERS = dict(top_k=0, top_p=0.95, min_p=0.0, repetition_penalty=1.1)
SAMPLING = dict(temperature=0.7, seeds=0, **FILTERS)

# The two halves of `jkv.generate`, so that the host sees the tokens between steps.
static, donated = ("model", "max_new_tokens"), ("cache", "state")
prefill = jax.jit(decoding.prefill, static_argnames=static, donate_argnames="cache")
decode = jax.jit(decoding.decode, static_argnames="model", donate_argnames=donated)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("prompts", nargs="*", help="texts to continue; without any, an example")
    add("--file", help="read prompts from here, one a line; - is standard input")
    add("--model", default=BUNDLED, help="a Hugging Face folder; the bundled model")
    add("--max-new-tokens", type=int, default=120)
    add("--kv-dtype", help="of the cache, such as int8 or fp8; the model's")
    for name, value in SAMPLING.items():
        flag, text = f"--{name.replace('_', '-')}", f"as in jkv.Sampling; {value}"
        add(flag, type=type(value), default=value, help=text)
    return parser.parse_args()


def prepare(options):
    """Read prompts and model, and make the cache."""
    texts = list(options.prompts)
    if options.file:
        with sys.stdin if options.file == "-" else open(options.file) as source:
            texts += source.read().splitlines()
    texts = texts or ["The with statement is used to"]
    if not all(text.strip() for text in texts) or options.max_new_tokens < 1:
        raise ValueError("a prompt is empty, or --max-new-tokens below 1")
    model, params = llama.load(options.model)
    tokenizer = llama.load_tokenizer(options.model)
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    longest, context = max(map(len, prompts)), model.config.max_context_length
    if longest > context:
        raise ValueError(f"a prompt has {longest} tokens, the context is {context}")
    dtype = options.kv_dtype or params["embedding"].dtype
    sizes = dict(dtype=dtype, max_sequences=len(prompts))
    length = min(context, longest + options.max_new_tokens)
    config = jkv.CacheConfig.for_context_length(length, **sizes, **model.cache_fields)
    padded = np.array([p + [-1] * (longest - len(p)) for p in prompts], np.int32)
    return model, params, tokenizer, jkv.init(config), padded


def show(tokenizer, prompts, state, shown=""):
    """Print what has come since `shown`; return the whole."""
    rows = np.concatenate([prompts, state.result.tokens], axis=1)
    texts = tokenizer.decode_batch([row[row >= 0].tolist() for row in rows])
    text = "\n\n---\n\n".join(texts).rstrip("\ufffd")  # half a character, so far
    print(text.removeprefix(shown), end="", flush=True)
    return text


def main():
    options, console, shown = parse_arguments(), Console(stderr=True), ""
    try:
        model, params, tokenizer, cache, prompts = prepare(options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    sampling = jkv.Sampling(**{name: getattr(options, name) for name in SAMPLING})
    stop_tokens = jnp.array(model.config.stop_tokens, jnp.int32)
    ends = dict(max_new_tokens=options.max_new_tokens, stop_tokens=stop_tokens)
    advance = functools.partial(decode, model, params, sampling=sampling)
    opening, alone = time.perf_counter(), len(prompts) == 1
    with console.status("compiling, and reading the prompts"):
        cache, state = prefill(model, params, cache, prompts, sampling=sampling, **ends)
        cache, state = advance(cache, state, num_steps=1)
        num_first, start = int(state.result.lengths.sum()), time.perf_counter()
    with Progress(console=console, transient=True, disable=alone) as bar:
        task = bar.add_task("tokens", total=len(prompts) * options.max_new_tokens)
        while state.is_running.any():
            # Fewer steps a call show text sooner, more spend less time between calls.
            cache, state = advance(cache, state, num_steps=4)
            bar.update(task, completed=int(state.result.lengths.sum()))
            shown = show(tokenizer, prompts, state, shown) if alone else ""
    seconds = time.perf_counter() - start
    show(tokenizer, prompts, state, shown)

    tokens, statistics = int(state.result.lengths.sum()), state.result.statistics
    empty = statistics.internal_fragmentation(cache.block_size)
    reasons = [decoding.FinishReason(n).name for n in np.asarray(state.result.reasons)]
    print(
        f"\n\n{tokens} tokens, {(tokens - num_first) / seconds:.0f} tokens/s after "
        f"{start - opening:.1f} s; {cache.num_blocks - jkv.num_free_blocks(cache)} of "
        f"{cache.num_blocks} blocks in use, {statistics.peak_blocks} at the peak, "
        f"{empty:.0%} of their slots empty; ended by {', '.join(reasons)}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
