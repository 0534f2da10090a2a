"""Prefix-aware routing: a request goes to the replica with its longest cached prefix.

Ray Serve requests replicas in order of preference from a router, and uses the first
one with room (`ray.serve.request_router`; an alpha API, so Ray's version is pinned).
Ray's own prefix router reads only requests of its server for vLLM.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from .forwarding import Forwarded
from .prefixes import PrefixTable


class Standing(NamedTuple):
    """A replica's state at the arrival of a request."""

    num_found: int  # leading pieces of the request sent before
    num_ongoing: int  # unfinished requests of this router
    free_blocks: int  # in the replica's last report
    places: int  # maximum running sequences


def order(standings: Mapping[str, Standing]) -> list[str]:
    """Return the replicas in order of preference.

    Replicas with a free place come first, since a full replica would delay the request
    while others idle; then longer matched prefixes, then more free blocks.
    Example:
      >>> order({
      ...     "full": Standing(9, num_ongoing=4, free_blocks=50, places=4),
      ...     "empty": Standing(0, num_ongoing=0, free_blocks=99, places=4),
      ...     "warm": Standing(3, num_ongoing=2, free_blocks=10, places=4),
      ... })
      ['warm', 'empty', 'full']
    """

    def rank(name: str) -> tuple[bool, int, int, int]:
        found = standings[name]
        is_full = found.num_ongoing >= found.places
        return is_full, -found.num_found, -found.free_blocks, found.num_ongoing

    return sorted(standings, key=rank)


class PrefixRouter(RequestRouter):
    """Router by cached prefix, else by free blocks."""

    def initialize_state(self, *, max_pieces: int) -> None:
        """Create an empty table of at most `max_pieces` pieces per replica."""
        self._table = PrefixTable(max_pieces)
        self._ongoing: Counter[str] = Counter()
        self._versions: dict[str, int] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the best replica as the only candidate."""
        hashes = read_hashes(pending_request)
        replicas = {name_of(found.replica_id): found for found in candidate_replicas}
        standings = {
            name: self._judge(name, replica, hashes)
            for name, replica in replicas.items()
        }
        return [[replicas[name]] for name in order(standings)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Record the replica of a request."""
        del result
        self._table.note(name_of(replica_id), read_hashes(pending_request))
        self._ongoing[name_of(replica_id)] += 1

    def on_request_completed(
        self, replica_id: ReplicaID, internal_request_id: str
    ) -> None:
        """Record the end of a request."""
        del internal_request_id
        self._ongoing[name_of(replica_id)] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the running replicas, and remove the others from the table."""
        super().update_replicas(replicas)
        self._keep_running()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a dead replica immediately."""
        super().on_replica_actor_died(replica_id)
        self._keep_running()

    def _keep_running(self) -> None:
        running = {name_of(found) for found in self.curr_replicas}
        self._table.keep_only(running)
        for known in (self._ongoing, self._versions):
            for name in known.keys() - running:
                del known[name]

    def _judge(
        self, name: str, replica: RunningReplica, hashes: Sequence[bytes]
    ) -> Standing:
        """Return a replica's state for a request."""
        stats = replica.routing_stats
        version = stats.get("version", 0)
        # New weights invalidate the replica's cached blocks.
        if self._versions.setdefault(name, version) != version:
            self._versions[name] = version
            self._table.forget(name)
        return Standing(
            self._table.count(name, hashes),
            self._ongoing[name],
            stats.get("free_blocks", 0),
            stats.get("places", 1),
        )


def name_of(replica_id: ReplicaID) -> str:
    """Return a replica's name, unique in the application."""
    return str(replica_id.unique_id)


def read_hashes(request: PendingRequest | None) -> tuple[bytes, ...]:
    """Return a request's hashes; empty for other calls."""
    for found in request.args if request is not None else ():
        if isinstance(found, Forwarded):
            return found.hashes
    return ()
