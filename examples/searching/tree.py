"""Search trees of fixed size, as arrays.

A simulation of Monte Carlo tree search descends from the root, adds one node, and adds
its value to all ancestors. The descent weighs these values against the model's
probabilities by PUCT, as in AlphaZero (Silver et al., 2017, arXiv:1712.01815) and
MuZero (Schrittwieser et al., 2019, arXiv:1911.08265, appendix B), with a constant
weight. All trees take each step together, as in mctx (github.com/google-deepmind/mctx).

Symbols: `B` trees, `N` nodes per tree, `A` actions per node. The index `N` means no
node.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .puzzle import Choices

ROOT = 0


class Tree(NamedTuple):
    """B trees. The actions of a node are candidates for the next token."""

    parents: jax.Array  # i32[B, N], N for the root
    children: jax.Array  # i32[B, N, A], N for untried actions
    visits: jax.Array  # i32[B, N], simulations through the node
    totals: jax.Array  # f32[B, N], sums of their values
    choices: Choices  # [B, N, A]
    lines: Any  # data of the caller, a pytree of [B, N, ...]
    seq_ids: jax.Array  # i32[B, N], -1 for none

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    @property
    def rows(self) -> jax.Array:
        """Tree indices, i32[B]; `array[tree.rows, nodes]` selects a node per tree."""
        return jnp.arange(self.parents.shape[0], dtype=jnp.int32)


# Position of an action: indices of tree, node and action, i32[B] each.
Place = tuple[jax.Array, jax.Array, jax.Array]


def init_tree(num_nodes: int, num_actions: int, line: Any) -> Tree:
    """Return trees without nodes.

    Args:
      num_nodes: N.
      num_actions: A.
      line: example data of one node per tree, a pytree of [B, ...].
    """
    num_trees = jax.tree.leaves(line)[0].shape[0]
    nodes, actions = (num_trees, num_nodes), (num_trees, num_nodes, num_actions)
    return Tree(
        parents=jnp.full(nodes, num_nodes, jnp.int32),
        children=jnp.full(actions, num_nodes, jnp.int32),
        visits=jnp.zeros(nodes, jnp.int32),
        totals=jnp.zeros(nodes, jnp.float32),
        choices=Choices.none(*actions),
        lines=jax.tree.map(lambda x: jnp.zeros((*nodes, *x.shape[1:]), x.dtype), line),
        seq_ids=jnp.full(nodes, -1, jnp.int32),
    )


def put(tree: Tree, nodes: jax.Array, **fields: Any) -> Tree:
    """Set fields of one node per tree.

    Args:
      tree: the trees.
      nodes: i32[B].
      **fields: fields of `Tree`, [B, ...] each.
    """

    def set_node(array: jax.Array, new: jax.Array) -> jax.Array:
        return array.at[tree.rows, nodes].set(new)

    old = {name: getattr(tree, name) for name in fields}
    return tree._replace(**jax.tree.map(set_node, old, fields))


def hang(tree: Tree, nodes: jax.Array, place: Place) -> Tree:
    """Make a node of each tree, i32[B], the child of an action."""
    return tree._replace(
        parents=tree.parents.at[tree.rows, nodes].set(place[1]),
        children=tree.children.at[place].set(nodes),
    )


def score_actions(tree: Tree, nodes: jax.Array, exploration: float) -> jax.Array:
    """Return the PUCT scores of a node's actions, f32[B, A]; -inf for illegal ones.

    The score is the action's mean value (0 if untried) plus a bonus, which grows with
    the model's probability and decreases with visits.

    Args:
      tree: the trees.
      nodes: i32[B].
      exploration: weight of the bonus.
    """
    at = tree.rows, nodes
    below = tree.rows[:, None], tree.children[at]
    of_nodes = tree.visits.astype(jnp.float32)
    visits = of_nodes.at[below].get(mode="fill", fill_value=0.0)
    totals = tree.totals.at[below].get(mode="fill", fill_value=0.0)
    logprobs = tree.choices.logprobs[at]
    passed = jnp.sqrt(of_nodes[at])[:, None]
    bonus = jax.nn.softmax(logprobs) * passed / (1.0 + visits)
    scores = totals / jnp.maximum(visits, 1.0) + exploration * bonus
    return jnp.where(jnp.isfinite(logprobs), scores, -jnp.inf)


def select(tree: Tree, exploration: float) -> tuple[jax.Array, jax.Array]:
    """Descend from the roots to an untried action or one with a terminal child.

    Args:
      tree: the trees, with actions at their roots.
      exploration: weight of the bonus.

    Returns:
      The last nodes of the descents, i32[B], and their best actions, i32[B].
    """
    rows = tree.rows

    def look(nodes):
        """Return the best actions, and whether they lead to an inner node."""
        scores = score_actions(tree, nodes, exploration)
        actions = jnp.argmax(scores, axis=1).astype(jnp.int32)
        children = tree.children[rows, nodes, actions]
        logprobs = tree.choices.logprobs.at[rows, children].get(
            mode="fill", fill_value=-jnp.inf
        )
        return nodes, actions, children, jnp.isfinite(logprobs).any(axis=1)

    def descend(walk):
        nodes, _, children, goes_on = walk
        return look(jnp.where(goes_on, children, nodes))

    start = look(jnp.full_like(rows, ROOT))
    nodes, actions, *_ = jax.lax.while_loop(lambda walk: walk[-1].any(), descend, start)
    return nodes, actions


def back_up(tree: Tree, nodes: jax.Array, values: jax.Array) -> Tree:
    """Add a visit and a value, f32[B], to a node of each tree and its ancestors."""
    rows, none = tree.rows, tree.num_nodes

    def ascend(carry):
        nodes, visits, totals = carry
        visits = visits.at[rows, nodes].add(1, mode="drop")
        totals = totals.at[rows, nodes].add(values, mode="drop")
        above = tree.parents.at[rows, nodes].get(mode="fill", fill_value=none)
        return above, visits, totals

    carry = nodes, tree.visits, tree.totals
    _, visits, totals = jax.lax.while_loop(
        lambda carry: (carry[0] < none).any(), ascend, carry
    )
    return tree._replace(visits=visits, totals=totals)


def is_exhausted(tree: Tree, nodes: jax.Array) -> jax.Array:
    """Return True for nodes, i32[B], whose legal actions all have children, bool[B]."""
    has_child = tree.children[tree.rows, nodes] < tree.num_nodes
    is_legal = jnp.isfinite(tree.choices.logprobs[tree.rows, nodes])
    return (has_child | ~is_legal).all(axis=1)
