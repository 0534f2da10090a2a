"""The command line of `generate.py`."""

import argparse
from pathlib import Path

from .arguments import Parser, add_stored_dtypes, at_least

BUNDLED = Path(__file__).parents[1] / "models" / "pydoc"

# Defaults, if neither the command line nor the checkpoint has a value.
SAMPLING = dict(
    temperature=0.7, top_k=0, top_p=0.95, min_p=0.0, repetition_penalty=1.1, seeds=0
)


def parse_arguments(description: str) -> argparse.Namespace:
    """Return the options; fields of `SAMPLING` are None if omitted."""
    parser = Parser(description, prog="generate.py")
    add = parser.add_argument
    add("prompts", nargs="*", help="prompts; default: an example")
    add("--file", help="read prompts from a file, one per line; - is stdin")
    add(
        "--model",
        default=BUNDLED,
        help="a Hugging Face folder or GGUF file",
    )
    add("--chat", action="store_true", help="prompts are messages of a chat")
    text, number = "of each text; %(default)s", at_least(1)
    add("--max-new-tokens", type=number, default=120, help=text)
    add("--stop", action="append", default=[], help="stop string; repeatable")
    add("--num-samples", type=number, default=1, help="per prompt; %(default)s")
    add("--json", action="store_true", help="print a line of JSON per completion")
    add_stored_dtypes(parser)
    add(
        "--tensor-parallel",
        type=number,
        default=1,
        help="devices that shard the model",
    )
    add("--scan-layers", action="store_true", help="compile faster, run slower")
    for name, value in SAMPLING.items():
        text = f"as in jkv.Sampling; generation_config.json's, else {value}"
        add(f"--{name.replace('_', '-')}", type=type(value), help=text)
    return parser.parse_args()
