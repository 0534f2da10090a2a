"""Run a server until a signal ends it, or until its engine cannot go on."""

import argparse
import os
import socket

import uvicorn
from generating.exiting import FAILED, end_now

from jkv.serving import Engine

from .api import make_app
from .endpoints.connections import make_config
from .loading import Served

BACKLOG = 2048  # connections that wait to be accepted; the system may allow fewer


class Server(uvicorn.Server):
    """Ends, too, when its engine cannot go on: clients would be refused for ever."""

    def __init__(self, config: uvicorn.Config, engine: Engine):
        super().__init__(config)
        self._engine = engine

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server should stop; called ten times a second."""
        return await super().on_tick(counter) or self._engine.has_failed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add where a server listens, and the key that clients need."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="0.0.0.0: from everywhere; %(default)s")
    add("--port", type=int, default=8000, help="%(default)s")
    kept = os.environ.get("JKV_API_KEY")
    said = "that clients need; JKV_API_KEY, which `ps` does not show"
    add("--api-key", default=kept, help=said)
    said = "of pages that may ask from a browser, such as https://a.org; *: all"
    add("--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help=said)
    add("--listener", type=int, help=argparse.SUPPRESS)  # given by the launcher


def run(served: Served, options: argparse.Namespace) -> None:
    """Answer clients.

    Args:
        served: the model.
        options: of the command line: `host`, `port`, `api_key`, and `listener`, the
            file descriptor of a socket that a launcher listens on.
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
        # At once: the usual end of one of several processes would wait for the others.
        end_now(FAILED, "error: the engine cannot go on; above is why")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens for clients.

    Raises:
        OSError: where that cannot be.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
