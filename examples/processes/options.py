"""The command line of `multiprocess.py`."""

import argparse

from generating.options import BUNDLED

PROMPTS = (
    "The with statement is used to",
    "A list comprehension",
    "The difference between a tuple and a list",
    "import os",
)


def parse_arguments(description: str) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="multiprocess.py", description=description)
    add = parser.add_argument
    add("prompts", nargs="*", default=PROMPTS, help="texts to continue")
    add("--state", required=True, help="a folder that all processes can read")
    add("--model", default=BUNDLED, help="a Hugging Face folder; the bundled model")
    add("--max-new-tokens", type=int, default=64, help="of each text; %(default)s")
    add("--save-every", type=int, default=16, help="steps; %(default)s")
    add("--num-processes", type=int, default=2, help="%(default)s")
    text = "simulated in each process, %(default)s; 0 takes those that are there"
    add("--devices", type=int, default=2, help=text)
    text = "devices that share the model; default those of one process"
    add("--tensor-parallel", type=int, help=text)
    add("--restarts", type=int, default=0, help="after a failure; %(default)s")
    text = "seconds without a sign of life after which a process counts as dead"
    add("--heartbeat", type=int, default=10, help=f"{text}; %(default)s")
    text = "host:port of process 0, or auto; without it, this starts all processes"
    add("--coordinator", help=text)
    add("--process", type=int, help="which one this is, from 0")
    return parser.parse_args()
