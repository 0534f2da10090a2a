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
    """Return the options, checked before any process starts."""
    parser, number = Parser(doc, prog="multiprocess.py"), at_least(1)
    add = parser.add_argument
    add("prompts", nargs="*", type=text, default=PROMPTS, help="default: four examples")
    add("--state", required=True, help="a folder shared by all processes")
    add("--model", default=BUNDLED, help="a Hugging Face folder; default: bundled")
    add("--max-new-tokens", type=number, default=64, help="per prompt; %(default)s")
    add("--save-every", type=number, default=16, help="steps; %(default)s")
    add("--num-processes", type=number, default=2, help="%(default)s")
    help_text = "devices that shard the model; default: those of a process"
    add("--tensor-parallel", type=number, help=help_text)
    add_membership(parser, devices=2)
    options = parser.parse_args()
    if problem := find_problem(options):
        parser.error(problem)
    return options


def add_membership(parser: argparse.ArgumentParser, devices: int) -> None:
    """Add the options for joining other processes and for launching them."""
    add, number = parser.add_argument, at_least(1)
    help_text = "simulated devices per process, %(default)s; 0 uses real devices"
    add("--devices", type=at_least(0), default=devices, help=help_text)
    add("--restarts", type=at_least(0), default=0, help="after a failure; %(default)s")
    help_text = "seconds without a heartbeat until a process counts as dead"
    add("--heartbeat", type=number, default=10, help=f"{help_text}; %(default)s")
    help_text = "host:port of process 0, or auto; default: start all processes here"
    add("--coordinator", type=address, help=help_text)
    add("--process", type=at_least(0), help="index of this process, from 0")


def find_problem(options: argparse.Namespace) -> str | None:
    """Return an error message for inconsistent options, or None."""
    if problem := find_wrong_membership(options):
        return problem
    devices = options.num_processes * options.devices
    if options.tensor_parallel and devices % options.tensor_parallel:
        return f"--tensor-parallel must divide the {devices} devices"
    if not Path(options.model, "config.json").is_file():
        return f"--model {options.model} has no config.json"
    return None


def find_wrong_membership(options: argparse.Namespace) -> str | None:
    """Return an error message for inconsistent options of `add_membership`, or None."""
    is_by_hand = options.coordinator not in (None, "auto")
    if is_by_hand != (options.process is not None):
        return "--process N goes with --coordinator HOST:PORT, and only with it"
    if is_by_hand and options.process >= options.num_processes:
        return f"--process must be below --num-processes {options.num_processes}"
    return None


def address(given: str) -> str:
    """Parse the address of process 0."""
    port = re.fullmatch(r"[^\s:]+:(\d+)|\[[\da-fA-F:.]+\]:(\d+)", given)
    if given == "auto" or (port and int(port[1] or port[2]) < 2**16):
        return given
    raise argparse.ArgumentTypeError(f"must be host:port or auto, got {given}")
