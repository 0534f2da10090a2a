"""The program of both processes of `test_engine_processes.py`, with one engine.

    python serving_processes.py PROCESS PORT AXES

AXES are `heads`, `context` or `heads,context`: mesh axes of two devices, named after
the sharded dimension. The first axis spans the processes. Each has another drafter:
none, one on the target's hidden states, and a draft model. The first process runs the
same requests on the shared engine and on one of its own, and compares; the second
follows.
"""

import asyncio
import os
import sys
import traceback

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

NEW_TOKENS, STOP_TOKENS = 8, 400
SIZES = dict(num_blocks=16, block_size=4, max_sequences=8, max_context_length=24)
# Equal prompts give cache hits; the last waits on the host at first.
PROMPTS = [[5, 9, 5, 1], [11, 7, 3, 8], [4], [5, 9, 5, 1, 7], [2, 6, 4], [4, 4]]


class Clock:
    """A clock that the test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def find_config():
    """Return the configuration of the target's cache."""
    from support.models.small_attention_model import DIM, KV_HEADS, LAYERS

    import jkv

    return jkv.CacheConfig(
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype="float32",
        prefix_caching=True,
        **SIZES,
    )


def make_drafter(axes):
    """Return the drafter for these axes, with layers in the cache, or None."""
    from support.models.following_drafter import make_following
    from support.models.small_attention_model import attention_model, attention_params

    import jkv

    if axes == ["heads"]:
        return None
    if axes == ["context"]:
        return make_following(**SIZES)
    return jkv.DraftModel(
        model=attention_model,
        params=attention_params(),
        config=find_config(),
        num_tokens=2,
        cost=1.0,
    )


def make_engine(mesh, clock, drafter=None, **changes):
    """Create an engine on a mesh, or on this process only."""
    from support.models.small_attention_model import attention_model, attention_params

    import jkv
    from jkv.serving import Engine, StopSizes

    config = find_config()
    if drafter is not None:
        config = jkv.with_drafter(config, drafter)
    where = {} if mesh is None else dict(mesh=mesh, **{n: n for n in mesh.axis_names})
    options = dict(
        max_running=2,
        num_ahead=2,
        max_new_tokens=NEW_TOKENS,
        max_prompt_tokens=6,
        max_samples=1,
        num_steps=2,
        row_counts=(6,),
        stop_sizes=StopSizes(STOP_TOKENS, 0, 0),
        detokenize=lambda tokens: "".join(chr(97 + token) for token in tokens),
        checks=True,
        clock=clock,
        speculate=drafter,
    )
    params = attention_params()
    cache = jkv.init(config, **where)
    return Engine(attention_model, params, cache, **(options | changes))


def play(engine, clock):
    """Run requests of each kind, with each finish reason; return their results."""
    from support.models.small_attention_model import attention_params

    from jkv.decoding import Sampling

    text = engine.results(
        engine.submit([5, 9], max_new_tokens=6, stop_strings=["no"]), wait=True
    )[0].text
    numbers = [
        engine.submit(
            prompt,
            n=1 + number % 3,
            sampling=Sampling(temperature=float(number % 2), seeds=number),
            stop_tokens=range(100, 100 + STOP_TOKENS) if number else [2],
            priority=-number % 2,
            client=number % 3,
            timeout=5.0 if number == 4 else None,
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    # A stop string within the completion.
    numbers.append(engine.submit([5, 9], stop_strings=[text[2:4]]))
    for turn in range(40):
        if turn == 1:
            assert engine.cancel(numbers[3])
        if turn == 2:
            clock.now += 10  # past the deadline of one
        if turn == 3:
            numbers.append(engine.submit([8, 2, 8], n=2))
            new = jax.tree.map(lambda array: np.asarray(array) * 2, attention_params())
            engine.update_params(new, recompute=True)
        if turn == 6:
            engine.update_params(attention_params(), keep_cached=True)
        engine.step()
    assert engine.is_idle
    return [engine.results(number) for number in numbers]


def double_on_mesh(mesh):
    """Return other weights placed on the mesh, without a draft model's."""
    from support.models.small_attention_model import attention_params

    everywhere = NamedSharding(mesh, PartitionSpec())

    def put(array):
        whole = np.asarray(array) * 2
        return jax.make_array_from_callback(whole.shape, everywhere, whole.__getitem__)

    return jax.tree.map(put, attention_params()), None


def assert_same(found, wanted):
    """Assert equal completions, and logprobs within float32 summation error."""
    for ours, theirs in zip(sum(found, []), sum(wanted, []), strict=True):
        logprobs = ours.logprobs, theirs.logprobs
        np.testing.assert_allclose(*logprobs, atol=2e-5, rtol=0)
        apart = [each._replace(logprobs=None, request_id=0) for each in (ours, theirs)]
        assert apart[0] == apart[1]


def lead(engine, drafter, mesh, clock):
    """Run on both engines, use the other interfaces, and leave no request."""
    import jkv

    assert engine.warm_up() == 3
    found = play(engine, clock)
    reasons = {each.reason.name for each in sum(found, [])}
    assert reasons == {
        "STOP",
        "LENGTH",
        "CANCELLED",
        "DEADLINE",
    }, reasons
    alone_clock = Clock()
    alone = make_engine(None, alone_clock, drafter)
    assert_same(found, play(alone, alone_clock))
    stats, counts = engine.stats(), alone.stats()
    if drafter is not None:
        assert stats.draft_tokens > stats.accepted_tokens > 0
        assert stats.draft_tokens == counts.draft_tokens
        assert stats.accepted_tokens == counts.accepted_tokens
    jkv.check(alone.cache)
    assert int(jkv.num_free_blocks(engine.cache)) == 16
    engine.close()
    engine.close()  # the second says nothing

    # The second process follows again, and is released during a request.
    async def read_some():
        engine.submit([3, 1])
        async for _ in engine.astream([5, 9, 5]):
            return

    with engine:
        asyncio.run(read_some())
        engine.update_params(double_on_mesh(mesh)[0])
        alone.update_params(jax.tree.map(np.asarray, double_on_mesh(mesh)[0]))
        wanted = alone.generate(PROMPTS[:3])
        assert_same([engine.generate(PROMPTS[:3])], [wanted])


def assert_refused(call, message):
    """Assert that a call raises the expected error."""
    try:
        call()
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"not refused: {message}")


def misuse(engine, mesh, process):
    """Assert that invalid calls raise on each process."""
    from jkv.serving import KeptPrograms

    if process == 0:
        assert_refused(engine.follow, "must be called on the other processes")
        assert_refused(lambda: engine.park(0), "is not supported on a mesh")
    else:
        calls = {
            "submit": lambda: engine.submit([1]),
            "step": engine.step,
            "start": engine.start,
            "warm_up": engine.warm_up,
            "update_params": lambda: engine.update_params(None),
        }
        for call in calls.values():
            assert_refused(call, "call follow() on the others")
        engine.close()  # there is nothing to end here
    kept = KeptPrograms("a model", "nowhere")
    assert_refused(
        lambda: make_engine(mesh, Clock(), kept_programs=kept),
        "kept_programs is not supported",
    )
    assert_refused(
        lambda: make_engine(mesh, Clock(), max_new_tokens=5 + process),
        "one of the sizes must be the same",
    )


def main(process, axes):
    """Create the engine as the other process does, and run this process's part."""
    devices = np.asarray(jax.devices()).reshape((2,) * len(axes))
    mesh = jax.sharding.Mesh(devices, axes, (AxisType.Auto,) * len(axes))
    clock = Clock()
    drafter = make_drafter(axes)
    engine = make_engine(mesh, clock, drafter)
    misuse(engine, mesh, process)
    if process == 0:
        lead(engine, drafter, mesh, clock)
    else:
        engine.follow()
        engine.follow(find_params=lambda: double_on_mesh(mesh))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    number, port = map(int, sys.argv[1:3])
    axes = sys.argv[3].split(",")
    jax.config.update("jax_num_cpu_devices", len(axes))
    address = f"localhost:{port}"
    jax.distributed.initialize(
        address,
        2,
        number,
        coordinator_bind_address=None if number else address,
        shutdown_timeout_seconds=10,
    )
    try:
        main(number, axes)
    except BaseException:
        # Exit immediately: Python's shutdown would wait for the other process.
        traceback.print_exc()
        os._exit(1)
    print("done", flush=True)
