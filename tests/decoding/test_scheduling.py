"""Scheduling functions on small arrays, compared with lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.decoding.model.runner import choose_size, share_rows
from jkv.decoding.scheduler.queue import (
    Candidates,
    choose_seated,
    drop_from_queue,
    find_waiting,
    make_queue,
    order_queue,
    seat,
)
from jkv.decoding.scheduler.state import (
    Places,
    find_oldest,
    find_youngest_running,
    vacate,
)

pytestmark = pytest.mark.one_end

PLACES, SEQUENCES, LANES, ROWS = 5, 12, 3, 9
share = jax.jit(share_rows, static_argnums=2)


@jax.jit
def seat_next(places, queue, ended, costs, num_free_blocks, num_free_places):
    waiting = find_waiting(places, queue, LANES)
    has_ended = ended[waiting[0]]
    costs = tuple(cost[waiting[0]] for cost in costs)
    candidates = Candidates(*waiting, has_ended, costs, jnp.zeros_like(has_ended))
    result = choose_seated(candidates, num_free_blocks, num_free_places)
    return seat(places, queue, candidates, result)


leave = jax.jit(vacate)
oldest = jax.jit(find_oldest, static_argnums=2)
drop, order = jax.jit(drop_from_queue), jax.jit(order_queue)


def by_age(places, queue):
    """Return the running, the preempted and the queued sequences, as lists."""
    places, queue = jax.device_get((places, queue))
    assert sorted(places.ages) == list(range(PLACES))
    order = places.sequences[np.argsort(places.ages)].tolist()
    num_running, num_started = int(places.num_running), int(places.num_started)
    head, count = int(queue.head), int(queue.count)
    waiting = queue.ids[(head + np.arange(count)) % SEQUENCES].tolist()
    return order[:num_running], order[num_running:num_started], waiting


@pytest.mark.parametrize("seed", range(4))
def test_places_and_queue_equal_three_lists(seed):
    rng = np.random.default_rng(seed)
    running, preempted, waiting = [], [], list(range(SEQUENCES))
    places = Places.empty(PLACES)
    queue = make_queue(jnp.arange(SEQUENCES), jnp.ones(SEQUENCES, bool))
    ended = np.zeros(SEQUENCES, bool)
    # A sequence needs blocks of both groups of layers.
    costs = rng.integers(0, 5, (SEQUENCES, 2)).astype(np.int32)
    for _ in range(60):
        blocks = rng.integers(0, 9, 2).astype(np.int32)
        room = rng.integers(0, PLACES - len(running) + 1)
        places, queue = seat_next(
            places, queue, ended, tuple(costs.T), tuple(blocks), np.int32(room)
        )
        for _ in range(LANES):
            line = preempted or waiting
            if not line:
                break
            if not ended[line[0]]:
                if (costs[line[0]] > blocks).any() or not room:
                    break
                blocks, room = blocks - costs[line[0]], room - 1
                running.append(line[0])
            line.pop(0)
        assert by_age(places, queue) == (running, preempted, waiting)

        if running and rng.random() < 0.4:
            places = places._replace(num_running=places.num_running - 1)
            preempted.insert(0, running.pop())
        if rng.random() < 0.5:
            goes = rng.random(SEQUENCES) < 0.2
            ended |= goes
            places = leave(places, goes[np.asarray(places.sequences)])
            running = [i for i in running if not goes[i]]
            preempted = [i for i in preempted if not goes[i]]
        if rng.random() < 0.2:
            queue = drop(queue, ended)
            waiting = [i for i in waiting if not ended[i]]
        if rng.random() < 0.2:
            ranks = rng.choice([-(2**31), -1, 0, 2**31 - 1], SEQUENCES)
            queue = order(queue, ranks.astype(np.int32))
            waiting.sort(key=lambda i: ranks[i])  # noqa: B023 (used at once)
        assert by_age(places, queue) == (running, preempted, waiting)
        youngest = int(find_youngest_running(places))
        assert youngest == PLACES or places.sequences[youngest] == running[-1]
        chosen = rng.random(PLACES) < 0.6
        found = [i for i in oldest(places, chosen, LANES).tolist() if i < PLACES]
        ages = np.asarray(places.ages)
        expected = sorted(np.flatnonzero(chosen).tolist(), key=lambda i: ages[i])
        assert found == expected[:LANES]


@pytest.mark.parametrize("seed", range(8))
def test_each_sequence_gets_a_row_and_the_oldest_the_rest(seed):
    rng = np.random.default_rng(seed)
    left = rng.choice([0, 1, 2, 7, 2**30], PLACES).astype(np.int32)
    ages = rng.permutation(PLACES).astype(np.int32)
    counts = share(left, ages, ROWS).tolist()
    expected, spare = [0] * PLACES, ROWS - int((left > 0).sum())
    for i in np.argsort(ages):
        more = min(int(left[i]) - 1, spare) if left[i] else 0
        expected[i] = int(left[i] > 0) + more
        spare -= more
    assert counts == expected and sum(counts) <= ROWS


def test_the_smallest_sufficient_step_is_chosen():
    sizes = (2, 8, 20)
    found = [int(choose_size(jnp.int32(n), sizes)) for n in (0, 2, 3, 8, 9, 20)]
    assert found == [0, 0, 1, 1, 2, 2]
