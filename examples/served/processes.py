"""A server on several processes: the first answers clients, the others compute along.

    python examples/serve_http.py --processes 2 --devices 1

starts them here, with simulated devices; `--coordinator` and `--process` are for a
process on each host (`examples/multiprocess.py` says more).
"""

import argparse
import sys
import tempfile
from pathlib import Path

import jax
from generating.ending import FAILED, fail
from processes.joining import join, make_mesh
from processes.launching import launch
from processes.options import add_membership, find_wrong_membership

from jkv.serving import Engine, EngineError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what several processes take to a command line."""
    add = parser.add_argument
    said = "processes that share the model; %(default)s"
    add("--processes", dest="num_processes", type=int, default=1, help=said)
    said = "where processes tell what they do; a new folder"
    add("--logs", dest="state", type=Path, help=said)
    add_membership(parser, devices=0)


def begin(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Join the other processes; or start them, and end with them."""
    if problem := find_wrong_membership(options):
        parser.error(problem)
    if options.coordinator is not None:
        join(options)
    elif options.num_processes > 1:
        options.state = options.state or Path(tempfile.mkdtemp(prefix="jkv-"))
        sys.exit(launch(options))


def find_mesh(options: argparse.Namespace) -> jax.sharding.Mesh | None:
    """Return the mesh of all processes; None on one process alone."""
    if getattr(options, "coordinator", None) is None:
        return None
    return make_mesh(jax.device_count())


def is_follower() -> bool:
    """Return whether another process answers clients."""
    return jax.process_index() > 0


def follow(engine: Engine) -> None:
    """Compute along until the first process ends."""
    try:
        engine.follow()
    except EngineError as error:
        fail(FAILED, error)
