"""Small long runs: multi-turn rollouts, parked between turns, under weight updates.

The model's tokens reveal the age of the blocks that they attend to (`versioned_model`).
A rollout is a prompt and some turns; each turn continues the previous sequence and a
tool result. Some are cancelled, some abandoned while parked.
"""

import dataclasses

from jkv.decoding import FinishReason
from support.models.versioned_model import VOCABULARY, check_versions, weights

MOST_TURNS, MOST_OPEN = 3, 12
PROMPTS = 4  # prefixes shared by rollouts


class Clock:
    """A clock that advances one second per step."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@dataclasses.dataclass
class Rollout:
    """A rollout in progress: the request of its newest turn."""

    number: int
    prompt: list
    turns: int
    parked: bool = False  # waits for its tool


@dataclasses.dataclass
class Counts:
    """Counts of played events."""

    rollouts: int = 0
    updates: int = 0
    resumed: int = 0
    given_up: int = 0
    cancelled: int = 0
    tokens: int = 0
    of_older_versions: int = 0  # tokens with a context older than themselves


class Game:
    """Plays rollouts on an engine, and checks every token."""

    def __init__(self, engine, clock, rng):
        self.engine, self.clock, self.rng = engine, clock, rng
        self.counts, self.version = Counts(), 0
        starts = rng.integers(0, VOCABULARY, (PROMPTS, 8))
        self.starts = [start.tolist() for start in starts]

    def play(self, count):
        """Run `count` rollouts until all have finished."""
        left, rollouts = count, []
        while left or rollouts:
            while left and len(rollouts) < MOST_OPEN and self.rng.random() < 0.5:
                rollouts.append(self.begin())
                left -= 1
            if self.rng.random() < 0.05:
                self.update()
            self.engine.step()
            self.clock.now += 1.0
            rollouts = [each for each in rollouts if self.go_on(each)]
        self.counts.rollouts += count
        while not self.engine.is_idle:
            self.engine.step()

    def begin(self):
        """Submit a first turn."""
        rng = self.rng
        start = self.starts[rng.integers(PROMPTS)]
        prompt = [*start[: rng.integers(1, 9)], int(rng.integers(VOCABULARY))]
        number = self.engine.submit(prompt, max_new_tokens=int(rng.integers(1, 9)))
        self.engine.park(number)
        return Rollout(number, prompt, int(rng.integers(1, MOST_TURNS + 1)))

    def update(self):
        """Update the weights in one of three ways."""
        self.version += 1
        ways = {}, {"recompute": True}, {"keep_cached": True}
        way = ways[self.rng.integers(3)]
        assert self.engine.update_params(weights(self.version), **way) == self.version
        self.counts.updates += 1

    def go_on(self, rollout):
        """Advance a rollout; return True if it continues."""
        if rollout.parked:
            return self.rng.random() < 0.8 or self.resume(rollout)
        (found,) = self.engine.results(rollout.number, wait=False)
        if found.reason == FinishReason.RUNNING:
            if self.rng.random() < 0.02:
                self.counts.cancelled += self.engine.cancel(rollout.number)
            return True
        assert found.reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
        self.counts.of_older_versions += check_versions(rollout.prompt, found)
        self.counts.tokens += len(found.tokens)
        rollout.prompt = [*rollout.prompt, *found.tokens]
        rollout.turns -= 1
        rollout.parked = rollout.turns > 0
        if not rollout.parked:
            self.engine.unpark(rollout.number)
        return rollout.parked

    def resume(self, rollout):
        """Resume a rollout or abandon it; return True if it continues."""
        if self.rng.random() < 0.1:
            assert self.engine.unpark(rollout.number)
            self.counts.given_up += 1
            return False
        answer = self.rng.integers(0, VOCABULARY, self.rng.integers(3)).tolist()
        limit = int(self.rng.integers(1, 9))
        number = self.engine.resume(rollout.number, answer, max_new_tokens=limit)
        self.engine.park(number)
        rollout.number, rollout.parked = number, False
        rollout.prompt = [*rollout.prompt, *answer]
        self.counts.resumed += 1
        return True
