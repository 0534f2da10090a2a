"""Monte Carlo tree search with sequences as nodes, for B puzzles in one loop.

Each simulation adds one node to each tree: it selects an action, forks the sequence of
the node, and appends the action's token, in one call of the model for all B. The value
of a node is that of the line after greedy completion, a short rollout that is rolled
back afterwards. The puzzle's rule is exact, so no value function is learned. The
probability of a partial line is not used as a value, since it is unrelated to the
target column.

A node keeps its sequence while it may get children. The sequence is freed when all
actions have been tried, or if there are none.

Symbols: `B` puzzles, `A` actions of a node, `V` tokens in the vocabulary.
"""

from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from .puzzle import Choices, Line, Puzzle
from .tree import ROOT, Tree, back_up, hang, init_tree, is_exhausted, put, select

NO_SEQUENCE = -1


class Sequences(Protocol):
    """Storage of sequences: a pytree whose methods return an updated copy.

    Sequences are numbered; NO_SEQUENCE is padding. `paged_sequences.py` has the
    implementation.
    """

    def branch(self, seq_ids: jax.Array) -> tuple[Self, jax.Array]:
        """Copy sequences, i32[B]; return the ids of the copies, i32[B]."""

    def extend(
        self, model: Any, params: Any, seq_ids: jax.Array, tokens: jax.Array
    ) -> tuple[Self, jax.Array]:
        """Append a token, i32[B], to each sequence; return next logits, f32[B, V]."""

    def cut(self, seq_ids: jax.Array, counts: jax.Array) -> Self:
        """Truncate the last `counts` tokens, i32[B], of each sequence."""

    def drop(self, seq_ids: jax.Array) -> Self:
        """Free sequences."""


class Settings(NamedTuple):
    """Sizes of a search. Hashable, for static arguments of `jax.jit`."""

    num_simulations: int = 64  # per tree; each adds a node
    num_choices: int = 8  # A
    max_tokens: int = 24  # per line
    exploration: float = 1.25  # weight of PUCT's bonus


class Writer(NamedTuple):
    """A model with parameters, and the puzzles that constrain it."""

    model: Any
    params: Any
    puzzle: Puzzle
    settings: Settings

    def write(
        self, sequences: Sequences, seq_ids: jax.Array, tokens: jax.Array, line: Line
    ) -> tuple[Sequences, Choices, Line]:
        """Append a token to each sequence, and complete the lines greedily.

        Args:
          sequences: storage of the sequences.
          seq_ids: i32[B], sequences without the tokens.
          tokens: i32[B].
          line: lines with the tokens.

        Returns:
          The sequences with the tokens, their next candidates, and the completed lines.
        """

        def goes_on(carry):
            return ~carry[-1].is_over.all()

        def step(carry):
            sequences, first, tokens, count, line = carry
            going = ~line.is_over
            now = jnp.where(going, seq_ids, NO_SEQUENCE)
            sequences, logits = sequences.extend(self.model, self.params, now, tokens)
            count += going.astype(jnp.int32)
            choices = self.puzzle.choose(logits, line, self.settings.num_choices)
            # Later candidates follow tokens of the rollout.
            is_first = (going & (count == 1))[:, None]
            first = jax.tree.map(lambda a, b: jnp.where(is_first, a, b), choices, first)
            tokens, logprobs = choices.best
            return (
                sequences,
                first,
                tokens,
                count,
                self.puzzle.advance(line, tokens, logprobs),
            )

        count = jnp.zeros_like(tokens)
        carry = (
            sequences,
            Choices.none(len(tokens), self.settings.num_choices),
            tokens,
            count,
            line,
        )
        sequences, first, _, count, line = jax.lax.while_loop(goes_on, step, carry)
        return sequences.cut(seq_ids, jnp.maximum(count - 1, 0)), first, line


class Found(NamedTuple):
    """Best line of each puzzle.

    Simulations count from 1; the first one generates the greedy line.
    """

    lines: Line
    values: jax.Array  # f32[B]
    first: jax.Array  # i32[B], first simulation with a value > 0; 0 for none

    def take(self, lines: Line, values: jax.Array, number: jax.Array) -> "Found":
        """Replace lines by better ones of a simulation."""
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
    """Loop carry."""

    tree: Tree
    sequences: Sequences
    found: Found


def search(
    writer: Writer, sequences: Sequences, seq_ids: jax.Array, logits: jax.Array
) -> Search:
    """Search for a line of each puzzle.

    Args:
      writer: the model and the sizes of the search.
      sequences: storage of the sequences.
      seq_ids: i32[B], the sequences to continue; they are freed.
      logits: f32[B, V], next logits of these sequences.

    Returns:
      The trees, the storage without the search's sequences, and the best lines.
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
        Search(tree, sequences, found),
    )
    return end._replace(sequences=end.sequences.drop(end.tree.seq_ids.reshape(-1)))


def run_simulation(writer: Writer, now: Search, number: jax.Array) -> Search:
    """Add a node to each tree, or visit a terminal node again."""
    tree, sequences, found = now
    rows, parents, actions = place = (
        tree.rows,
        *select(tree, writer.settings.exploration),
    )
    old = tree.children[place]
    is_new = old == tree.num_nodes
    nodes = jnp.where(is_new, number, old)

    # Expansion. A finished line needs no sequence.
    tokens, logprobs = (array[place] for array in tree.choices)
    above = jax.tree.map(lambda array: array[rows, parents], tree.lines)
    line = writer.puzzle.advance(above, tokens, logprobs)
    line = line._replace(is_over=line.is_over | ~is_new)
    past = jnp.where(line.is_over, NO_SEQUENCE, tree.seq_ids[rows, parents])
    sequences, seq_ids = sequences.branch(past)

    # Evaluation.
    sequences, choices, end = writer.write(sequences, seq_ids, tokens, line)
    values = writer.puzzle.judge(end)
    tree = put(tree, nodes, choices=choices, lines=line, seq_ids=seq_ids)
    tree = back_up(hang(tree, nodes, place), nodes, values)
    for reached in (nodes, parents):
        tree, sequences = prune(tree, sequences, reached)
    return Search(tree, sequences, found.take(end, values, number))


def prune(tree: Tree, sequences: Sequences, nodes: jax.Array) -> tuple[Tree, Sequences]:
    """Free the sequences of nodes, i32[B], that get no more children."""
    seq_ids = tree.seq_ids[tree.rows, nodes]
    done = is_exhausted(tree, nodes)
    left = tree.seq_ids.at[tree.rows, nodes].set(jnp.where(done, NO_SEQUENCE, seq_ids))
    sequences = sequences.drop(jnp.where(done, seq_ids, NO_SEQUENCE))
    return tree._replace(seq_ids=left), sequences
