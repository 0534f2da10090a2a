"""Fair scheduling of clients, compared with plain sums, and with one that floods."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st
from support.serving.small_engines import (
    AHEAD,
    RUNNING,
    assert_released,
    make_engine,
    run_all,
)

from jkv.serving import QueueFull, RequestRefused
from jkv.serving.scheduler.measures import MOST_WAIT_SECONDS, QueueWait, Rate
from jkv.serving.scheduler.queue import Waiting

pytestmark = pytest.mark.one_end

# Powers of two, so that sums of tokens divided by them are exact.
SHARES = {"b": 2.0, 3: 0.5}
CLIENTS = ["a", "b", 3, None]


class PlainWaiting:
    """The same order by scanning all requests; nothing is removed automatically."""

    def __init__(self, shares):
        self.shares, self.levels = shares, {}

    def add(self, priority, client, prompt):
        level = self.levels.setdefault(
            priority, dict(waiting=[], open=[], service={}, newest=None, floor=0.0)
        )
        if client not in [who for who, _ in level["waiting"]]:
            service = level["service"]
            others = [service[who] for who, _ in level["waiting"]]
            base = min(others, default=service.get(level["newest"], 0.0))
            level["floor"] = max(level["floor"], base)
            service[client] = max(service.get(client, 0.0), level["floor"])
        level["waiting"].append((client, prompt))
        level["open"].append(prompt)

    def pop(self):
        level = min((p for p, e in self.levels.items() if e["waiting"]), default=None)
        if level is None:
            return None
        level = self.levels[level]
        # Ties are resolved by arrival.
        taken = min(level["waiting"], key=lambda each: level["service"][each[0]])
        level["waiting"].remove(taken)
        level["newest"] = taken[0]
        level["floor"] = max(level["floor"], level["service"][taken[0]])
        return taken[1]

    def charge(self, priority, client, num_tokens):
        self.levels[priority]["service"][client] += num_tokens / self.shares.get(
            client, 1.0
        )

    def end(self, priority, client, prompt):
        level = self.levels[priority]
        level["open"].remove(prompt)
        if (client, prompt) in level["waiting"]:
            level["waiting"].remove((client, prompt))
        if not level["open"]:
            del self.levels[priority]

    @property
    def num_waiting(self):
        return sum(len(level["waiting"]) for level in self.levels.values())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "pop", "pop", "charge", "end"]),
        st.integers(0, 10**6),
        st.sampled_from(CLIENTS),
        st.sampled_from([0, 0, 1]),
        st.integers(1, 50),
    ),
    min_size=60,  # hypothesis would mostly draw a few steps
    max_size=120,
)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
@hypothesis.given(STEPS)
def test_the_order_equals_that_of_plain_sums(steps):
    waiting, plain = Waiting(SHARES), PlainWaiting(SHARES)
    owners, popped = {}, []
    for number, (verb, which, client, priority, tokens) in enumerate(steps):
        prompt = number, 0
        if verb == "add":
            owners[prompt] = priority, client
            waiting.add(priority, client, prompt)
            plain.add(priority, client, prompt)
        elif verb == "pop":
            taken = waiting.pop()
            assert taken == plain.pop()
            if taken is not None:
                popped.append(taken)
                waiting.charge(*owners[taken], tokens)
                plain.charge(*owners[taken], tokens)
        elif verb == "charge" and popped:
            owner = owners[popped[which % len(popped)]]
            waiting.charge(*owner, tokens)
            plain.charge(*owner, tokens)
        elif verb == "end" and owners:
            prompt = list(owners)[which % len(owners)]
            owner = owners.pop(prompt)
            waiting.end(*owner, prompt)
            plain.end(*owner, prompt)
            if prompt in popped:
                popped.remove(prompt)
        assert waiting.num_waiting == plain.num_waiting


def serve(waiting, owners, cost, count):
    """Pop prompts and charge their tokens; return the tokens of each client."""
    served = dict.fromkeys(cost, 0)
    for _ in range(count):
        prompt = waiting.pop()
        client = owners[prompt]
        waiting.charge(0, client, cost[client])
        served[client] += cost[client]
        waiting.end(0, client, prompt)
    return served


def flood(waiting, owners, client, count):
    for _ in range(count):
        prompt = len(owners), 0
        owners[prompt] = client
        waiting.add(0, client, prompt)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    st.lists(st.integers(1, 100), min_size=4, max_size=4),
)
def test_backlogged_clients_get_their_shares(shares, costs):
    """Two clients never differ by more than one prompt of each, over their shares."""
    shares, costs = (dict(zip(CLIENTS, each, strict=True)) for each in (shares, costs))
    waiting, owners = Waiting(shares), {}
    for client in CLIENTS:
        flood(waiting, owners, client, 200)
    served = dict.fromkeys(CLIENTS, 0)
    for _ in range(20):
        for client, tokens in serve(waiting, owners, costs, 10).items():
            served[client] += tokens
        had = [served[client] / shares[client] for client in CLIENTS]
        one = [costs[client] / shares[client] for client in CLIENTS]
        assert max(had) - min(had) <= max(one) * (1 + 1e-9)


def test_an_idle_client_accumulates_no_credit():
    waiting, owners, cost = Waiting({}), {}, dict.fromkeys(CLIENTS, 10)
    flood(waiting, owners, "a", 300)
    assert serve(waiting, owners, cost, 100)["a"] == 1000
    flood(waiting, owners, "b", 100)
    served = serve(waiting, owners, cost, 20)
    assert served["a"] == served["b"] == 100
    # A client that briefly leaves keeps its excess.
    waiting, owners = Waiting({}), {}
    flood(waiting, owners, "a", 1)
    flood(waiting, owners, "b", 5)
    serve(waiting, owners, cost | {"a": 35}, 1)
    flood(waiting, owners, "a", 1)
    assert owners[waiting.pop()] == "b"
    served = serve(waiting, owners, cost, 4)
    assert served["b"] == 40 and served["a"] == 0
    # The same if its remaining requests are cancelled.
    waiting, owners = Waiting({}), {}
    flood(waiting, owners, "a", 2)
    flood(waiting, owners, "b", 3)
    assert waiting.pop() == (0, 0)
    waiting.charge(0, "a", 35)
    waiting.end(0, "a", (1, 0))
    waiting.end(0, "a", (0, 0))
    flood(waiting, owners, "c", 1)
    flood(waiting, owners, "a", 1)
    assert serve(waiting, owners, dict(a=10, b=10, c=10), 4) == dict(a=0, b=30, c=10)


def test_ties_are_served_in_order_of_arrival():
    waiting, owners = Waiting({}), {}
    for client in ("a", "b", "a"):
        flood(waiting, owners, client, 1)
    waiting.end(0, "a", (0, 0))
    assert [owners[waiting.pop()] for _ in range(2)] == ["b", "a"]


def test_idle_clients_take_no_memory():
    """Neither many clients with one request each, nor many priorities."""
    waiting, owners = Waiting({}), {}
    flood(waiting, owners, "a", 3)
    for number in range(1000):
        prompt = 10_000 + number, 0
        waiting.add(0, number, prompt)
        waiting.add(-number, "c", (20_000 + number, 0))
        if number % 2:
            waiting.end(0, number, prompt)
            continue
        while (taken := waiting.pop()) != prompt:
            owner = (0, owners[taken]) if taken in owners else (20_000 - taken[0], "c")
            waiting.charge(*owner, 1)
            waiting.end(*owner, taken)
            if taken in owners:
                flood(waiting, owners, "a", 1)
        waiting.charge(0, number, 1)
        waiting.end(0, number, prompt)
    level = waiting._levels[0]
    assert len(level._lines) < 10 and len(level._order) < 10
    assert len(waiting._order) == len(waiting._ordered) < 10
    assert len(waiting._levels) <= 1 + 500


@pytest.mark.parametrize("share", [0, -1.0, math.inf, math.nan])
def test_a_share_must_be_a_positive_number(share):
    with pytest.raises(ValueError, match=f"> 0, got {share!r} for 'a'"):
        make_engine(shares={"a": share})


def test_a_flood_of_one_client_does_not_delay_others():
    """A request waits only for those already submitted to the device."""
    owners = dict(tokens=[5, 6], max_new_tokens=3)  # one window each
    turns = {}
    for name in ("few", "many"):  # the second queue is first come, first served
        engine = make_engine()
        for _ in range(60):
            engine.submit(**owners, client="many")
        engine.step()
        few = [engine.submit(**owners, client=name) for _ in range(RUNNING)]
        turns[name] = 0
        while any(engine.state(number).value != "finished" for number in few):
            engine.step()
            turns[name] += 1
        run_all(engine)
        assert_released(engine)
    ahead = math.ceil((RUNNING + AHEAD) / RUNNING)
    assert turns["few"] <= 2 * ahead + 2
    assert turns["many"] >= 60 / RUNNING > 2 * turns["few"]


def test_tokens_are_divided_in_proportion_to_the_shares():
    """One flood of long prompts and completions, one of short ones."""
    engine = make_engine(shares={"long": 3.0})
    clients = {}
    for number in range(120):
        client = "short" if number < 80 else "long"
        size = dict(short=(1, 2), long=(8, 10))[client]
        tokens, most = list(range(size[0])), size[1]
        request = engine.submit(tokens, max_new_tokens=most, client=client)
        clients[request] = client, sum(size)
    had = dict.fromkeys(["short", "long"], 0)
    while engine.stats().finished < 40:
        engine.step()
    for request, (client, size) in clients.items():
        if engine.state(request).value == "finished":
            had[client] += size
    # Running and submitted requests are not counted.
    beside = 18 * (RUNNING + AHEAD)
    assert abs(had["long"] / 3 - had["short"]) < beside / 3 + 18
    assert had["long"] > 2 * had["short"] > 0
    engine.close()


def test_client_names_are_strings_numbers_or_none():
    engine = make_engine()
    with pytest.raises(RequestRefused, match="client must be a str, an int or None"):
        engine.submit([1], client=("a", 1))
    for client in ("a", 7, None):
        engine.submit([1], client=client, max_new_tokens=1)
    run_all(engine)
    assert engine.stats().finished == 3


def test_queue_full_estimates_grow_per_client_refusal():
    now = [100.0]
    engine = make_engine(max_waiting=8, clock=lambda: now[0])
    refused = []

    def submit(count):
        for _ in range(count):
            try:
                engine.submit([1, 2], max_new_tokens=6)
            except QueueFull as full:
                refused.append(full.seconds)

    submit(10)
    # Nothing has started, so nothing is measured.
    assert refused == [1.0, 1.0]
    run_all(engine)
    assert engine.stats().finished == 8


def test_estimates_follow_the_rate_of_admission():
    begun, room = Rate(), QueueWait()
    assert room.find_wait(begun, 0.0) == 1.0
    for now in range(6):
        begun.add(4, float(now))
    assert [room.find_wait(begun, 5.0) for _ in range(3)] == [0.25, 0.5, 0.75]
    # The estimate has passed, and the rate covers the last ten seconds.
    assert room.find_wait(begun, 10.0) == pytest.approx(10 / 20)
    assert room.find_wait(begun, 30.0) == 1.0
    assert begun.read(30.0) == 0.0


def test_estimates_fall_if_admission_speeds_up():
    """The newest rate replaces estimates made at a slower rate."""
    begun, room = Rate(), QueueWait()
    begun.add(1, 0.0)
    begun.add(1, 8.0)
    waits = [room.find_wait(begun, 8.0) for _ in range(20)]
    assert waits[:3] == [8.0, 16.0, 24.0] and waits[-1] == MOST_WAIT_SECONDS
    begun.add(100, 9.0)
    assert room.find_wait(begun, 9.0) < 1.0
