"""The same text in fewer steps: tokens are guessed, and checked several at a time.

    python examples/speculate.py --max-new-tokens 200 "The with statement"

The text is generated greedily three times: a token a step, with guesses looked up in
the text itself, and with guesses drafted by the first layers of the same model. The
script shows the text, and for each way the steps, the share of guesses that were right,
and the time.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pretrained

import jkv
from jkv.commands.compiled_programs import keep_compiled_programs
from jkv.decoding import DraftModel, PromptLookup

BUNDLED = Path(__file__).parent / "models" / "pydoc"
PROMPT = """The with statement

The "with" statement is used to wrap the execution of a block with methods defined by a
context manager. This allows common "try"..."except"..."finally" usage patterns to be
encapsulated for convenient reuse.

The "with" statement is used to wrap the execution of a block with methods defined by"""

generate = jax.jit(
    jkv.generate, static_argnames=("model", "max_new_tokens"), donate_argnames="cache"
)


def first_layers(model, params, num_layers):
    """A model of the first layers of another, with the same head."""
    old = model.config
    windows, ropes = old.windows[:num_layers], old.ropes[:num_layers]
    config = dataclasses.replace(
        old, num_layers=num_layers, windows=windows, ropes=ropes
    )
    first = jax.tree.map(lambda weights: weights[:num_layers], params["layers"][0])
    return dataclasses.replace(model, config=config), dict(params, layers=[first])


def make_cache(model, params, length):
    """A cache for one text."""
    fields = dict(max_sequences=1, dtype=params["embedding"].dtype)
    fields |= model.cache_fields
    return jkv.init(jkv.CacheConfig.for_context_length(length, **fields))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--model", default=BUNDLED, help="a Hugging Face folder")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--draft-layers", type=int, default=2)
    options = parser.parse_args()
    keep_compiled_programs()
    try:
        model, params = pretrained.load(options.model)
        tokenizer = pretrained.load_tokenizer(options.model)
        prompt = tokenizer.encode(options.prompt).ids
        length = len(prompt) + options.max_new_tokens
        if not prompt or options.max_new_tokens < 1:
            raise ValueError("the prompt and the number must be at least 1 long")
        if not 1 <= options.draft_layers <= model.config.runs[0].stop:
            raise ValueError(
                "--draft-layers must be among the model's first ones alike"
            )
        if length > model.config.max_context_length:
            raise ValueError(f"{length} tokens do not fit the model's context")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")

    drafter, draft_params = first_layers(model, params, options.draft_layers)
    ways = {
        "a token a step": None,
        "looked up": PromptLookup(),
        f"drafted by {options.draft_layers} layers": DraftModel(
            model=drafter,
            params=draft_params,
            cache=make_cache(drafter, draft_params, length),
        ),
    }
    cache, texts, lines = make_cache(model, params, length), [], []
    for name, speculate in ways.items():
        for _ in range(2):  # the first one compiles
            began = time.perf_counter()
            cache, result = generate(
                model,
                params,
                cache,
                jnp.array([prompt], jnp.int32),
                max_new_tokens=options.max_new_tokens,
                stop_tokens=model.config.stop_tokens,
                speculate=speculate,
            )
            texts.append(np.asarray(result.tokens[0, : result.lengths[0]]).tolist())
            seconds = time.perf_counter() - began
        counts = result.statistics
        right = f"{counts.accepted_tokens} of {counts.draft_tokens} guesses right"
        speed = f"{len(texts[-1]) / seconds:4.0f} tokens/s"
        lines.append(f"{name:20} {counts.num_steps:4} steps  {speed}  {right}")

    print(f"{options.prompt}[{tokenizer.decode(texts[0])}]\n")
    print("\n".join(lines))
    same = all(text == texts[0] for text in texts)
    print("the texts are the same" if same else "the texts differ by a rounding")


if __name__ == "__main__":
    main()
