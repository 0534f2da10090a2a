"""Engine: a host around the jitted step, for requests that come and go.

A step of the engine starts the next window of the model's steps and then reads the last
one, so that the device computes while the host reads. Requests enter and leave between
two windows; inside one nothing asks the host.

This file is the face. Which thread does the steps is in `threads`, what a step does in
`scheduler`, what runs on the device in `device`, and a request's own data in `request`.
"""

import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from jkv.arguments import explains_class
from jkv.commands.compiled_programs import keep_compiled_programs
from jkv.decoding.arguments.asked import How
from jkv.decoding.model.protocol import Model
from jkv.decoding.model.steps import CHUNK_SIZE, ExactShape, Steps
from jkv.decoding.speculation.options import DraftModel, PromptLookup
from jkv.metadata.requests import Integers, Texts, check_counts
from jkv.serving.device.kept_programs import KeptPrograms
from jkv.serving.device.loop import Loop, Progress
from jkv.serving.device.processes import FindParams, SharedLoop
from jkv.serving.device.sizes import find_sizes
from jkv.serving.request.ask import Ask, Client, OfAsk
from jkv.serving.request.limits import (
    RequestRefused,
    StopSizes,
    as_token_ids,
    read_request,
    split_batch,
)
from jkv.serving.request.request import Request, RequestState
from jkv.serving.request.results import Completion, Event, read_completions
from jkv.serving.request.texts import Detokenize
from jkv.serving.scheduler.measures import EngineStats
from jkv.serving.scheduler.parking import Parked
from jkv.serving.scheduler.scheduler import HostOptions, QueueFull, Scheduler
from jkv.serving.scheduler.versions import Update
from jkv.serving.threads import Turns, await_events, read_events
from jkv.sharding.processes import find_shared_mesh
from jkv.signatures import lists_arguments
from jkv.state import Cache
from jkv.status import UsageError
from jkv.steering import Steering
from jkv.tiers.store import BlockStore


@explains_class
class Engine:
    """Continues requests on a cache: a queue without end around `jkv.generate`'s step.

    Tokens, logprobs and reasons are those that `jkv.generate` gives. The cache belongs
    to the engine from now on (it is donated); sequences that are open in it stay open.

    Without a thread of its own the engine goes on while a call waits for a request:
    `generate`, `stream`, `events` and `results` do the steps. `start`, or the engine
    as a context manager, gives it a thread. All methods may be called by any thread. A
    `request_id` is what `submit` returned; one that is unknown, or whose results are
    forgotten, is a KeyError at once.

    Example:
      >>> import asyncio, jax, jkv
      >>> from jkv.serving import Engine
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=3, max_context_length=16))
      >>> engine = Engine(count_on, None, cache, max_running=2, max_new_tokens=8)
      >>> engine.warm_up(lambda name, done, count: print(name, f"{done}/{count}"))
      begin 0/3
      exchange 1/3
      window 2/3
      done 3/3
      3
      >>> [(r.tokens, r.reason.name) for r in engine.generate([[5], []], limits=2)]
      [([6, 7], 'LENGTH'), ([], 'EMPTY_PROMPT')]
      >>> number = engine.submit([5, 6], stop_tokens=[9], priority=-1)
      >>> engine.results(number)[0].tokens
      [7, 8, 9]
      >>> list(engine.stream(engine.submit([60], max_new_tokens=2)))
      [61, 62]
      >>> async def read_along():
      ...     return [token async for token in engine.astream([5], max_new_tokens=3)]
      >>> with engine:
      ...     asyncio.run(read_along())
      [6, 7, 8]
    """

    @jax.transfer_guard("allow")
    def __init__(
        self,
        model: Model,
        params: Any,
        cache: Cache,
        *,
        max_running: int,
        max_new_tokens: int,
        max_prompt_tokens: int | None = None,
        max_samples: int = 1,
        num_ahead: int | None = None,
        num_steps: int = 8,
        chunk_size: int = CHUNK_SIZE,
        row_counts: tuple[int, ...] | None = None,
        exact: ExactShape = False,
        speculate: PromptLookup | DraftModel | None = None,
        steering: Steering | None = None,
        stop_tokens: Integers = (),
        stop_sizes: StopSizes = StopSizes(),  # noqa: B008 (a tuple cannot change)
        detokenize: Detokenize | None = None,
        max_waiting: int | None = None,
        shares: Mapping[Client, float] | None = None,
        max_results: int = 1024,
        result_seconds: float = 300.0,
        park_seconds: float = 1.0,
        max_parked_bytes: int | None = None,
        store: BlockStore | None = None,
        store_share: float = 0.125,
        store_version: str | None = None,
        checks: bool = False,
        kept_programs: KeptPrograms | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Make an engine; nothing is compiled yet (`warm_up`) unless programs are kept.

        Args:
          model: as for `jkv.generate`.
          cache: given to the engine.
          max_running: most sequences that run at one time, W.
          max_new_tokens: most new tokens of any sequence.
          max_prompt_tokens: most tokens of a prompt; None is what the cache takes.
          max_samples: sequences of a request that share what was computed of its prompt
            without the help of a prefix cache; a request with more is cut into several.
          num_ahead: prompts that wait on the device, to run before the host hears that
            others have ended; None is as many as run.
          num_steps: steps of a window. Fewer show tokens sooner.
          chunk_size: as for `jkv.generate`.
          row_counts: as for `jkv.generate`; None is `spread_row_counts` of these, as
            prompts come one after the other.
          exact: as for `jkv.generate`; the bits are those of `jkv.generate` with it.
          speculate: as for `jkv.generate`; a step may bring a sequence several tokens.
            The cache of a draft, with a row for each that runs, is given to the engine.
          steering: as for `jkv.generate`; each request names a variant of it.
          stop_tokens: of requests that do not bring their own, such as a model's end.
          stop_sizes: most stop tokens and stop sequences of a request.
          detokenize: from a list of token ids to text, such as a tokenizer's `decode`;
            needed for stop strings, and for results to have a text.
          max_waiting: most requests that wait on the host, one with more than
            `max_samples` sequences counting for several, at least 1; None is any
            number.
          shares: how much of the engine a client gets beside the others while all of
            them wait, a number above 0 by `client` of `submit`; 1 for those that are
            not here.
          max_results: most requests that ended and can still be asked for.
          result_seconds: how long they can.
          park_seconds: how long the blocks of a parked text stay on the device; it is
            looked at between two windows.
          max_parked_bytes: most bytes of them on the host; beyond, those of the texts
            that were parked first are forgotten. None is any number.
          store: where cached blocks go before the pool hands them out, and come back
            from for prompts that wait, if copying them takes less time than computing;
            for a cache with `prefix_caching`.
          store_share: how much of the pool holds nothing; what is cached beyond goes to
            the store.
          store_version: the name of the weights and of the model's settings: only
            engines whose name is the same find each other's blocks in a store or its
            folder. None is the store's own `version`, and where it has none a digest
            of all weights, of the model's `repr`, or the function's constants and
            closure, and of `exact`.
          checks: whether to look at the cache's invariants after each window (slow).
          kept_programs: where executables are kept between runs, which then begin
            without tracing the model; what is not there yet is compiled at once.
          clock: seconds, for deadlines and times.

        Raises:
          ValueError: for sizes that cannot be, a model whose logits are not [B, V], or
            engines that differ on the processes of a mesh.
          RuntimeError: if these do not make their engines within 30 seconds.
        """
        _check_cache(cache)
        if not isinstance(kept_programs, KeptPrograms | None):
            raise UsageError(f"kept_programs must be KeptPrograms, got {kept_programs}")
        if max_waiting is not None:
            check_counts(max_waiting=max_waiting)
        most_tokens = cache.max_context_length
        check_counts(max_samples=max_samples)
        sizes = find_sizes(
            Steps(
                max_new_tokens, max_samples, max_running, chunk_size, row_counts, exact
            ),
            num_ahead=num_ahead,
            max_prompt_tokens=(
                most_tokens if max_prompt_tokens is None else max_prompt_tokens
            ),
            num_steps=num_steps,
            stop_sizes=stop_sizes,
            speculate=speculate,
        )
        how = How(steering=steering, speculate=speculate)
        loop: Loop
        if find_shared_mesh(cache) is None:
            loop = Loop(model, params, cache, sizes, how, kept_programs)
        elif kept_programs is None:
            loop = SharedLoop(model, params, cache, sizes, how, checks=checks)
        else:
            raise UsageError(
                "kept_programs are those of one process: on a mesh of several, give "
                "None and let JAX keep compiled programs (warm_up(programs_folder=))"
            )
        self._shared = loop if isinstance(loop, SharedLoop) else None
        ends = as_token_ids("stop_tokens", stop_tokens)
        if len(ends) > stop_sizes.tokens:
            raise UsageError(
                f"{len(ends)} stop tokens are more than this engine looks for: give it "
                f"stop_sizes=StopSizes(tokens={len(ends)})"
            )
        self._limits = loop.find_limits(ends, detokenize is not None)
        options = HostOptions(
            detokenize,
            max_waiting,
            shares or {},
            max_results,
            result_seconds,
            park_seconds,
            max_parked_bytes,
            store,
            store_share,
            store_version,
            checks,
            clock,
        )
        scheduler = self._scheduler = Scheduler(loop, options)
        self._turns = Turns(scheduler.step, lambda: scheduler.is_idle, scheduler.lock)

    # Requests.

    @lists_arguments
    def submit(self, tokens: Integers | Ask, **fields: Unpack[OfAsk]) -> int:
        """Take a request in, and return at once.

        Args:
          tokens: i32[P] or a list, the prompt; or an `Ask`, which says all.
          fields: those of `Ask`, each by its name, as in `max_new_tokens=20`.

        Returns:
          The request's number.

        Raises:
          RequestRefused: for what can never be served (a ValueError).
          QueueFull: if `max_waiting` requests wait; it has the seconds after which
            one more may.
          EngineError: if the engine has failed for good.
        """
        return self._take_in(None, Ask.of(tokens, fields))

    @lists_arguments
    def generate(
        self,
        prompts: Texts,
        *,
        limits: Integers | None = None,
        salts: Integers = 0,
        **fields: Unpack[OfAsk],
    ) -> list[Completion]:
        """Continue prompts until each has ended.

        Args:
          prompts: i32[B, P], -1 after each one's end, or a list of token ids for each.
          limits: i32[B], most new tokens of each.
          salts: i32[B] or int, domains of the prefix cache.
          fields: those of `Ask`, the same for all: `n` is `num_samples` of
            `jkv.generate`, and each field of `sampling` one number or B * n; of one
            seed each sequence has its own.

        Returns:
          What `jkv.generate` returns: sample j of prompt i is number `i * n + j`. One
          that it would not begin has its reason and no tokens.

        Raises:
          RequestRefused: for what this engine has no room for.
          EngineError: if a request failed.
        """
        if fields.get("max_new_tokens") is None:
            fields["max_new_tokens"] = self._limits.max_new_tokens
        found: list[Request | list[Completion]] = []
        try:
            for ask in split_batch(prompts, limits, salts, fields):
                found.append(self._begin(ask))
            for each in found:
                if isinstance(each, Request):
                    self._wait(each)
        finally:
            for each in found:
                if isinstance(each, Request):
                    self._scheduler.cancel(each)
        completed = (
            read_completions(e) if isinstance(e, Request) else e for e in found
        )
        return list(itertools.chain.from_iterable(completed))

    def cancel(self, request_id: int) -> bool:
        """End a request where it is; what it has is kept.

        Returns:
          Whether it went on until now; False if it had ended, or is unknown.
        """
        try:
            request = self._scheduler.find(request_id)
        except KeyError:
            return False
        went_on = self._scheduler.cancel(request)
        self._turns.tell()
        return went_on

    # Texts that wait for a tool.

    def park(self, request_id: int) -> None:
        """Keep what was computed of a request when it has ended, for `resume`.

        Its blocks stay on the device for `park_seconds`, or until others could need
        them, and then go to the host. They are forgotten when weights change, unless
        `update_params` keeps what is cached; the text is kept in any case.

        Args:
          request_id: from `submit`. Of one that goes on, nothing is lost between its
            end and this call; what has failed is not kept.

        Raises:
          ValueError: for a cache without `prefix_caching`, or on a mesh of several
            processes.
        """
        self._check_leads()
        self._scheduler.park(request_id)
        self._turns.tell()

    @lists_arguments
    def resume(
        self,
        request_id: int,
        tokens: Integers,
        *,
        sample: int = 0,
        **fields: Unpack[OfAsk],
    ) -> int:
        """Go on from a parked text and further tokens, as `submit` does with all.

        The text is parked no more: park the new request for its next turn.

        Args:
          request_id: of `park`.
          tokens: i32[P] or a list, what follows the text, such as a tool's answer.
          sample: which of the request's sequences.
          fields: those of `Ask`, but for `salt`, which is the text's.

        Returns:
          The new request's number.

        Raises:
          KeyError: if it is not parked, or has not ended.
          RequestRefused, QueueFull, EngineError: as `submit`; it stays parked then.
        """
        parked = self._scheduler.parking.take(request_id, sample)
        try:
            more = as_token_ids("tokens", tokens)
            text = np.concatenate([parked.text, more])
            if "salt" in fields:
                raise UsageError("the salt of a parked text is its own: leave it out")
            fields["salt"] = parked.salt
            return self._take_in(parked, Ask.of(text, fields))
        except BaseException:
            self._scheduler.parking.put_back(parked)
            raise

    def unpark(self, request_id: int) -> bool:
        """Give up the parked texts of a request; return whether there were any."""
        were_there = self._scheduler.unpark(request_id)
        self._turns.tell()
        return were_there

    # What comes of them.

    def step(self) -> list[Event]:
        """Start the next window, and return what the last one brought.

        Only for hosts that do the steps themselves. An exception of the model or of
        JAX ends the requests that were on the device with FAILED; the others go on, in
        a fresh cache.

        Returns:
          An event for each sequence that has new tokens or has ended.
        """
        self._check_leads()
        return self._turns.take()

    def results(self, request_id: int, *, wait: bool = True) -> list[Completion]:
        """Return what came of a request, one for each of its n sequences.

        Args:
          wait: until it has ended; else what there is, with the reason RUNNING.

        Raises:
          EngineError: if it failed, and `wait`.
        """
        request = self._scheduler.find(request_id)
        if wait:
            self._wait(request)
        with self._turns.lock:
            return read_completions(request)

    def state(self, request_id: int) -> RequestState:
        """Return where a request is."""
        request = self._scheduler.find(request_id)
        with self._turns.lock:
            return request.state

    def events(self, request_id: int) -> Iterator[Event]:
        """Yield what is new of a request, until all of its sequences have ended.

        To close the iterator before that cancels the request. A slow reader misses
        nothing, and holds nothing up.

        Raises:
          EngineError: at the end, if it failed.
        """
        request = self._scheduler.find(request_id)
        return read_events(self._turns, request, self._scheduler.cancel)

    def stream(self, request_id: int) -> Iterator[int]:
        """Yield the tokens of a request with one sequence; otherwise as `events`.

        Raises:
          ValueError: at once, for a request with several sequences.
        """
        if self._scheduler.find(request_id).n > 1:
            raise ValueError(
                f"request {request_id} has several sequences: take events(), whose "
                f"events say which one they are of"
            )
        events = self.events(request_id)
        return (token for event in events for token in event.tokens)

    def aevents(self, request_id: int) -> AsyncGenerator[Event, None]:
        """Do what `events` does, in an event loop; starts the engine's thread."""
        request = self._scheduler.find(request_id)
        return await_events(self._turns, request, self._scheduler.cancel)

    @lists_arguments
    async def astream(
        self, tokens: Integers | Ask, **fields: Unpack[OfAsk]
    ) -> AsyncGenerator[int, None]:
        """Submit a request and yield its tokens, in an event loop.

        Leaving the loop over it, or cancelling its task, cancels the request.

        Args:
          tokens: the prompt.
          fields: as for `submit`, but for n.
        """
        events = self.aevents(self.submit(tokens, **fields))
        try:
            async for event in events:
                for token in event.tokens:
                    yield token
        finally:
            await events.aclose()

    # The engine itself.

    @property
    def cache(self) -> Cache:
        """The newest value of the cache, for looking; the next step donates it."""
        return self._scheduler.loop.cache

    @property
    def has_failed(self) -> bool:
        """Whether it cannot go on: `submit` raises EngineError from now on."""
        return self._scheduler.has_failed

    @property
    def is_idle(self) -> bool:
        """Whether nothing goes on, and everything was told: a step would do nothing."""
        with self._turns.lock:
            return self._scheduler.is_idle

    def stats(self) -> EngineStats:
        """Return a snapshot: requests by state, tokens, times, blocks."""
        return self._scheduler.read_stats()

    def warm_up(
        self,
        progress: Progress | None = None,
        *,
        programs_folder: str | Path | None = None,
    ) -> int:
        """Compile all that requests will ever run, before the first one.

        A small program more is compiled by the first `update_params(recompute=True)`.

        Args:
          progress: called with the name of each program, how many are done, and of how
            many; at the end once more.
          programs_folder: where JAX keeps compiled programs from now on, and finds
            those of earlier runs. Nothing changes where JAX was told already.

        Returns:
          How many programs there are.
        """
        self._check_leads()
        if programs_folder is not None:
            keep_compiled_programs(Path(programs_folder))
        return self._turns.with_turn(lambda: self._scheduler.warm_up(progress))

    def update_params(
        self,
        params: Any,
        *,
        draft_params: Any = None,
        recompute: bool = False,
        keep_cached: bool = False,
        version: int | None = None,
        store_version: str | None = None,
    ) -> int:
        """Compute with other weights from the next window on; nothing is compiled.

        What is cached is of the old weights, and is not found any more. Requests that
        run go on from their keys and values, in the order and places they have, and
        their blocks are found by no other; or they are computed again. A request that
        waits has nothing of the old weights. `Completion.versions` has the
        version of each token.

        Args:
          params: of the same shapes and dtypes; arrays that are elsewhere are copied to
            where the old ones are, others are used as they are: who donates them gives
            a copy.
          draft_params: of the draft model, likewise; None leaves those there are. What
            the draft has of a text stays until that is computed again.
          recompute: whether running requests give their blocks back, and are computed
            again from their prompts and tokens so far.
          keep_cached: whether what is cached is found as before, so that a text may
            attend to keys and values of several versions.
          version: of these weights, above the last one, such as a trainer's step; None
            counts on from 0, that of the first weights.
          store_version: the name of these weights in the store, as for the engine; a
            store's folder is of this version from now on. None is a digest of them.

        Returns:
          The version.

        Raises:
          ValueError: for other shapes, dtypes or names, which are told, and for
            `recompute` with `keep_cached`; nothing has changed then.
        """
        self._check_leads()
        update = Update(
            params, draft_params, recompute, keep_cached, version, store_version
        )
        return self._turns.with_turn(lambda: self._scheduler.update_params(update))

    def replace_steering(self, steering: Steering) -> None:
        """Steer by other arrays from the next window on, with the programs there are.

        What a variant means may change only while no request has it: the state of a
        request goes on as it is.

        Args:
          steering: of the same type, with arrays of the same shapes and dtypes.

        Raises:
          EngineError: for any other.
        """
        self._check_leads()
        self._turns.with_turn(lambda: self._scheduler.loop.replace_steering(steering))

    def start(self) -> None:
        """Give the engine a thread, which does the steps while there is work."""
        self._check_leads()
        if self._shared is not None:
            self._shared.is_followed = True
        self._turns.start()

    def follow(self, *, find_params: FindParams | None = None) -> None:
        """Do what the first process of a mesh does, until it closes its engine.

        Where the cache lies on a mesh of several processes (`jax.distributed`), each of
        them makes the same engine. The first, the one with the lowest number, takes
        requests, decides, and has the results. The others call this and nothing else.
        Orders come as one small array a window; no text, and no request, comes here.
        After `close` on the first this may be called again, for what it does next.

        Args:
          find_params: returns the new weights on this process, and those of the draft
            model or None, when the first is given some that lie on the mesh
            (`update_params`). Those that the first has whole are sent.

        Raises:
          UsageError: on the first process, and for a cache that is not shared.
          EngineError: if the first process fails, or does not answer any more. End the
            process then: JAX ends it too, after `heartbeat_timeout_seconds`.
        """
        if self._leads:
            raise UsageError(
                "follow() is for the other processes of a mesh of several, whose first "
                "one leads; here the engine takes requests"
            )
        assert self._shared is not None
        self._shared.follow(find_params)

    def close(self) -> None:
        """End the thread, cancel what has not ended, give up what is parked.

        What is cached goes to the store, for the next engine.
        All blocks are free then. What ended can still be asked for, and the engine be
        used without a thread. On several processes `follow` returns on the others.
        """
        if not self._leads:
            return
        self._turns.stop()
        self._scheduler.cancel_all()
        self._scheduler.parking.give_up_all()
        while not self._scheduler.is_idle:
            self._turns.take()
        if self._shared is not None:
            self._turns.with_turn(self._shared.dismiss)
        self._turns.with_turn(self._scheduler.storing.leave)

    def __enter__(self) -> "Engine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _leads(self) -> bool:
        """Whether this process decides."""
        return self._shared is None or self._shared.leads

    def _check_leads(self) -> None:
        """Refuse what only the first of several processes may do."""
        if not self._leads:
            raise UsageError(
                "the first process of the mesh takes requests and decides; on the "
                "others call follow() alone"
            )

    def _take_in(self, parked: Parked | None, ask: Ask) -> int:
        """Submit a prompt that goes on from a parked text, or from none."""
        self._check_leads()
        try:
            request = read_request(self._limits, ask, self._scheduler.domains)
        except RequestRefused:
            self._scheduler.count_refused()
            raise
        self._scheduler.add(request, parked)
        self._turns.tell()
        return request.request_id

    def _wait(self, request: Request) -> None:
        """Wait until a request has ended; raise what made it fail."""
        self._turns.wait_for(lambda: request.has_ended)
        request.raise_error()

    def _begin(self, ask: Ask) -> Request | list[Completion]:
        """Submit a prompt as soon as it may wait; return what it is if it never may."""
        while True:
            self._turns.wait_for(lambda: self._scheduler.has_room)
            try:
                return self._scheduler.find(self.submit(ask))
            except RequestRefused as refused:
                if refused.reason is None:
                    raise
                reason = refused.reason
                return [Completion(-1, i, [], [], reason, None) for i in range(ask.n)]
            except QueueFull:  # another thread was faster
                continue


def _check_cache(cache: Cache) -> None:
    """Refuse what is no cache, or one of which each rank has a pool."""
    if not isinstance(cache, Cache):
        raise UsageError(
            f"an Engine takes a cache, as jkv.init(config) makes one, got "
            f"{type(cache).__name__}"
        )
    if cache.pools is not None:
        raise UsageError(
            f"an Engine serves requests from one pool, and this cache has one for each "
            f"rank of mesh axis {cache.pools.axis!r}: make an engine for each rank, "
            f"whose cache lies on that rank's devices (jkv.init with mesh= of these), "
            f"and deal requests to them; jkv.generate deals prompts to ranks"
        )
