"""The engine on several processes: messages to the others, and results."""

import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.jax_versions import further
from support.serving.processes import run_pair

from jkv.decoding import GenerationConfig, Sampling
from jkv.serving import StopSizes
from jkv.serving.device.orders import (
    NUM_FURTHER_WORDS,
    NUM_WORDS,
    Order,
    Orders,
    pack_window,
    unpack_window,
)
from jkv.serving.device.programs import Arrivals, Change, find_sizes
from jkv.serving.request.request import CheckedRequest, RequestState
from jkv.sharding.processes import Broadcast

SCRIPT = pathlib.Path(__file__).with_name("serving_processes.py")
SIZES = find_sizes(
    GenerationConfig(8, num_samples=2, max_running=4, chunk_size=8),
    num_ahead=2,
    max_prompt_tokens=40,
    num_steps=2,
    stop_sizes=StopSizes(3, 2, 2),
    speculate=None,
    max_span=3,
    cacheable_spans=False,
    extra_ids=0,
)


@pytest.mark.further
@pytest.mark.one_end  # the second process finds no compiled program: JAX writes one's
@pytest.mark.parametrize("axes", ["heads", *further(["context", "heads,context"])])
def test_an_engine_on_two_processes_equals_one(axes):
    """`serving_processes.py` has the program and its assertions."""
    run_pair(SCRIPT, axes)


class Loopback(Broadcast):
    """Messages of one process to itself, kept until received."""

    def __init__(self):
        mesh = jax.sharding.Mesh(
            np.asarray(jax.devices()[:1]), ("x",), (AxisType.Auto,)
        )
        super().__init__(mesh)
        self.sent = []

    def start(self, array):
        self._under_way = None
        if array.any():
            self.sent.append(super().start(array))
            return None
        found = self.sent.pop(0)
        assert found.shape == array.shape
        return found


@pytest.mark.one_end
@pytest.mark.parametrize(
    "count",
    [0, 1, NUM_WORDS - 2, NUM_WORDS - 1, NUM_WORDS + NUM_FURTHER_WORDS],
)
def test_orders_of_any_length_arrive(count):
    broadcast = Loopback()
    orders = Orders(broadcast)
    words = np.arange(count, dtype=np.int32) - 7
    orders.send(Order.WINDOW, words)
    found, received = orders.receive()
    assert found == Order.WINDOW and not broadcast.sent
    np.testing.assert_array_equal(received, words)


def make_change(rng, count):
    """Return the message to the device about `count` requests."""
    dispatched = []
    for lane in range(count):
        tokens = rng.integers(0, 100, rng.integers(1, 40)).astype(np.int32)
        request = CheckedRequest(
            tokens=tokens,
            spans=np.arange(len(tokens), dtype=np.int32) // 2 * 2,
            n=2,
            max_new_tokens=3,
            sampling=Sampling(
                **{
                    name: rng.random(2).astype(dtype) + (dtype == np.int32)
                    for name, dtype in Sampling.dtypes.items()
                }
            ),
            stop_tokens=(2,),
            stop_sequences=((3, 4),),
            stop_strings=("a",),
            salt=lane,
            priority=-lane,
            client=None,
            variant=-1,
            timeout=None,
            keep=0,
            keep_seconds=None,
        )
        state = RequestState(request)
        state.begin(lane, 0.0, None)
        for sample in state.samples:
            sample.sequence = 2 * lane + sample.index
        dispatched.append((state, 0))
    cancelled = rng.random(SIZES.num_sequences) < 0.3
    return Change(Arrivals.of(SIZES, dispatched), cancelled)


@pytest.mark.one_end
@pytest.mark.parametrize("counts", [[], [0], [1], [4, 0, 2]])
def test_a_window_is_unpacked_as_it_was(counts):
    rng = np.random.default_rng(0)
    changes = [make_change(rng, count) for count in counts]
    words = pack_window(changes, 5)
    assert words.dtype == np.int32
    found, num_steps = unpack_window(SIZES, words)
    assert num_steps == 5 and len(found) == len(changes)
    assert jax.tree.structure(found) == jax.tree.structure(changes)
    leaves = jax.tree.leaves(found), jax.tree.leaves(changes)
    for ours, theirs in zip(*leaves, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    # A window without changes takes a few words, whatever the sizes.
    assert len(pack_window([], 5)) == 2
