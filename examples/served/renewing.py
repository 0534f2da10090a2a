"""A server reads its weights anew while it serves, when it gets the signal SIGUSR1."""

import argparse
import signal
import sys
import threading
from typing import Any

from jkv.serving import EngineError

from . import storing
from .loading import Served, read_model


def renew_when_asked(served: Served, options: argparse.Namespace) -> None:
    """On SIGUSR1, read the weights of `--model` anew, in a thread of its own.

    Requests that run go on with the new weights. Weights of another model are refused,
    and the old ones stay.
    """
    one_at_a_time = threading.Lock()

    def try_to_renew() -> None:
        try:
            with one_at_a_time:
                version = renew(served, options)
        except (OSError, ValueError, EngineError) as error:
            said = f"error: {error}; the weights are what they were"
            print(said, file=sys.stderr, flush=True)
        else:
            print(f"the weights are of version {version}", flush=True)

    def begin(*_: object) -> None:
        threading.Thread(target=try_to_renew, daemon=True).start()

    signal.signal(signal.SIGUSR1, begin)


def renew(served: Served, options: argparse.Namespace) -> int:
    """Compute with the weights that are in the folder now; return their number.

    Raises:
        OSError: when a file cannot be read.
        ValueError: when it is no checkpoint, or another model's, or is being written.
    """
    named = storing.name_weights(served.store, options.model)
    params = read_weights(options)
    if named != storing.name_weights(served.store, options.model):
        raise ValueError(f"{options.model} was changed while it was read")
    version = served.engine.update_params(params, store_version=named)
    if served.scorer is not None:
        served.scorer.params = params
    return version


def read_weights(options: argparse.Namespace) -> Any:
    """Read the weights that are in the folder now; each process has its own part.

    Raises:
        OSError: when a file cannot be read.
        ValueError: when it is no checkpoint.
    """
    return read_model(options)[1]
