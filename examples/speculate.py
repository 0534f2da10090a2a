"""Speculative decoding: the same text in fewer steps, several tokens verified at once.

    python examples/speculate.py --max-new-tokens 200 "The with statement"

The text is generated greedily three times: a token a step, with draft tokens looked up
in the text itself, and with draft tokens of a model of an eighth of the size, which
`train_draft.py` trained to predict the bundled model's tokens. The script shows the
text, and for each way the steps, the share of accepted draft tokens, and the time.
"""

import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pretrained
from generating.arguments import Parser, at_least, text
from generating.exiting import answering_errors, errors_in_one_line

import jkv
from jkv import DraftModel, PromptLookup

BUNDLED = Path(__file__).parent / "models" / "pydoc"
DRAFT = Path(__file__).parent / "models" / "pydoc_draft"
PROMPT = """The with statement

The "with" statement is used to wrap the execution of a block with methods defined by a
context manager. This allows common "try"..."except"..."finally" usage patterns to be
encapsulated for convenient reuse.

The "with" statement is used to wrap the execution of a block with methods defined by"""

WAYS = ("plain", "looked-up", "drafted")

generate = jkv.jitted.generate


def make_cache(model, params, length, most_guesses):
    """Return a cache for one text that can roll back `most_guesses` tokens."""
    fields = dict(max_sequences=1, dtype=params["embedding"].dtype)
    return jkv.init(model.cache_config(length, max_pending=most_guesses, **fields))


def main():
    parser = Parser(__doc__)
    parser.add_argument("prompt", nargs="?", type=text, default=PROMPT)
    parser.add_argument("--model", default=BUNDLED, help="a Hugging Face folder")
    parser.add_argument("--draft", default=DRAFT, help="one of the same vocabulary")
    number = at_least(1)
    parser.add_argument("--draft-tokens", type=number, default=4, help="per step")
    parser.add_argument("--max-new-tokens", type=number, default=128)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    jkv.keep_compiled_programs()
    with answering_errors():
        show(options)


def show(options):
    """Generate in three ways, and print the text and each way's steps and time."""
    model, params = pretrained.load(options.model)
    drafter, draft_params = pretrained.load(options.draft)
    tokenizer = pretrained.load_tokenizer(options.model)
    prompt = tokenizer.encode(options.prompt).ids
    length = len(prompt) + options.max_new_tokens
    if length > min(m.config.max_context_length for m in (model, drafter)):
        raise ValueError(f"{length} tokens do not fit the models' contexts")
    lookup = PromptLookup()
    most = max(options.draft_tokens, lookup.num_tokens)
    ways = {
        "plain": None,
        "looked-up": lookup,
        "drafted": DraftModel(
            model=drafter,
            params=draft_params,
            cache=make_cache(drafter, draft_params, length, most),
            num_tokens=options.draft_tokens,
        ),
    }
    cache, texts, lines = make_cache(model, params, length, most), [], []
    for name in options.ways:
        for _ in range(2):  # the first one compiles
            began = time.perf_counter()
            cache, result = generate(
                model,
                params,
                cache,
                jnp.array([prompt], jnp.int32),
                max_new_tokens=options.max_new_tokens,
                stop_tokens=model.config.stop_tokens,
                speculate=ways[name],
            )
            texts.append(np.asarray(result.tokens[0, : result.lengths[0]]).tolist())
            seconds = time.perf_counter() - began
        counts = result.statistics
        right = (
            f"{counts.accepted_tokens} of {counts.draft_tokens} draft tokens accepted"
        )
        speed = f"{len(texts[-1]) / seconds:4.0f} tokens/s"
        lines.append(f"{name:10} {counts.num_steps:4} steps  {speed}  {right}")

    print(f"{options.prompt}[{tokenizer.decode(texts[0])}]\n")
    print("\n".join(lines))
    if len(options.ways) > 1:
        same = all(text == texts[0] for text in texts)
        print("the texts are the same" if same else "the texts differ by a rounding")


if __name__ == "__main__":
    with errors_in_one_line():
        main()
