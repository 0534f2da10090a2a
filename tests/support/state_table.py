"""Operations on sequences, by the data of their layers and by their past.

A letter is a cell: `+` is exact, as the oracle of the folding model says, with each
sequence of the cache as it must be; any other letter is a reason in `REASONS`. The
five letters of a kind of groups are the pasts of the sequence; the last two are for a
cache that is spread over a mesh, and for one with a pool for each rank, where newest
tokens are pending:

    computed, hit, guesses (its newest tokens are pending), swap, file; mesh, pools
"""

import inspect
from typing import NamedTuple

import pytest

import jkv
from jkv.status import UsageError
from support import kept_texts, state_loops, state_verbs
from support.folding_model import KINDS

PASTS = (*kept_texts.PASTS.values(), *kept_texts.MOVES.values())
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
generate_with_draft  +++++ aa +++++ aa +++++ ++   +++++ aa     +++++ aa
extend_twice         +++++ aa +++++ aa +++++ ++   +++++ aa     +++++ aa
search_with_beams    +++++ aa +++++ aa +++++ ++   +++++ aa     +++++ aa
score                +oooo oo +oooo oo +oooo oo   +oooo oo     +oooo oo
engine               +++++ ap +++++ ap +++++ +p   +++++ ap     +++++ ap
"""
# By letter: why a cell is refused, and the error that says so (None: there is no call).
REASONS = {
    "k": (UsageError, "layer 0 keeps no keys and values"),
    "s": (UsageError, "layer 0 keeps no state"),
    # No state stands there: it has every token in it, and none of them is pending.
    "n": (jkv.InvalidArgument, "INVALID_ARGUMENT"),
    # The window released tokens that the row after the cut would see.
    "w": (jkv.InvalidArgument, "INVALID_ARGUMENT"),
    # A sequence leaves its text behind when it goes to the host: which of the snapshots
    # are its own is not known any more. Prompts still find them.
    "t": (jkv.InvalidArgument, "INVALID_ARGUMENT"),
    # Operations on the host take one pool.
    "p": (UsageError, "works on one pool"),
    "i": (UsageError, "seq_ids is not supported for a cache with"),
    # On several devices a loop is its verbs: they are played with each kind, and the
    # loop that has most in it too; the others with the kind that has both.
    "a": (None, "played with keys+state"),
    # `score` makes a cache of its own, of the sizes that it is given.
    "o": (None, "no cache is given, so that there is no past"),
}


class Row(NamedTuple):
    """A row of the table in one kind of groups."""

    name: str
    kind: str
    letters: str  # by past
    places: str  # on a mesh, and in pools

    def play(self, letter, past, folder, **where):
        """See that one cell is as its letter says."""
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
            kept.texts = before.texts
        kept.check()

    def _run(self, kept, folder):
        """Run the row's operation."""
        module = state_loops if hasattr(state_loops, self.name) else state_verbs
        function = getattr(module, self.name)
        more = [folder] if "folder" in inspect.signature(function).parameters else []
        function(kept, *more)


_MADE = {}


def make(past, kind, folder, **where):
    """A cache with a past, made once: it is a value."""
    key = past, kind, *where.values()
    if key not in _MADE:
        _MADE[key] = past(kind, folder, **where)
        _MADE[key].check()
    return _MADE[key]


def read_table(text):
    """The rows of a table, one for each kind of groups."""
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
