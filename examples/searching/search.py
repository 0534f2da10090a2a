"""Monte Carlo tree search with texts as nodes, for B puzzles in one loop.

A simulation adds one node to each tree. It selects an action, branches off the text of
its node, and extends the branch by the action's token, all B in one call of the model.
The node's value is that of the line after a greedy completion by the model: a short
rollout, rolled back afterwards. The puzzle's rule is exact, so no value has to be
learnt. The likelihood of an unfinished line would be no value: it is unrelated to the
column that the line must end in.

A node needs its text as long as it may get a child. One that has tried all its actions
gives it up, and so does one that nothing can follow.

Symbols: `B` puzzles, `A` actions of a node, `V` tokens in the vocabulary.
"""

from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from .puzzle import Choices, Line, Puzzle
from .tree import ROOT, Tree, back_up, hang, init_tree, is_exhausted, put, select

NO_TEXT = -1


class Texts(Protocol):
    """Storage of texts: a pytree with methods that return it anew.

    A text is a number; for NO_TEXT nothing is done. `paged_texts.py` has the one that
    this example uses.
    """

    def branch(self, seq_ids: jax.Array) -> tuple[Self, jax.Array]:
        """Copy texts, i32[B]; return the copies' numbers, i32[B]."""

    def extend(
        self, model: Any, params: Any, seq_ids: jax.Array, tokens: jax.Array
    ) -> tuple[Self, jax.Array]:
        """Append a token, i32[B], to each text; return logits after it, f32[B, V]."""

    def cut(self, seq_ids: jax.Array, counts: jax.Array) -> Self:
        """Take the newest tokens, i32[B], back from each text."""

    def drop(self, seq_ids: jax.Array) -> Self:
        """Give texts up."""


class Settings(NamedTuple):
    """How far to search. Hashable, for `jax.jit` to take as static."""

    num_simulations: int = 64  # nodes of a tree, beside its root
    num_choices: int = 8  # A
    max_tokens: int = 24  # of a line
    exploration: float = 1.25  # weight of the bonus in PUCT


class Writer(NamedTuple):
    """A model with its weights, and the puzzles that restrict its text."""

    model: Any
    params: Any
    puzzle: Puzzle
    settings: Settings

    def write(
        self, texts: Texts, seq_ids: jax.Array, tokens: jax.Array, line: Line
    ) -> tuple[Texts, Choices, Line]:
        """Extend texts by a token, and update their lines.

        Args:
          texts: where they are.
          seq_ids: i32[B], the texts, before the tokens.
          tokens: i32[B].
          line: the lines, with the tokens.

        Returns:
          The texts with the tokens, their next choices, and the lines at their ends.
        """

        def goes_on(carry):
            return ~carry[-1].is_over.all()

        def step(carry):
            texts, first, tokens, count, line = carry
            going = ~line.is_over
            now = jnp.where(going, seq_ids, NO_TEXT)
            texts, logits = texts.extend(self.model, self.params, now, tokens)
            count += going.astype(jnp.int32)
            choices = self.puzzle.choose(logits, line, self.settings.num_choices)
            # Later ones follow the tokens of the rollout.
            is_first = (going & (count == 1))[:, None]
            first = jax.tree.map(lambda a, b: jnp.where(is_first, a, b), choices, first)
            tokens, logprobs = choices.best
            return (
                texts,
                first,
                tokens,
                count,
                self.puzzle.advance(line, tokens, logprobs),
            )

        count = jnp.zeros_like(tokens)
        carry = (
            texts,
            Choices.none(len(tokens), self.settings.num_choices),
            tokens,
            count,
            line,
        )
        texts, first, _, count, line = jax.lax.while_loop(goes_on, step, carry)
        return texts.cut(seq_ids, jnp.maximum(count - 1, 0)), first, line


class Found(NamedTuple):
    """The best line of each puzzle, and when one was found.

    Simulations count from 1, and the first one writes the greedy line.
    """

    lines: Line
    values: jax.Array  # f32[B]
    first: jax.Array  # i32[B], the simulation that first had a value, 0 for none

    def take(self, lines: Line, values: jax.Array, number: jax.Array) -> "Found":
        """Take the lines of a simulation where they are better."""
        better = values > self.values

        def choose(new, old):
            return jnp.where(better.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        is_first = (values > 0) & (self.first == 0)
        return Found(
            jax.tree.map(choose, lines, self.lines),
            choose(values, self.values),
            jnp.where(is_first, number, self.first),
        )


class Search(NamedTuple):
    """Carry of the loop."""

    tree: Tree
    texts: Texts
    found: Found


def search(
    writer: Writer, texts: Texts, seq_ids: jax.Array, logits: jax.Array
) -> Search:
    """Search a line for each puzzle.

    Args:
      writer: the model, and the sizes of the search.
      texts: where the texts are.
      seq_ids: i32[B], the texts that the lines continue. They are given up.
      logits: f32[B, V], after those texts.

    Returns:
      The trees, the texts after the search is freed, and the best lines.
    """
    settings = writer.settings
    line = writer.puzzle.begin(settings.max_tokens)
    choices = writer.puzzle.choose(logits, line, settings.num_choices)
    tree = init_tree(settings.num_simulations + 1, settings.num_choices, line)
    roots = jnp.full_like(seq_ids, ROOT)
    tree = put(tree, roots, choices=choices, lines=line, seq_ids=seq_ids)
    found = Found(line, jnp.full(seq_ids.shape, -1.0), roots)
    end = jax.lax.fori_loop(
        1,
        settings.num_simulations + 1,
        lambda number, now: run_simulation(writer, now, number),
        Search(tree, texts, found),
    )
    return end._replace(texts=end.texts.drop(end.tree.seq_ids.reshape(-1)))


def run_simulation(writer: Writer, now: Search, number: jax.Array) -> Search:
    """Add a node to each tree, or reach one again that nothing can follow."""
    tree, texts, found = now
    rows, parents, actions = place = (
        tree.rows,
        *select(tree, writer.settings.exploration),
    )
    old = tree.children[place]
    is_new = old == tree.num_nodes
    nodes = jnp.where(is_new, number, old)

    # Expansion. A line that is over needs no text.
    tokens, logprobs = (array[place] for array in tree.choices)
    above = jax.tree.map(lambda array: array[rows, parents], tree.lines)
    line = writer.puzzle.advance(above, tokens, logprobs)
    line = line._replace(is_over=line.is_over | ~is_new)
    past = jnp.where(line.is_over, NO_TEXT, tree.seq_ids[rows, parents])
    texts, seq_ids = texts.branch(past)

    # Evaluation.
    texts, choices, end = writer.write(texts, seq_ids, tokens, line)
    values = writer.puzzle.judge(end)
    tree = put(tree, nodes, choices=choices, lines=line, seq_ids=seq_ids)
    tree = back_up(hang(tree, nodes, place), nodes, values)
    for reached in (nodes, parents):
        tree, texts = prune(tree, texts, reached)
    return Search(tree, texts, found.take(end, values, number))


def prune(tree: Tree, texts: Texts, nodes: jax.Array) -> tuple[Tree, Texts]:
    """Give up the texts of nodes, i32[B], that get no more children."""
    seq_ids = tree.seq_ids[tree.rows, nodes]
    done = is_exhausted(tree, nodes)
    left = tree.seq_ids.at[tree.rows, nodes].set(jnp.where(done, NO_TEXT, seq_ids))
    texts = texts.drop(jnp.where(done, seq_ids, NO_TEXT))
    return tree._replace(seq_ids=left), texts
