"""Reload the weights of a running server on the signal SIGUSR1."""

import argparse
import signal
import sys
import threading
from typing import Any

from jkv.serving import EngineError

from . import storing
from .loading import Served, read_model


def renew_on_signal(served: Served, options: argparse.Namespace) -> None:
    """Install a handler for SIGUSR1 that reloads the weights of `--model` in a thread.

    Running requests continue with the new weights. If they do not fit the model, an
    error is printed and the old weights stay.
    """
    one_at_a_time = threading.Lock()

    def try_to_renew() -> None:
        try:
            with one_at_a_time:
                version = renew(served, options)
        except (OSError, ValueError, EngineError) as error:
            message = f"error: {error}; the weights are what they were"
            print(message, file=sys.stderr, flush=True)
        else:
            print(f"the weights are of version {version}", flush=True)

    def begin(*_: object) -> None:
        threading.Thread(target=try_to_renew, daemon=True).start()

    signal.signal(signal.SIGUSR1, begin)


def renew(served: Served, options: argparse.Namespace) -> int:
    """Load the folder's current weights into the engine; return their version.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if the folder is not a checkpoint, is of another model, or changed
            while it was read.
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
    """Return the current parameters of the folder, or this process's shards of them.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if the folder is not a checkpoint.
    """
    return read_model(options)[1]
