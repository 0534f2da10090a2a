"""The arrays of the prefix index.

Symbols in shape comments as in `jkv.state.metadata`; P places of snapshots, X tokens
that a sequence may have.
"""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Snapshots:
    """Whose states the places for snapshots hold: copies made at the end of a text.

    A place knows its text by its tokens. The one unused for longest is given up first.
    """

    lengths: jax.Array  # i32[P], tokens of the text, 0 where the place is empty
    salts: jax.Array  # i32[P], domain of the text
    hashes: jax.Array  # u32[P], of the text: it proposes, and the tokens decide
    num_pending: jax.Array  # i32[P], of the text's last tokens those pending
    last_used: jax.Array  # u32[P], the number of the use of each place that came last
    num_uses: jax.Array  # u32[], uses of all places so far
    texts: jax.Array  # i32[P, X], the tokens of each; nothing counts past its length
    # i32[S, X], the tokens told of each sequence, -1 for none.
    sequence_texts: jax.Array
    # The lengths are multiples of this; static, as prompts are cut by it.
    every: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Beside:
    """Which blocks of a group stood beside those of the leading group, N_0 of them.

    A block is found only where both agree: `partners[f] == w` and `beside[w] == f`. The
    group forgets `beside[w]` when it hands w out, and the leader sets `partners[f]`
    anew when f enters the index.
    """

    partners: jax.Array  # i32[N_0], the block beside each of the leader's, N for none
    beside: jax.Array  # i32[N], the leader's block beside each one, N_0 for none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class IndexArrays:
    """The arrays of a `PrefixIndex`, which says what they are for.

    All functions of this room take them; the methods of a `PrefixIndex` call these.
    """

    buckets: jax.Array  # i32[N, 8], blocks by the hash of their prefix, N where empty
    children: jax.Array  # i32[N, 16], blocks by the hash of their parent, N where empty
    hashes: jax.Array  # u32[N], hash of the prefix to the block's end, 0 if not indexed
    parents: jax.Array  # i32[N], the block before, N for the first of a prompt
    salts: jax.Array  # i32[N], domain of the block
    committed: jax.Array  # i32[S], tokens made visible; -1: none will ever be
    sequence_salts: jax.Array  # i32[S], domain of each sequence
    epochs: jax.Array  # u32[S], clock when the sequence was opened or last cut back
    # Where the leading group has a window, which gives parents back before their
    # children: no block has a parent, and what came before it is known by more hashes.
    wide_hashes: jax.Array | None  # u32[N, 2], of the prefix to the block's end
    hashes_above: jax.Array | None  # u32[N], of the prefix to its beginning
    # Of each group but the leading one, in their order.
    followers: tuple[Beside, ...]
    snapshots: Snapshots | None  # where there are groups with a state
