"""Serve one model from several processes: the first process answers clients.

    python examples/serve_http.py --processes 2 --devices 1

starts local processes with simulated devices. `--coordinator` and `--process` start one
process per host (see `examples/multiprocess.py`).
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
    """Add the options for several processes."""
    add = parser.add_argument
    help_text = "number of processes that shard the model; %(default)s"
    add("--processes", dest="num_processes", type=int, default=1, help=help_text)
    help_text = "folder for their logs; default: a new folder"
    add("--logs", dest="state", type=Path, help=help_text)
    add_membership(parser, devices=0)


def begin(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    listen: Callable[[], socket] | None = None,
) -> None:
    """Join the other processes, or start them and exit when they exit.

    Args:
        parser: the command line's parser.
        options: the parsed options.
        listen: returns the socket of the first process. It stays open while processes
            restart, so that clients wait instead of being refused.
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
    """Return a mesh of the devices of all processes; None for a single process."""
    if getattr(options, "coordinator", None) is None:
        return None
    return make_mesh(jax.device_count())


def is_follower() -> bool:
    """Return True if another process answers clients."""
    return jax.process_index() > 0


def follow(engine: Engine, read_weights: Callable[[], Any] | None = None) -> None:
    """Run the first process's steps until it exits.

    Args:
        engine: this process's engine.
        read_weights: returns this process's shards of new parameters.
    """
    find = None if read_weights is None else lambda: (read_weights(), None)
    try:
        engine.follow(find_params=find)
    except EngineError as error:
        # A normal exit of one of several processes would wait for the others.
        end_now(FAILED, f"error: {error}")
