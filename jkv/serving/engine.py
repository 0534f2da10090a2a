"""Serving engine: a host loop around the jitted decode step.

A step of the engine starts the next window of decode steps, then reads the report of
the previous window, so that the device computes while the host works. Requests are
admitted and finished between windows; there is no host communication within one.

This file has the public interface. `scheduler` has the logic of a step, `device` the
jitted programs, and `request` the data of a request, its results, and the threads that
wait for them.
"""

import functools
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from jkv.arguments import explains_class
from jkv.commands import keep_compiled_programs
from jkv.decoding import (
    DecodingOptions,
    Drafter,
    GenerationConfig,
    Model,
    Roll,
)
from jkv.logits_processors import LogitsProcessor
from jkv.metadata.requests import IntegerRows, Integers, check_counts
from jkv.serving.device.kept_programs import KeptPrograms
from jkv.serving.device.loop import Loop, Progress
from jkv.serving.device.processes import FindParams, SharedLoop
from jkv.serving.device.programs import find_sizes
from jkv.serving.request.limits import (
    RequestRefused,
    Salts,
    StopSizes,
    as_token_ids,
    check_request,
    split_batch,
)
from jkv.serving.request.request import (
    Client,
    Request,
    RequestFields,
    RequestState,
    RequestStatus,
)
from jkv.serving.request.results import (
    AsyncCancellingIterator,
    CancellingIterator,
    Completion,
    Event,
    StepRunner,
    await_events,
    read_completions,
    read_events,
)
from jkv.serving.request.texts import Detokenize
from jkv.serving.scheduler.measures import EngineStats
from jkv.serving.scheduler.parking import Parked
from jkv.serving.scheduler.scheduler import HostOptions, QueueFull, Scheduler, Update
from jkv.sharding.storage_sharding import find_shared_mesh
from jkv.signatures import lists_arguments
from jkv.state import Cache
from jkv.status import UsageError
from jkv.tiers import BlockStore


@explains_class
class Engine:
    """Serving engine with continuous batching on one cache.

    Tokens, log-probabilities and finish reasons equal those of `jkv.generate`. The
    engine takes ownership of the cache and donates it to each step; sequences already
    open in it stay open.

    Without a background thread, the engine runs its steps while a caller waits in
    `generate`, `stream`, `events` or `results`. `start`, or using the engine as a
    context manager, adds a background thread. All methods are thread-safe. A
    `request_id` is the return value of `submit`; an unknown one, or one of expired
    results, raises KeyError.

    Example:
      >>> import asyncio, jax, jkv
      >>> from jkv.serving import Engine
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig.toy())
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
        chunk_size: int = GenerationConfig.chunk_size,
        row_counts: tuple[int, ...] | None = None,
        exact: bool | tuple[int, int] = False,
        roll: Roll | None = None,
        speculate: Drafter | None = None,
        logits_processor: LogitsProcessor | None = None,
        max_span: int = 0,
        cacheable_spans: bool = False,
        extra_ids: int = 0,
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
        """Create an engine; nothing is compiled before `warm_up` or the first request.

        Args:
          model: as for `jkv.generate`.
          cache: owned by the engine from now on.
          max_running: largest number of sequences that run at one time, W.
          max_new_tokens: largest number of new tokens of any sequence.
          max_prompt_tokens: longest prompt; None is the cache's `max_context_length`.
          max_samples: number of sequences of a request that share one prefill without a
            prefix cache; a larger request is split.
          num_ahead: number of prompts enqueued on the device, to be admitted without a
            round trip to the host; None is `max_running`.
          num_steps: decode steps per window. Fewer steps deliver tokens sooner.
          chunk_size: as for `jkv.generate`.
          row_counts: as for `jkv.generate`; None is `spread_row_counts` of these sizes,
            since prompts arrive one after another.
          exact: as for `jkv.generate`, with bit-identical results.
          roll: as for `jkv.generate`; prompts may then be longer than the cache's
            `max_context_length`, up to `max_prompt_tokens`.
          speculate: as for `jkv.generate`; a step may yield several tokens of a
            sequence. A drafter's layers are in the cache (`jkv.with_drafter`).
          logits_processor: as for `jkv.generate`; each request selects one of its
            variants.
          max_span: most tokens of a span of a prompt (`Request.spans`), such as an
            image's; at most the largest of `row_counts`. 0 serves causal prompts only.
          cacheable_spans: as for `jkv.decoding.Prompts.of`.
          extra_ids: as for `jkv.decoding.Prompts.of`.
          stop_tokens: default for requests without their own, such as the model's
            end-of-sequence token.
          stop_sizes: largest number of stop tokens and stop sequences of a request.
          detokenize: from a list of token ids to a string, such as a tokenizer's
            `decode`; required for stop strings and for the text of results.
          max_waiting: largest number of requests queued on the host, at least 1; a
            request split by `max_samples` counts once per part. None is unlimited.
          shares: weight of each `client` (see `submit`) in fair scheduling, above 0; 1
            for clients not listed.
          max_results: largest number of finished requests with retained results.
          result_seconds: retention time of results.
          park_seconds: time that the blocks of a parked sequence have the highest
            retention class before they are copied to the host; checked between windows.
          max_parked_bytes: largest size of the copies; beyond it, the least recently
            used blocks are dropped. None is unlimited. Unused with a `store`, which
            takes the copies.
          store: for KV cache offloading: cached blocks are spilled to it before
            eviction, and restored for queued prompts if copying is faster than
            computing. The cache needs `prefix_caching`.
          store_share: fraction of the pool kept free of cached blocks by spilling.
          store_version: name of the weights and the model's settings: engines share
            blocks of a store or its folder only under the same name. None is the
            store's own `version`, or else a digest of all weights, of `exact`, and of
            the model's `repr` or its function's constants and closure.
          checks: if True, check the cache's invariants after each window (slow).
          kept_programs: folder of executables, loaded without tracing the model;
            missing ones are compiled and added.
          clock: returns seconds, for deadlines and timings.

        Raises:
          ValueError: for invalid sizes, a model whose logits are not [B, V], or engines
            that differ between the processes of a mesh.
          RuntimeError: if other processes do not create their engines within 30
            seconds.
        """
        _check_cache(cache)
        if not isinstance(kept_programs, KeptPrograms | None):
            raise UsageError(f"kept_programs must be KeptPrograms, got {kept_programs}")
        if max_waiting is not None:
            check_counts(max_waiting=max_waiting)
        if detokenize is not None and not callable(detokenize):
            raise UsageError(
                f"detokenize must be a function of a list of token ids, such as a "
                f"tokenizer's decode, got {detokenize!r:.60}"
            )
        most_tokens = cache.max_context_length
        check_counts(max_samples=max_samples)
        sizes = find_sizes(
            GenerationConfig(
                max_new_tokens,
                max_samples,
                max_running,
                chunk_size,
                row_counts,
                exact,
                roll=roll,
            ),
            num_ahead=num_ahead,
            max_prompt_tokens=(
                most_tokens if max_prompt_tokens is None else max_prompt_tokens
            ),
            num_steps=num_steps,
            stop_sizes=stop_sizes,
            speculate=speculate,
            max_span=max_span,
            cacheable_spans=cacheable_spans,
            extra_ids=extra_ids,
        )
        decoding = DecodingOptions(
            logits_processor=logits_processor, speculate=speculate
        )
        loop: Loop
        if find_shared_mesh(cache) is None:
            loop = Loop(model, params, cache, sizes, decoding, kept_programs)
        elif kept_programs is None:
            loop = SharedLoop(model, params, cache, sizes, decoding, checks=checks)
        else:
            raise UsageError(
                "kept_programs is not supported on a mesh of several processes; pass "
                "None and use JAX's compilation cache (warm_up(programs_folder=))"
            )
        self._shared = loop if isinstance(loop, SharedLoop) else None
        ends = as_token_ids("stop_tokens", stop_tokens)
        if len(ends) > stop_sizes.tokens:
            raise UsageError(
                f"stop_tokens must have at most {stop_sizes.tokens} token ids, got "
                f"{len(ends)}; pass stop_sizes=StopSizes(tokens={len(ends)})"
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
        self._runner = StepRunner(
            scheduler.step, lambda: scheduler.is_idle, scheduler.lock
        )

    # Requests.

    @lists_arguments
    def submit(
        self, tokens: Integers | Request, **fields: Unpack[RequestFields]
    ) -> int:
        """Enqueue a request and return its number without waiting.

        Args:
          tokens: i32[P] or a list, the prompt; or a complete `Request`.
          fields: the other fields of `Request` by name, such as `max_new_tokens=20`.

        Returns:
          The request's number.

        Raises:
          RequestRefused: if the engine can never serve the request (a ValueError).
          QueueFull: if `max_waiting` requests are queued; its `seconds` estimate when
            to retry.
          EngineError: if the engine has failed permanently.
        """
        return self._take_in(None, Request.of(tokens, fields)).request_id

    @lists_arguments
    def generate(
        self,
        prompts: IntegerRows,
        *,
        limits: Integers | None = None,
        salts: Salts = 0,
        **fields: Unpack[RequestFields],
    ) -> list[Completion]:
        """Generate completions of a batch of prompts and wait for all of them.

        Args:
          prompts: i32[B, P], padded with -1, or a list of token ids for each.
          limits: i32[B], largest number of new tokens of each.
          salts: cache salts, one int or str for all prompts, or one for each.
          fields: fields of `Request`, shared by all prompts: `n` is `num_samples` of
            `jkv.generate`; each field of `sampling` has one value or B * n, and one
            seed is spread over the sequences.

        Returns:
          The completions of `jkv.generate`: sample j of prompt i has index `i * n + j`.
          A prompt that cannot be admitted has its finish reason and no tokens.

        Raises:
          RequestRefused: for invalid prompts, and if a request exceeds the engine's
            sizes.
          EngineError: if a request failed.
        """
        if fields.get("max_new_tokens") is None:
            fields["max_new_tokens"] = self._limits.max_new_tokens
        found: list[RequestState | list[Completion]] = []
        try:
            for request in split_batch(prompts, limits, salts, fields):
                found.append(self._begin(request))
            for each in found:
                if isinstance(each, RequestState):
                    self._wait(each)
        finally:
            for each in found:
                if isinstance(each, RequestState):
                    self._scheduler.cancel(each)
        completed = (
            read_completions(e) if isinstance(e, RequestState) else e for e in found
        )
        return list(itertools.chain.from_iterable(completed))

    def cancel(self, request_id: int) -> bool:
        """Cancel a request; its tokens so far are kept.

        Returns:
          True if the request was unfinished; False if it had finished or is unknown.
        """
        try:
            state = self._scheduler.find(request_id)
        except KeyError:
            return False
        return self._cancel(state)

    # Parked sequences.

    def park(self, request_id: int) -> None:
        """Keep a finished request's KV cache for `resume`, such as during a tool call.

        Its cached blocks have the highest retention class for `park_seconds`. After
        that, or earlier if other requests could need them, they are copied to the host.
        A sequence that has rolled (`roll`) is swapped out to the host as soon as it
        finishes, if it was parked before and the cache has a free row. Blocks that are
        lost are recomputed; a cache with a sliding window in every layer has no copies
        on the host. New weights drop the blocks unless `update_params` has
        `keep_cached`; the tokens are kept in any case.

        Args:
          request_id: from `submit`. An unfinished request is parked as soon as it
            finishes; failed ones are not.

        Raises:
          ValueError: for a cache without `prefix_caching`, or on a mesh of several
            processes.
        """
        self._check_leads()
        self._scheduler.park(request_id)
        self._runner.notify()

    @lists_arguments
    def resume(
        self,
        request_id: int,
        tokens: Integers,
        *,
        sample: int = 0,
        **fields: Unpack[RequestFields],
    ) -> int:
        """Submit the continuation of a parked sequence by further tokens.

        This removes the parked sequence: park the new request for its next turn.

        Args:
          request_id: as for `park`.
          tokens: i32[P] or a list, appended to the sequence, such as a tool's answer.
          sample: index of the sequence in its request.
          fields: as for `submit`, except `salt`, which is inherited. `spans` are those
            of `tokens`, counted from the first of them.

        Returns:
          The new request's number.

        Raises:
          KeyError: if the sequence is not parked or not finished.
          RequestRefused, QueueFull, EngineError: as for `submit`; it stays parked.
        """
        parked = self._scheduler.parking.take(request_id, sample)
        try:
            more = as_token_ids("tokens", tokens)
            sequence = np.concatenate([parked.tokens, more])
            if "salt" in fields:
                raise UsageError("salt is inherited from the parked sequence; omit it")
            fields["spans"] = parked.continue_spans(fields.get("spans"), len(more))
            return self._take_in(parked, Request.of(sequence, fields)).request_id
        except BaseException:
            self._scheduler.parking.put_back(parked)
            raise

    def unpark(self, request_id: int) -> bool:
        """Drop the parked sequences of a request; return True if there were any."""
        were_there = self._scheduler.unpark(request_id)
        self._runner.notify()
        return were_there

    # Results.

    def step(self) -> list[Event]:
        """Start the next window and return the events of the previous one.

        Only for callers that drive the engine themselves. If the model or JAX raises,
        the requests on the device finish as FAILED; the others continue in a fresh
        cache.

        Returns:
          An event for each sequence that has new tokens or has finished.
        """
        self._check_leads()
        return self._runner.run_step()

    def results(self, request_id: int, *, wait: bool = True) -> list[Completion]:
        """Return the completions of a request, one for each of its n sequences.

        Args:
          wait: if True, wait until the request has finished; otherwise return its
            progress, with the reason RUNNING.

        Raises:
          EngineError: if the request failed, and `wait`.
        """
        state = self._scheduler.find(request_id)
        if wait:
            self._wait(state)
        with self._runner.lock:
            return read_completions(state)

    def state(self, request_id: int) -> RequestStatus:
        """Return the state of a request."""
        state = self._scheduler.find(request_id)
        with self._runner.lock:
            return state.status

    def events(self, request_id: int) -> Generator[Event, None, None]:
        """Yield the events of a request until all of its sequences have finished.

        Closing the iterator early cancels the request. A slow consumer misses no event
        and blocks nothing.

        Raises:
          EngineError: at the end, if the request failed.
        """
        state = self._scheduler.find(request_id)
        cancel = functools.partial(self._cancel, state)
        return CancellingIterator(read_events(self._runner, state, cancel), cancel)

    def stream(self, request_id: int) -> Generator[int, None, None]:
        """Yield the tokens of a request with n=1; otherwise as `events`.

        Raises:
          ValueError: immediately, for a request with several sequences.
        """
        if self._scheduler.find(request_id).request.n > 1:
            raise ValueError(
                f"request_id {request_id} must have one sequence, got several; use "
                f"events(), where Event.sample is the index of the sequence"
            )
        events = self.events(request_id)
        tokens = (token for event in events for token in event.tokens)
        return CancellingIterator(tokens, events.close)

    def aevents(self, request_id: int) -> AsyncGenerator[Event, None]:
        """Return the async form of `events`; starts the engine's thread."""
        state = self._scheduler.find(request_id)
        cancel = functools.partial(self._cancel, state)
        events = await_events(self._runner, state, cancel)
        return AsyncCancellingIterator(events, cancel)

    @lists_arguments
    async def astream(
        self, tokens: Integers | Request, **fields: Unpack[RequestFields]
    ) -> AsyncGenerator[int, None]:
        """Submit a request and yield its tokens asynchronously.

        Closing the iterator, or cancelling its task, cancels the request.

        Args:
          tokens: the prompt.
          fields: as for `submit`, except `n`.
        """
        events = self.aevents(self.submit(tokens, **fields))
        try:
            async for event in events:
                for token in event.tokens:
                    yield token
        finally:
            await events.aclose()

    # Engine state.

    @property
    def cache(self) -> Cache:
        """The newest value of the cache, for inspection; the next step donates it."""
        return self._scheduler.loop.cache

    @property
    def has_failed(self) -> bool:
        """True if the engine has failed permanently: `submit` raises EngineError."""
        return self._scheduler.has_failed

    @property
    def is_idle(self) -> bool:
        """True if a step would do nothing: no unfinished request or unread event."""
        with self._runner.lock:
            return self._scheduler.is_idle

    def stats(self) -> EngineStats:
        """Return a snapshot: requests by state, token counts, times and blocks."""
        return self._scheduler.read_stats()

    def warm_up(
        self,
        progress: Progress | None = None,
        *,
        programs_folder: str | Path | None = None,
    ) -> int:
        """Compile all programs before the first request.

        The first `update_params(recompute=True)` compiles one more small program, the
        first parked sequence a few, and copies of recurrent states compile for each
        number of them.

        Args:
          progress: called with the name of each program, the number compiled so far and
            the total; once more at the end.
          programs_folder: folder of JAX's persistent compilation cache; ignored if JAX
            is already configured with one.

        Returns:
          The number of programs.
        """
        self._check_leads()
        if programs_folder is not None:
            keep_compiled_programs(Path(programs_folder))
        return self._runner.exclusively(lambda: self._scheduler.warm_up(progress))

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
        """Replace the weights from the next window on, without recompilation.

        Blocks cached under the old weights are removed from the prefix index. Running
        requests continue from their keys and values, with their batch indices, and
        their blocks are not shared; or they are recomputed. Queued requests use the new
        weights only. `Completion.versions` has the version of each token.

        Args:
          params: of the same shapes and dtypes. Arrays on other devices are copied to
            the placement of the old ones; others are used as they are, so pass a copy
            if you donate them.
          draft_params: of the drafter (`DraftModel.params`), likewise; None keeps the
            current ones. Its keys of running requests stay until recomputed.
          recompute: if True, preempt running requests and recompute them from their
            prompts and tokens so far.
          keep_cached: if True, keep the prefix index, so that a sequence may attend to
            keys and values of several versions.
          version: of these weights, above the last one, such as a trainer's step; None
            increments the last one, which starts at 0.
          store_version: name of these weights in the store, as for the engine; new
            blocks of the store's folder use it. None is a digest.

        Returns:
          The version.

        Raises:
          ValueError: for other shapes, dtypes or names, which it lists, and for
            `recompute` with `keep_cached`; the engine is unchanged.
        """
        self._check_leads()
        update = Update(
            params, draft_params, recompute, keep_cached, version, store_version
        )
        return self._runner.exclusively(lambda: self._scheduler.update_params(update))

    def replace_logits_processor(self, logits_processor: LogitsProcessor) -> None:
        """Replace the arrays of the logits processor, without recompilation.

        Change the meaning of a variant only while no request uses it: the state of a
        running request is kept.

        Args:
          logits_processor: of the same type, with arrays of the same shapes and dtypes.

        Raises:
          EngineError: for any other.
        """
        self._check_leads()
        self._runner.exclusively(
            lambda: self._scheduler.loop.replace_logits_processor(logits_processor)
        )

    def start(self) -> None:
        """Start a background thread that runs the steps while there is work."""
        self._check_leads()
        if self._shared is not None:
            self._shared.is_followed = True
        self._runner.start()

    def follow(self, *, find_params: FindParams | None = None) -> None:
        """Execute the commands of a mesh's first process, until it closes its engine.

        Where the cache is sharded over several processes (`jax.distributed`), each
        creates the same engine. The first, of lowest index, takes requests, schedules
        them and has the results. The others call only this method. Each window sends
        one small array; requests and strings stay on the first process. After `close`
        on the first, this may be called again.

        Args:
          find_params: returns this process's new weights, and the draft model's or
            None, if `update_params` on the first is given arrays sharded over the mesh.
            Arrays held in full by the first are sent.

        Raises:
          UsageError: on the first process, and for a cache that is not sharded over
            processes.
          EngineError: if the first process fails or stops responding. End this process
            then: JAX also ends it, after `heartbeat_timeout_seconds`.
        """
        if self._leads:
            raise UsageError(
                "follow() must be called on the other processes of a mesh, and this is "
                "the first or only one; submit requests here"
            )
        assert self._shared is not None
        self._shared.follow(find_params)

    def close(self) -> None:
        """Stop the thread, cancel unfinished requests and drop parked sequences.

        Cached blocks are spilled to the store, for the next engine, and all blocks are
        free. Results stay available, and the engine can be used without a thread. On
        several processes, `follow` returns on the others.
        """
        if not self._leads:
            return
        self._runner.stop()
        self._scheduler.cancel_all()
        self._scheduler.parking.give_up_all()
        while not self._scheduler.is_idle:
            self._runner.run_step()
        if self._shared is not None:
            self._runner.exclusively(self._shared.dismiss)
        if not self.has_failed:  # a failed engine has no blocks left to read
            self._runner.exclusively(self._scheduler.offloading.leave)

    def __enter__(self) -> "Engine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _leads(self) -> bool:
        """True if this process schedules requests."""
        return self._shared is None or self._shared.leads

    def _check_leads(self) -> None:
        if not self._leads:
            raise UsageError(
                "this method is only for the first process of the mesh; call follow() "
                "on the others"
            )

    def _take_in(self, parked: Parked | None, request: Request) -> RequestState:
        """Submit a prompt, as the continuation of a parked sequence if given."""
        self._check_leads()
        try:
            numbers = self._scheduler.salt_numbers
            inherited = None if parked is None else parked.salt
            checked = check_request(self._limits, request, numbers, inherited)
        except RequestRefused:
            self._scheduler.count_refused()
            raise
        state = self._scheduler.add(checked, parked)
        self._runner.notify()
        return state

    def _cancel(self, state: RequestState) -> bool:
        """Cancel a request, and wake the thread; return True if it was unfinished."""
        went_on = self._scheduler.cancel(state)
        self._runner.notify()
        return went_on

    def _wait(self, state: RequestState) -> None:
        """Wait until a request has finished; raise EngineError if it failed."""
        self._runner.wait_for(lambda: state.has_ended)
        state.raise_error()

    def _begin(self, request: Request) -> RequestState | list[Completion]:
        """Submit a prompt once the queue has room; return completions if refused."""
        while True:
            self._runner.wait_for(lambda: self._scheduler.has_room)
            try:
                return self._take_in(None, request)
            except RequestRefused as refused:
                if refused.reason is None:
                    raise
                reason, n = refused.reason, request.n
                return [Completion(-1, i, [], [], reason, None) for i in range(n)]
            except QueueFull:  # another thread filled the queue
                continue


def _check_cache(cache: Cache) -> None:
    """Raise if `cache` is not a cache, or has a pool for each rank."""
    if not isinstance(cache, Cache):
        raise UsageError(
            f"cache must be a jkv.Cache, got {type(cache).__name__}; create one with "
            f"jkv.init(config)"
        )
    if cache.pools is not None:
        raise UsageError(
            f"cache must have one pool, got one for each rank of mesh axis "
            f"{cache.pools.axis!r}; create an engine for each rank, with its cache on "
            f"that rank's devices (jkv.init with mesh= of these), and distribute "
            f"requests over them, or use jkv.generate, which does so for prompts"
        )
