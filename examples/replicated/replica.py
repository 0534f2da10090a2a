"""A replica: engine and server application in a Ray actor."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pretrained
from ray import serve
from served import storing
from served.api import make_app
from served.loading import load
from starlette.types import Message

from jkv.serving import EngineStats

from .forwarding import Forwarded, call_app


class Replica:
    """A served model; Ray Serve creates each replica in its own process."""

    def __init__(self, options: argparse.Namespace):
        """Load the model and compile its programs.

        Args:
          options: those of `served.loading.add_options`, `max_waiting`, `grammars`.
        """
        self._served = load(
            options, max_waiting=options.max_waiting, max_grammars=options.grammars
        )
        self._weights, self._options = str(options.model), options
        self._served.engine.warm_up()
        self._served.engine.start()
        self._app = make_app(self._served)

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Load new weights; Ray Serve calls this for one replica after the other.

        Args:
          config: `weights`, the folder of a checkpoint with the same configuration.

        Raises:
          ValueError: if the configuration differs; the old weights stay.
        """
        folder = config["weights"]
        if folder != self._weights:
            await asyncio.to_thread(self._load_weights, folder)
            self._weights = folder

    async def answer(self, request: Forwarded) -> AsyncIterator[Message]:
        """Yield the messages of the response: its head, then parts of its body."""
        async for message in call_app(self._app, request):
            yield message

    def read_stats(self) -> tuple[str, EngineStats]:
        """Return the replica's name and its engine's statistics."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, self._served.engine.stats()

    async def check_health(self) -> None:
        """Raise if the engine has failed; Ray Serve then replaces the replica."""
        async for message in call_app(self._app, Forwarded("GET", "/health")):
            if message.get("status", 200) != 200:
                raise RuntimeError("the engine has failed")

    def record_routing_stats(self) -> dict[str, int]:
        """Return the router's inputs: free blocks, places and the weights' version."""
        stats = self._served.engine.stats()
        return {
            "free_blocks": stats.free_blocks,
            "places": self._options.max_running,
            "version": stats.version,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the input of autoscaling: the number of unfinished sequences."""
        stats = self._served.engine.stats()
        return {"sequences": float(stats.waiting + stats.running + stats.preempted)}

    def __del__(self) -> None:
        if hasattr(self, "_served"):
            self._served.engine.close()

    def _load_weights(self, folder: str) -> None:
        if pretrained.read_config(folder) != pretrained.read_config(self._weights):
            raise ValueError(
                f"config.json in {folder} is not that of {self._weights}: start "
                "another server for another model"
            )
        _, params = pretrained.load(folder, scan_layers=self._options.scan_layers)
        named = storing.name_weights(self._served.store, folder)
        self._served.engine.update_params(params, store_version=named)
