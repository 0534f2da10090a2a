"""Device loop on several processes: the first schedules, the others repeat its calls.

Each process holds its shards of the cache and calls the same programs in the same
order, as JAX requires. The first sends a command before each call, with the program's
host inputs. Reports are replicated, and only the first process reads them.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding import DecodingOptions, Model
from jkv.inspection import check
from jkv.logits_processors import LogitsProcessor
from jkv.serving.device.loop import Loop, Progress
from jkv.serving.device.orders import Order, Orders, pack_window, unpack_window
from jkv.serving.device.programs import Change, EngineSizes, WindowReport
from jkv.serving.device.weights import check_weights
from jkv.serving.request.request import EngineError
from jkv.sharding.processes import Broadcast, replicate
from jkv.sharding.storage_sharding import find_shared_mesh, is_shared
from jkv.state import Cache
from jkv.status import UsageError
from jkv.storage.leaves import put

# Returns a follower's weights, and its draft model's or None.
FindParams = Callable[[], tuple[Any, Any]]


class SharedLoop(Loop):
    """Device loop of a cache sharded over the devices of several processes."""

    num_classes = 1  # retention classes are not sent to followers

    def __init__(
        self,
        model: Model,
        params: Any,
        cache: Cache,
        sizes: EngineSizes,
        options: DecodingOptions,
        *,
        checks: bool,
    ):
        mesh = find_shared_mesh(cache)
        assert mesh is not None, "a cache on devices of several processes"
        self._mesh, self._checks = mesh, checks
        params = self._spread(params)
        options = DecodingOptions(
            logits_processor=self._spread(options.logits_processor),
            speculate=self._spread(options.speculate),
        )
        super().__init__(model, params, cache, sizes, options, None)
        # Arrays of the last call, ready when it has run; None: unknown.
        self._newest: Any = None
        broadcast = self._broadcast = Broadcast(mesh)
        _check_alike(
            broadcast,
            {
                "params": _describe(params),
                "cache": _describe(cache),
                "logits_processor": _describe(options.logits_processor),
                "speculate": _describe_drafter(options.speculate),
                "checks": repr(checks),
                "one of the sizes": repr(sizes),
            },
        )
        self._orders = Orders(broadcast)
        self._orders.warm_up()
        self.leads, self.is_followed = broadcast.is_first, broadcast.is_first

    @property
    def keeps_rows(self) -> bool:
        """False: nothing can be parked."""
        return False

    def start_window(
        self, changes: Sequence[Change], num_steps: int
    ) -> WindowReport | None:
        if changes or num_steps:
            self._send(Order.WINDOW, pack_window(changes, num_steps))
        return self._start(changes, num_steps)

    def warm_up(self, progress: Progress | None) -> int:
        self._send(Order.WARM_UP)
        return super().warm_up(progress)

    def forget_cached(self) -> None:
        self._send(Order.FORGET_CACHED)
        super().forget_cached()

    def preempt_all(self) -> None:
        self._send(Order.PREEMPT_ALL)
        super().preempt_all()

    def replace_params(self, params: Any, draft_params: Any) -> None:
        """Replace the weights on all processes.

        Weights sharded over the mesh come from each follower's `find_params`; arrays
        held in full by this process are broadcast one at a time.
        """
        new = {"params": params, "draft_params": draft_params}
        old = {"params": self._given.params, "draft_params": self.draft_params}
        for name, each in new.items():
            if each is not None and old[name] is not None:
                check_weights(name, old[name], each)
        has_draft = draft_params is not None
        if has_draft and self.draft_params is None:
            super().replace_params(params, draft_params)  # raises
        is_on_mesh = any(map(is_shared, jax.tree.leaves(new)))
        self._send(Order.REPLACE_PARAMS, np.array([has_draft, is_on_mesh], np.int32))
        if not is_on_mesh:
            params, draft_params = self._share((params, draft_params))
        super().replace_params(params, draft_params)

    def replace_logits_processor(self, logits_processor: LogitsProcessor) -> None:
        """Replace the arrays of the logits processor on all processes, by broadcast."""
        new = self._spread(logits_processor)
        super().replace_logits_processor(new)  # raises on a mismatch
        self._send(Order.REPLACE_LOGITS_PROCESSOR)
        self._share(logits_processor)

    def start_again(self) -> None:
        """Raise: other processes may have completed the step that failed here."""
        if self.is_followed:
            try:
                self._send(Order.FAIL)
            finally:
                self.is_followed = False
        raise EngineError(
            "a step failed on one of several processes, which cannot recover alone; "
            "restart all of them"
        )

    def dismiss(self) -> None:
        if self.is_followed:
            self._send(Order.CLOSE)
            self.is_followed = False

    def follow(self, find_params: FindParams | None) -> None:
        """Execute the first process's commands until it closes; raise if it fails."""
        while True:
            try:
                self._settle()
                order, words = self._orders.receive()
            except jax.errors.JaxRuntimeError as error:
                raise EngineError(
                    "the first process of the mesh stopped responding; restart all "
                    "processes"
                ) from error
            if order == Order.CLOSE:
                return
            if order == Order.FAIL:
                raise EngineError("a step failed on the first process of the mesh")
            self._do(order, words, find_params)

    def _do(
        self, order: Order, words: np.ndarray, find_params: FindParams | None
    ) -> None:
        """Execute one command."""
        match order:
            case Order.WINDOW:
                self._start(*unpack_window(self.sizes, words))
                if self._checks:
                    check(self.cache)
            case Order.WARM_UP:
                super().warm_up(None)
            case Order.FORGET_CACHED:
                super().forget_cached()
            case Order.PREEMPT_ALL:
                super().preempt_all()
            case Order.REPLACE_PARAMS:
                has_draft, is_on_mesh = words.tolist()
                if not is_on_mesh:
                    drafting = self.draft_params if has_draft else None
                    new = self._share((self._given.params, drafting))
                elif find_params is None:
                    raise EngineError(
                        "find_params is required, since the new weights are sharded "
                        "over the mesh; pass follow() a function that returns them"
                    )
                else:
                    new = find_params()
                super().replace_params(*new)
            case Order.REPLACE_LOGITS_PROCESSOR:
                logits_processor = self._given.logits_processor
                assert logits_processor is not None
                super().replace_logits_processor(
                    self._spread(self._share(logits_processor))
                )

    def _start(self, changes: Sequence[Change], num_steps: int) -> WindowReport | None:
        """Start a window; replicate its report."""
        report = super().start_window(changes, num_steps)
        if report is None:
            self._newest = self.num_free_blocks
            return None
        # Sharding of the model's outputs, such as over the vocabulary, may propagate
        # here.
        self._newest = report = jax.tree.map(replicate, report)
        return report

    def _settle(self) -> None:
        """Wait for the mesh's computation, if the broadcast shares its devices."""
        newest, self._newest = self._newest, None
        if self._broadcast.is_apart:
            return
        everything = self.cache, self._generation
        jax.block_until_ready(everything if newest is None else newest)

    def _send(self, order: Order, words: np.ndarray | None = None) -> None:
        self.is_followed = True
        self._settle()
        self._orders.send(order, words)

    def _share(self, arrays: Any) -> Any:
        """Return the first process's arrays, on every device of the mesh."""

        def share(leaf: Any) -> Any:
            kind = jax.typeof(leaf)
            has_all = not is_shared(leaf)
            # jnp.asarray narrows 64-bit values, so that all processes send equally many
            # bytes.
            own = jnp.asarray(leaf) if has_all else np.zeros(kind.shape, kind.dtype)
            return self._orders.share(np.asarray(own))

        return jax.tree.map(share, arrays)

    def _spread(self, arrays: Any) -> Any:
        """Replicate arrays over the mesh, except for arrays sharded over it."""
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


def _describe_drafter(drafter: Any) -> str:
    """Describe a drafter by its type, its number of draft tokens and its arrays."""
    name, count = type(drafter).__name__, getattr(drafter, "num_tokens", 0)
    return f"{name} {count} {_describe(drafter)}"


def _check_alike(broadcast: Broadcast, described: dict[str, str]) -> None:
    """Raise if the engines of the processes differ; all processes call this."""
    own = [zlib.crc32(each.encode()) >> 1 for each in described.values()]
    given = broadcast.gather(np.array(own, np.int32))
    differs = (given != given[0]).any(axis=0)
    names = [name for name, each in zip(described, differs, strict=True) if each]
    if names:
        raise UsageError(
            f"{', '.join(names)} must be the same on every process of a mesh, got "
            f"different ones; create the same engine on each"
        )
