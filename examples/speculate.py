"""Speculative decoding: generate the same tokens in fewer steps.

    python examples/speculate.py --max-new-tokens 200 "The with statement"

The script decodes greedily three times: one token per step, with draft tokens from
prompt lookup, and with draft tokens from a model of an eighth of the size, trained by
`train_draft.py` to predict the bundled model's tokens. It prints the completion and,
for each method, the number of steps, the acceptance rate and the speed.
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


def find_config(model, params, length, most_guesses):
    """Return the configuration for one sequence and `most_guesses` draft tokens."""
    fields = dict(max_sequences=1, dtype=params["embedding"].dtype)
    return model.cache_config(length, max_pending=most_guesses, **fields)


def main():
    parser = Parser(__doc__)
    parser.add_argument("prompt", nargs="?", type=text, default=PROMPT)
    parser.add_argument("--model", default=BUNDLED, help="a Hugging Face folder")
    parser.add_argument("--draft", default=DRAFT, help="the draft model")
    number = at_least(1)
    parser.add_argument("--draft-tokens", type=number, default=4, help="per step")
    parser.add_argument("--max-new-tokens", type=number, default=128)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    jkv.keep_compiled_programs()
    with answering_errors():
        show(options)


def show(options):
    """Generate with each method; print the completion, the steps and the speed."""
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
            config=find_config(drafter, draft_params, length, most),
            num_tokens=options.draft_tokens,
        ),
    }
    sequences, lines = [], []
    for name in options.ways:
        config = find_config(model, params, length, most)
        if ways[name] is not None:
            config = jkv.with_drafter(config, ways[name])
        cache = jkv.init(config)
        for _ in range(2):  # the first run compiles
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
            sequences.append(np.asarray(result.tokens[0, : result.lengths[0]]).tolist())
            seconds = time.perf_counter() - began
        counts = result.statistics
        right = (
            f"{counts.accepted_tokens} of {counts.draft_tokens} draft tokens accepted"
        )
        speed = f"{len(sequences[-1]) / seconds:4.0f} tokens/s"
        lines.append(f"{name:10} {counts.num_steps:4} steps  {speed}  {right}")

    print(f"{options.prompt}[{tokenizer.decode(sequences[0])}]\n")
    print("\n".join(lines))
    if len(options.ways) > 1:
        same = all(sequence == sequences[0] for sequence in sequences)
        print("the texts are the same" if same else "the texts differ by a rounding")


if __name__ == "__main__":
    with errors_in_one_line():
        main()
