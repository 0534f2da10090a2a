"""The command line of `generate.py`."""

import argparse
from pathlib import Path

from .arguments import Parser, add_stored_dtypes, at_least

BUNDLED = Path(__file__).parents[1] / "models" / "pydoc"

# Of the fields of `jkv.Sampling`, unless the checkpoint or the command line says more.
SAMPLING = dict(
    temperature=0.7, top_k=0, top_p=0.95, min_p=0.0, repetition_penalty=1.1, seeds=0
)


def parse_arguments(description: str) -> argparse.Namespace:
    """Return the options; the `SAMPLING` ones are None unless given."""
    parser = Parser(description, prog="generate.py")
    add = parser.add_argument
    add("prompts", nargs="*", help="texts to continue; without any, an example")
    add("--file", help="read prompts from here, one a line; - is standard input")
    add(
        "--model",
        default=BUNDLED,
        help="a Hugging Face folder or GGUF file",
    )
    add("--chat", action="store_true", help="prompts are questions in a chat")
    text, number = "of each text; %(default)s", at_least(1)
    add("--max-new-tokens", type=number, default=120, help=text)
    add("--stop", action="append", default=[], help="end a text before this; may recur")
    add("--num-samples", type=number, default=1, help="of each prompt; %(default)s")
    add("--json", action="store_true", help="print a line of JSON for each text")
    add_stored_dtypes(parser)
    add(
        "--tensor-parallel", type=number, default=1, help="devices that share the model"
    )
    add("--scan-layers", action="store_true", help="compile faster, compute slower")
    for name, value in SAMPLING.items():
        text = f"as in jkv.Sampling; generation_config.json's, else {value}"
        add(f"--{name.replace('_', '-')}", type=type(value), help=text)
    return parser.parse_args()
