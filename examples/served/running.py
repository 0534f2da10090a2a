"""Run a server until a signal or an engine failure ends it."""

import argparse
import os
import socket

import uvicorn
from generating.exiting import FAILED, end_now

from jkv.serving import Engine

from .api import make_app
from .endpoints.connections import make_config
from .loading import Served

BACKLOG = 2048  # pending connections; the system may allow fewer


class Server(uvicorn.Server):
    """Server that also stops when its engine has failed."""

    def __init__(self, config: uvicorn.Config, engine: Engine):
        super().__init__(config)
        self._engine = engine

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server should stop; called ten times a second."""
        return await super().on_tick(counter) or self._engine.has_failed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the address and the API key."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="0.0.0.0 for all interfaces; %(default)s")
    add("--port", type=int, default=8000, help="%(default)s")
    kept = os.environ.get("JKV_API_KEY")
    help_text = "required from clients; JKV_API_KEY hides it from `ps`"
    add("--api-key", default=kept, help=help_text)
    help_text = "web pages that may send requests, such as https://a.org; * for all"
    add("--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help=help_text)
    add("--listener", type=int, help=argparse.SUPPRESS)  # given by the launcher


def run(served: Served, options: argparse.Namespace) -> None:
    """Serve until the end.

    Args:
        served: the model.
        options: `host`, `port`, `api_key`, and `listener`, the file descriptor of a
            listening socket.
    """
    app = make_app(
        served, api_key=options.api_key, allowed_origins=options.allowed_origins
    )
    config = make_config(app, host=options.host, port=options.port)
    server = Server(config, served.engine)
    if options.listener is None:
        server.run()
    else:
        server.run([socket.socket(fileno=options.listener)])
    if served.engine.has_failed:
        # A normal exit of one of several processes would wait for the others.
        end_now(FAILED, "error: the engine cannot go on; above is why")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: if the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
