"""Which replica gets a request: the one that has most of its beginning.

Ray Serve requests replicas in order of preference from a router, and takes the first
that has room (`ray.serve.request_router`, which Ray calls alpha: Ray is pinned
therefore). Ray's own router by prefixes reads the requests of its server for vLLM.
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
    """A router's data about a replica when a request comes."""

    num_found: int  # pieces of the request that it was sent before
    num_ongoing: int  # requests that this router sent it, and that go on
    free_blocks: int  # in the replica's last report
    places: int  # texts that it runs at one time


def order(standings: Mapping[str, Standing]) -> list[str]:
    """Return replicas, the best one first.

    First come replicas with a free place; a full replica would delay the request while
    others idle. Then come replicas with more of the request's beginning, then replicas
    with more free blocks.

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
    """Sends requests to where their beginnings are, else to where there is room."""

    def initialize_state(self, *, max_pieces: int) -> None:
        """Take how many pieces of text a replica is thought to hold."""
        self._table = PrefixTable(max_pieces)
        self._ongoing: Counter[str] = Counter()
        self._versions: dict[str, int] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return replicas, the best one first, each a rank of its own."""
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
        """Note where a request went; its result is Ray's."""
        del result
        self._table.note(name_of(replica_id), read_hashes(pending_request))
        self._ongoing[name_of(replica_id)] += 1

    def on_request_completed(
        self, replica_id: ReplicaID, internal_request_id: str
    ) -> None:
        """Note that a request has ended; its number is Ray's."""
        del internal_request_id
        self._ongoing[name_of(replica_id)] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the running replicas, and forget the others."""
        super().update_replicas(replicas)
        self._keep_running()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica at once."""
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
        """Collect the data about a replica for a request."""
        said = replica.routing_stats
        version = said.get("version", 0)
        # New weights: the replica has forgotten its cached blocks.
        if self._versions.setdefault(name, version) != version:
            self._versions[name] = version
            self._table.forget(name)
        return Standing(
            self._table.count(name, hashes),
            self._ongoing[name],
            said.get("free_blocks", 0),
            said.get("places", 1),
        )


def name_of(replica_id: ReplicaID) -> str:
    """Return a replica's name, one in the application."""
    return str(replica_id.unique_id)


def read_hashes(request: PendingRequest | None) -> tuple[bytes, ...]:
    """Return the hashes that a request brings; other calls have none."""
    for found in request.args if request is not None else ():
        if isinstance(found, Forwarded):
            return found.hashes
    return ()
