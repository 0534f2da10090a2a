"""Compare KV cache quantization formats: perplexity, memory and token capacity.

    python examples/formats.py
    python examples/formats.py --model FOLDER_OR_GGUF --text FILE --max-tokens 3000

The model scores a text once per cache format. Weights and arithmetic are float32, so
only the cache differs. The small bundled model loses almost nothing with any format:
measure your own model, on texts as in your workload.
"""

import pathlib

import jax.numpy as jnp
import pretrained
from generating.arguments import Parser, at_least
from generating.exiting import answering_errors, errors_in_one_line
from generating.options import BUNDLED

import jkv

README = pathlib.Path(__file__).parents[1] / "README.md"


def main() -> None:
    """Measure the formats and print a table."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--model",
        type=pathlib.Path,
        default=BUNDLED,
        help="a Hugging Face folder or GGUF file",
    )
    add("--text", type=pathlib.Path, default=README, help="a text file")
    add("--max-tokens", type=at_least(2), default=2000, help="%(default)s")
    add("--max-sequences", type=at_least(1), default=64, help="%(default)s")
    options = parser.parse_args()
    jkv.keep_compiled_programs()
    with answering_errors():
        model, params = pretrained.load(options.model, jnp.float32)
        tokenizer = pretrained.load_tokenizer(options.model)
        tokens = tokenizer.encode(options.text.read_text()).ids[: options.max_tokens]
        length = min(len(tokens), model.config.max_context_length)
        sizes = dict(max_sequences=options.max_sequences, dtype=jnp.bfloat16)
        config = model.cache_config(length, **sizes)
        found = jkv.measure_formats(model, params, tokens, config)
    print(f"{len(tokens)} tokens; {config.storage_bytes:,} bytes of keys and values\n")
    print(f"{'keys and values':24} perplexity   ratio   same token  bytes   tokens")
    for each in found:
        print(
            f"{each.name:24} {each.perplexity:10.3f} {each.ratio:7.4f} "
            f"{each.equal_tokens:11.2%} {each.bytes_per_token:7,} {each.num_tokens:,}"
        )


if __name__ == "__main__":
    with errors_in_one_line():
        main()
