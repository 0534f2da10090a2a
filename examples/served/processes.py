"""A server on several processes: the first answers clients, the others compute along.

    python examples/serve_http.py --processes 2 --devices 1

starts them here, with simulated devices; `--coordinator` and `--process` are for a
process on each host (`examples/multiprocess.py` says more).
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import Any

import jax
from generating.exiting import FAILED, answering_errors, end_now
from processes.joining import join, make_mesh
from processes.launching import launch
from processes.options import add_membership, find_wrong_membership

from jkv.serving import Engine, EngineError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of several processes to a command line."""
    add = parser.add_argument
    said = "processes that share the model; %(default)s"
    add("--processes", dest="num_processes", type=int, default=1, help=said)
    said = "where processes tell what they do; a new folder"
    add("--logs", dest="state", type=Path, help=said)
    add_membership(parser, devices=0)


def begin(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    listen: Callable[[], socket] | None = None,
) -> None:
    """Join the other processes; or start them, and end with them.

    Args:
        parser: of the command line.
        options: of it.
        listen: opens the socket for clients of the first process. It stays open while
            processes start again, so that clients wait instead of being refused.
    """
    if problem := find_wrong_membership(options):
        parser.error(problem)
    if options.coordinator is not None:
        join(options)
    elif options.num_processes > 1:
        options.state = options.state or Path(tempfile.mkdtemp(prefix="jkv-"))
        with answering_errors():
            listener = None if listen is None else listen()
        sys.exit(launch(options, listener))


def find_mesh(options: argparse.Namespace) -> jax.sharding.Mesh | None:
    """Return the mesh of all processes; None on one process alone."""
    if getattr(options, "coordinator", None) is None:
        return None
    return make_mesh(jax.device_count())


def is_follower() -> bool:
    """Return whether another process answers clients."""
    return jax.process_index() > 0


def follow(engine: Engine, read_weights: Callable[[], Any] | None = None) -> None:
    """Compute along until the first process ends.

    Args:
        engine: of this process.
        read_weights: reads this process's part of weights that are new.
    """
    find = None if read_weights is None else lambda: (read_weights(), None)
    try:
        engine.follow(find_params=find)
    except EngineError as error:
        # At once: the usual end of one of several processes would wait for the others.
        end_now(FAILED, f"error: {error}")
