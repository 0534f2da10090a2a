"""The loop on several processes: the first decides, and all do the same.

Each process has its part of the cache and calls the same programs in the same order, as
JAX asks for. The first tells the others before it calls one. What a program takes from
the host comes from the first; what comes back is on every process, but only the first
reads it.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding.arguments.asked import How
from jkv.decoding.model.protocol import Model
from jkv.decoding.speculation.options import DraftModel
from jkv.inspection.invariants import check
from jkv.serving.device.loop import Loop, Progress
from jkv.serving.device.orders import Order, Orders, pack_window, unpack_window
from jkv.serving.device.sizes import EngineSizes
from jkv.serving.device.transfers import Change, WindowReport
from jkv.serving.device.weights import check_weights
from jkv.serving.request.request import EngineError
from jkv.sharding.processes import Broadcast, find_shared_mesh, is_shared, replicate
from jkv.state import Cache
from jkv.status import UsageError
from jkv.steering import Steering
from jkv.storage.placement import put

# Returns the weights of a follower, and those of its draft model or None.
FindParams = Callable[[], tuple[Any, Any]]


class SharedLoop(Loop):
    """A loop whose cache lies on a mesh of several processes: all do what one says."""

    num_classes = 1  # followers are not told what to keep

    def __init__(
        self,
        model: Model,
        params: Any,
        cache: Cache,
        sizes: EngineSizes,
        how: How,
        *,
        checks: bool,
    ):
        mesh = find_shared_mesh(cache)
        assert mesh is not None, "a cache on devices of several processes"
        self._mesh, self._checks = mesh, checks
        params, speculate = self._spread(params), how.speculate
        if isinstance(speculate, DraftModel):
            draft_params = self._spread(speculate.params)
            speculate = dataclasses.replace(speculate, params=draft_params)
        how = How(steering=self._spread(how.steering), speculate=speculate)
        super().__init__(model, params, cache, sizes, how, None)
        # Of what was started last, arrays that are there when all is; None: unknown.
        self._newest: Any = None
        broadcast = self._broadcast = Broadcast(mesh)
        _check_alike(
            broadcast,
            {
                "params": _describe(params),
                "cache": _describe(cache),
                "steering": _describe(how.steering),
                "speculate": _describe(how.speculate),
                "checks": repr(checks),
                "one of the sizes": repr(sizes),
            },
        )
        self._orders = Orders(broadcast)
        self._orders.warm_up()
        self.leads, self.is_followed = broadcast.is_first, broadcast.is_first

    def start_window(
        self, changes: Sequence[Change], num_steps: int
    ) -> WindowReport | None:
        if changes or num_steps:
            self._tell(Order.WINDOW, pack_window(changes, num_steps))
        return self._start(changes, num_steps)

    def warm_up(self, progress: Progress | None) -> int:
        self._tell(Order.WARM_UP)
        return super().warm_up(progress)

    def forget_cached(self) -> None:
        self._tell(Order.FORGET_CACHED)
        super().forget_cached()

    def preempt_all(self) -> None:
        self._tell(Order.PREEMPT_ALL)
        super().preempt_all()

    def replace_params(self, params: Any, draft_params: Any) -> None:
        """Do so on all processes.

        Weights that lie on the mesh are taken from `find_params` of each follower;
        those that this process has whole are sent, an array at a time.
        """
        new = {"params": params, "draft_params": draft_params}
        old = {"params": self._given.params, "draft_params": self._given.draft_params}
        for name, each in new.items():
            if each is not None and old[name] is not None:
                check_weights(name, old[name], each)
        has_draft = draft_params is not None
        if has_draft and self._given.draft_params is None:
            super().replace_params(params, draft_params)  # raises
        is_on_mesh = any(map(is_shared, jax.tree.leaves(new)))
        self._tell(Order.REPLACE_PARAMS, np.array([has_draft, is_on_mesh], np.int32))
        if not is_on_mesh:
            params, draft_params = self._share((params, draft_params))
        super().replace_params(params, draft_params)

    def replace_steering(self, steering: Steering) -> None:
        """Do so on all processes; its arrays are sent."""
        new = self._spread(steering)
        super().replace_steering(new)  # which raises where it does not fit
        self._tell(Order.REPLACE_STEERING)
        self._share(steering)

    def start_again(self) -> None:
        """Refuse: what one process has done, others may not have."""
        if self.is_followed:
            try:
                self._tell(Order.FAIL)
            finally:
                self.is_followed = False
        raise EngineError(
            "a step failed on one of several processes, which cannot begin anew alone: "
            "end all of them, and start them again"
        )

    def dismiss(self) -> None:
        if self.is_followed:
            self._tell(Order.CLOSE)
            self.is_followed = False

    def follow(self, find_params: FindParams | None) -> None:
        """Do what the first process does, until it is closed; fail if it fails."""
        while True:
            try:
                self._settle()
                order, words = self._orders.receive()
            except jax.errors.JaxRuntimeError as error:
                raise EngineError(
                    "the first process of the mesh does not answer any more"
                ) from error
            if order == Order.CLOSE:
                return
            if order == Order.FAIL:
                raise EngineError("a step failed on the first process of the mesh")
            self._do(order, words, find_params)

    def _do(
        self, order: Order, words: np.ndarray, find_params: FindParams | None
    ) -> None:
        """Do what the first process does in this moment."""
        match order:
            case Order.WINDOW:
                self._start(*unpack_window(self.sizes, words))
                for cache in self.caches if self._checks else ():
                    check(cache)
            case Order.WARM_UP:
                super().warm_up(None)
            case Order.FORGET_CACHED:
                super().forget_cached()
            case Order.PREEMPT_ALL:
                super().preempt_all()
            case Order.REPLACE_PARAMS:
                has_draft, is_on_mesh = words.tolist()
                if not is_on_mesh:
                    given = self._given
                    old = given.params, given.draft_params if has_draft else None
                    new = self._share(old)
                elif find_params is None:
                    raise EngineError(
                        "the new weights lie on the mesh: give follow() a function "
                        "that returns them on this process, find_params="
                    )
                else:
                    new = find_params()
                super().replace_params(*new)
            case Order.REPLACE_STEERING:
                steering = self._given.steering
                assert steering is not None
                super().replace_steering(self._spread(self._share(steering)))

    def _start(self, changes: Sequence[Change], num_steps: int) -> WindowReport | None:
        """Start a window, whose report each process can read."""
        report = super().start_window(changes, num_steps)
        if report is None:
            self._newest = self.num_free_blocks
            return None
        # What a model divides, such as the vocabulary, may divide what follows from it.
        self._newest = report = jax.tree.map(replicate, report)
        return report

    def _settle(self) -> None:
        """Let no order cross what the mesh computes, where they share devices."""
        newest, self._newest = self._newest, None
        if self._broadcast.is_apart:
            return
        everything = self.cache, self._generation
        jax.block_until_ready(everything if newest is None else newest)

    def _tell(self, order: Order, words: np.ndarray | None = None) -> None:
        self.is_followed = True
        self._settle()
        self._orders.send(order, words)

    def _share(self, arrays: Any) -> Any:
        """Return the first process's arrays, on every device of the mesh."""

        def share(leaf: Any) -> Any:
            kind = jax.typeof(leaf)
            has_all = not is_shared(leaf)
            # Of the same bytes everywhere, as JAX makes 32 bits of 64.
            own = jnp.asarray(leaf) if has_all else np.zeros(kind.shape, kind.dtype)
            return self._orders.share(np.asarray(own))

        return jax.tree.map(share, arrays)

    def _spread(self, arrays: Any) -> Any:
        """Return arrays on every device of the mesh, but for those that lie on it."""
        everywhere = jax.sharding.NamedSharding(
            self._mesh, jax.sharding.PartitionSpec()
        )

        def spread(leaf: Any) -> Any:
            if is_shared(leaf):
                return leaf
            return put(np.asarray(jnp.asarray(leaf)), everywhere)

        return jax.tree.map(spread, arrays)


def _describe(arrays: Any) -> str:
    return repr([(each.shape, each.dtype) for each in jax.tree.leaves(arrays)])


def _check_alike(broadcast: Broadcast, described: dict[str, str]) -> None:
    """Refuse engines that differ from process to process; each waits for the others."""
    own = [zlib.crc32(each.encode()) >> 1 for each in described.values()]
    given = broadcast.gather(np.array(own, np.int32))
    differs = (given != given[0]).any(axis=0)
    names = [name for name, each in zip(described, differs, strict=True) if each]
    if names:
        raise UsageError(
            f"every process of a mesh makes the same engine, but {', '.join(names)} "
            f"differ from process to process"
        )
