"""Operations on sequences, by the kind of groups and by the past of the sequence.

A letter is a cell: `+` is exact, as the oracle of the folding model computes, with each
sequence of the cache as expected; any other letter is a reason in `REASONS`. The five
letters of a kind of groups are the pasts of the sequence; the last two are for a cache
sharded over a mesh, and for one with a pool per rank, with newest tokens pending:

    computed, hit, guesses (its newest tokens are pending), swap, file; mesh, pools
"""

import inspect
from typing import NamedTuple

import pytest

import jkv
from jkv.status import UsageError
from support.caches import kept_sequences
from support.states import state_loops, state_verbs
from support.states.folding_model import KINDS

PASTS = (*kept_sequences.PASTS.values(), *kept_sequences.MOVES.values())
PLACES = ("mesh", "pools")

VERBS = """
                     keys     window   keys+state window+state state
append               +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
read                 +++++ ++ +++++ ++ +++++ ++   +++++ ++     kkkkk kk
read_state           sssss ss sssss ss +++++ ++   +++++ ++     +++++ ++
write_state          sssss ss sssss ss +++++ ++   +++++ ++     +++++ ++
fork                 +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
fork_at_snapshot     +++++ ++ +w+++ ++ +++t+ ++   +++t+ ++     +++t+ ++
truncate_by_two      +++++ ++ +w+++ ++ nn+nn ++   nn+nn ++     nn+nn ++
truncate_to_snapshot +++++ ++ +w+++ ++ +++t+ ++   +++t+ ++     +++t+ ++
truncate_to_nothing  +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
reorder              +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
free                 +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
match                +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
evict_cached         +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
invalidate           +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
clear_prefixes       +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
evict                +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
evict_older_than     +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
swap_out_and_in      +++++ +p +++++ +p +++++ +p   +++++ +p     +++++ +p
save_and_load        +++++ +i +++++ +i +++++ +i   +++++ +i     +++++ +i
compact              +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
resize               +++++ +p +++++ +p +++++ +p   +++++ +p     +++++ +p
debug                +++++ +p +++++ +p +++++ +p   +++++ +p     +++++ +p
"""
LOOPS = """
                     keys     window   keys+state window+state state
generate_plainly     +++++ aa +++++ aa +++++ ++   +++++ aa     +++++ aa
generate_with_lookup +++++ ++ +++++ ++ +++++ ++   +++++ ++     +++++ ++
generate_with_draft  +oooo oo +oooo oo +oooo oo   +oooo oo     +oooo oo
extend_twice         +++++ aa +++++ aa +++++ ++   +++++ aa     +++++ aa
search_with_beams    +++++ aa +++++ aa +++++ ++   +++++ aa     +++++ aa
score                +oooo oo +oooo oo +oooo oo   +oooo oo     +oooo oo
engine               +++++ ap +++++ ap +++++ +p   +++++ ap     +++++ ap
"""
# By letter: the expected error and its message (None: the cell is not run).
REASONS = {
    "k": (UsageError, "layer 0 keeps no keys and values"),
    "s": (UsageError, "layer 0 keeps no state"),
    # No state at that length: it includes every token, and none is pending.
    "n": (jkv.InvalidArgument, "INVALID_ARGUMENT"),
    # The window released tokens that the row after the cut needs.
    "w": (jkv.InvalidArgument, "INVALID_ARGUMENT"),
    # A swapped-out sequence loses its tokens, and with them the link to its snapshots.
    # Prompts still find them.
    "t": (jkv.InvalidArgument, "INVALID_ARGUMENT"),
    # Host operations take one pool.
    "p": (UsageError, "works on one pool"),
    "i": (UsageError, "seq_ids is not supported for a cache with"),
    # On several devices a loop consists of its verbs, which run with each kind; the
    # largest loop also does, the others only with keys+state.
    "a": (None, "played with keys+state"),
    # `score` and drafters create caches of their own.
    "o": (None, "the cache of the past is not used"),
}


class Row(NamedTuple):
    """A row of the table for one kind of groups."""

    name: str
    kind: str
    letters: str  # by past
    places: str  # on a mesh, and in pools

    def play(self, letter, past, folder, **where):
        """Assert that a cell behaves as its letter states."""
        error, words = REASONS.get(letter, (None, ""))
        if letter != "+" and error is None:
            return
        kept = make(past, self.kind, folder, **where).copy()
        if letter == "+":
            self._run(kept, folder)
        else:
            before = kept.copy()
            with pytest.raises(error, match=words):
                self._run(kept, folder)
            kept.sequences = before.sequences
        kept.check()

    def _run(self, kept, folder):
        """Run the row's operation."""
        module = state_loops if hasattr(state_loops, self.name) else state_verbs
        function = getattr(module, self.name)
        more = [folder] if "folder" in inspect.signature(function).parameters else []
        function(kept, *more)


_MADE = {}


def make(past, kind, folder, **where):
    """Return a cache with a past, created once: it is a value."""
    key = past, kind, *where.values()
    if key not in _MADE:
        _MADE[key] = past(kind, folder, **where)
        _MADE[key].check()
    return _MADE[key]


def read_table(text):
    """Return the rows of a table, one for each kind of groups."""
    heading, *lines = text.strip().splitlines()
    assert heading.split() == [*KINDS]
    rows = []
    for line in lines:
        name, *cells = line.split()
        pairs = zip(cells[::2], cells[1::2], strict=True)
        rows += [
            Row(name, kind, *pair) for kind, pair in zip(KINDS, pairs, strict=True)
        ]
    assert all(
        len(row.letters) == len(PASTS) and len(row.places) == len(PLACES)
        for row in rows
    )
    return rows
