"""The command line of `multiprocess.py`."""

import argparse
import re
from pathlib import Path

from generating.arguments import Parser, at_least, text
from generating.options import BUNDLED

PROMPTS = (
    "The with statement is used to",
    "A list comprehension",
    "The difference between a tuple and a list",
    "import os",
)


def parse_arguments(doc: str | None) -> argparse.Namespace:
    """Return the options, checked before a process is started."""
    parser, number = Parser(doc, prog="multiprocess.py"), at_least(1)
    add = parser.add_argument
    add("prompts", nargs="*", type=text, default=PROMPTS, help="texts to continue")
    add("--state", required=True, help="a folder that all processes can read")
    add("--model", default=BUNDLED, help="a Hugging Face folder; the bundled model")
    add("--max-new-tokens", type=number, default=64, help="of each text; %(default)s")
    add("--save-every", type=number, default=16, help="steps; %(default)s")
    add("--num-processes", type=number, default=2, help="%(default)s")
    said = "devices that share the model; default those of one process"
    add("--tensor-parallel", type=number, help=said)
    add_membership(parser, devices=2)
    options = parser.parse_args()
    if problem := find_problem(options):
        parser.error(problem)
    return options


def add_membership(parser: argparse.ArgumentParser, devices: int) -> None:
    """Add a process's options about the others, and the launcher of them all."""
    add, number = parser.add_argument, at_least(1)
    said = "simulated in each process, %(default)s; 0 takes those that are there"
    add("--devices", type=at_least(0), default=devices, help=said)
    add("--restarts", type=at_least(0), default=0, help="after a failure; %(default)s")
    said = "seconds without a sign of life after which a process counts as dead"
    add("--heartbeat", type=number, default=10, help=f"{said}; %(default)s")
    said = "host:port of process 0, or auto; without it, this starts all processes"
    add("--coordinator", type=address, help=said)
    add("--process", type=at_least(0), help="which one this is, from 0")


def find_problem(options: argparse.Namespace) -> str | None:
    """Say which options do not go together."""
    if problem := find_wrong_membership(options):
        return problem
    devices = options.num_processes * options.devices
    if options.tensor_parallel and devices % options.tensor_parallel:
        return f"--tensor-parallel must divide the {devices} devices"
    if not Path(options.model, "config.json").is_file():
        return f"--model {options.model} has no config.json"
    return None


def find_wrong_membership(options: argparse.Namespace) -> str | None:
    """Say which options of `add_membership` do not go together."""
    is_by_hand = options.coordinator not in (None, "auto")
    if is_by_hand != (options.process is not None):
        return "--process N goes with --coordinator HOST:PORT, and only with it"
    if is_by_hand and options.process >= options.num_processes:
        return f"--process must be below --num-processes {options.num_processes}"
    return None


def address(given: str) -> str:
    """Read where process 0 listens."""
    port = re.fullmatch(r"[^\s:]+:(\d+)|\[[\da-fA-F:.]+\]:(\d+)", given)
    if given == "auto" or (port and int(port[1] or port[2]) < 2**16):
        return given
    raise argparse.ArgumentTypeError(f"must be host:port or auto, got {given}")
