"""The tree search of `examples/searching` in plain Python, without a cache.

Nodes are objects with lists of tokens, and the model recomputes each sequence. Numbers
are float32 and added in the example's order.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

NONE = np.float32(-np.inf)


@dataclasses.dataclass
class Rules:
    """A line to fill and the sizes of its search, with the example's fields."""

    width: int
    sizes: np.ndarray
    is_allowed: np.ndarray
    is_word_end: np.ndarray
    full_stop: int
    num_simulations: int
    num_choices: int
    max_tokens: int
    exploration: float

    def choose(self, logits, line):
        """Return the next tokens of a line: (token, log-probability) pairs."""
        if len(line) == self.max_tokens or line[-1:] == [self.full_stop]:
            return []
        shifted = logits - logits.max()
        logprobs = shifted - np.log(np.exp(shifted).sum())
        logprobs = np.where(self.is_allowed, logprobs, NONE)
        likeliest = np.argsort(-logprobs, kind="stable")[: self.num_choices]
        return [(int(t), logprobs[t]) for t in likeliest if self.fits(line, int(t))]

    def fits(self, line, token):
        column = sum(int(self.sizes[t]) for t in [*line, token])
        if token != self.full_stop:
            return bool(self.is_allowed[token]) and column < self.width
        return column == self.width and bool(line) and bool(self.is_word_end[line[-1]])

    def judge(self, line, logprobs):
        if line[-1:] != [self.full_stop]:
            return np.float32(0)
        return np.exp(np.float32(sum(logprobs, np.float32(0))) / np.float32(len(line)))


@dataclasses.dataclass
class Node:
    line: list[int]
    logprobs: list[np.float32]
    choices: list[tuple[int, np.float32]]
    children: dict[int, "Node"] = dataclasses.field(default_factory=dict)
    visits: int = 0
    total: np.float32 = np.float32(0)

    def best(self, exploration):
        """Return the index of the choice with the highest PUCT score."""
        logprobs = np.array([logprob for _, logprob in self.choices])
        priors = np.exp(logprobs - logprobs.max())
        priors /= priors.sum()
        scores = []
        for i, prior in enumerate(priors):
            child = self.children.get(i)
            visits, total = (child.visits, child.total) if child else (0, np.float32(0))
            bonus = prior * np.sqrt(np.float32(self.visits)) / np.float32(1 + visits)
            mean = total / np.float32(max(visits, 1))
            scores.append(mean + np.float32(exploration) * bonus)
        return int(np.argmax(scores))


def search(model: Callable, prompt: list[int], rules: Rules):
    """Return the root, the best line and the simulation that first found one.

    Args:
        model: returns the logits of a sequence's last token, float32[V].
        prompt: the tokens before the line.
        rules: of the line.
    """
    root = Node([], [], rules.choose(model(prompt), []))
    best, best_value, first = [], np.float32(-1), 0
    for number in range(1, rules.num_simulations + 1):
        path = [root]
        while path[-1].choices:
            node = path[-1]
            chosen = node.best(rules.exploration)
            if chosen not in node.children:
                token, logprob = node.choices[chosen]
                line, logprobs = [*node.line, token], [*node.logprobs, logprob]
                choices = rules.choose(model([*prompt, *line]), line)
                node.children[chosen] = Node(line, logprobs, choices)
                path.append(node.children[chosen])
                break
            path.append(node.children[chosen])
        line, value = roll_out(model, prompt, rules, path[-1])
        for node in path:
            node.visits += 1
            node.total += value
        if value > best_value:
            best, best_value = line, value
        if value > 0 and not first:
            first = number
    return root, best, first


def roll_out(model, prompt, rules, node):
    """Complete a node's line greedily; return the line and its value."""
    line, logprobs = list(node.line), list(node.logprobs)
    while choices := rules.choose(model([*prompt, *line]), line):
        token, logprob = max(choices, key=lambda choice: choice[1])
        line.append(token)
        logprobs.append(logprob)
    return line, rules.judge(line, logprobs)


def count_visits(root: Node):
    """Return the number of visits of each line, by its tokens."""
    nodes, visits = [root], {}
    while nodes:
        node = nodes.pop()
        visits[tuple(node.line)] = node.visits
        nodes.extend(node.children.values())
    return visits
