"""What the host holds of a column of a text: its blocks, and a snapshot at its end."""

import dataclasses

import numpy as np

from jkv.blocks.contents import cut_array
from jkv.states.swapped import SwappedStates
from jkv.tiers.layout import ArrayKind, GroupLayout, Layout, StateLayout, empty
from jkv.tiers.spilled import Spilled, SpilledGroup, SpilledSnapshots

# By path, such as "0.key_pool" or "rows.0.sum": the arrays of one block or snapshot.
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass
class Held:
    """The arrays of a column."""

    blocks: dict[int, Arrays]  # by group, [L, ...] by the names of `BlockStorage`
    snapshot: Arrays | None = None  # [L, ...] by "part.group.name"
    num_pending: int = 0
    keep: tuple[int, int] | None = None  # class, and up to when; None: one class
    is_saved: bool = False  # whether a file holds all of it

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        parts = [*self.blocks.values(), self.snapshot or {}]
        return sum(array.nbytes for part in parts for array in part.values())

    @property
    def num_blocks(self) -> int:
        """Blocks held, in all groups together."""
        return len(self.blocks)

    def add(self, other: "Held") -> None:
        """Take over what the other holds and this does not."""
        before = {*self.arrays()}
        self.blocks = other.blocks | self.blocks
        if self.snapshot is None:
            self.snapshot, self.num_pending = other.snapshot, other.num_pending
        keep = latest(self.keep, other.keep)
        self.is_saved &= {*self.arrays()} == before and self.keep == keep
        self.keep = keep

    def arrays(self) -> Arrays:
        """Return all arrays by path, as a file names them."""
        found = {
            f"block.{group}.{name}": array
            for group, arrays in self.blocks.items()
            for name, array in arrays.items()
        }
        snapshot = (self.snapshot or {}).items()
        return found | {f"snapshot.{path}": array for path, array in snapshot}

    @classmethod
    def of_arrays(
        cls, arrays: Arrays, num_pending: int, keep: tuple[int, int] | None
    ) -> "Held":
        """Return what the arrays of a file hold."""
        held = cls({}, None, num_pending, keep, is_saved=True)
        for path, array in arrays.items():
            kind, _, rest = path.partition(".")
            if kind == "block":
                group, _, name = rest.partition(".")
                held.blocks.setdefault(int(group), {})[name] = array
            elif kind == "snapshot":
                held.snapshot = (held.snapshot or {}) | {rest: array}
        return held


def latest(
    one: tuple[int, int] | None, other: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the higher class of two, and the later time."""
    if one is None or other is None:
        return one or other
    return max(one[0], other[0]), max(one[1], other[1])


def take_apart(spilled: Spilled) -> dict[int, Held]:
    """Return what each node holds, by number; arrays of their own, not views."""
    held: dict[int, Held] = {}
    for number, group in enumerate(spilled.groups):
        start = 0
        pieces = zip(*group.storage.values(), strict=True)
        for piece in pieces:
            arrays = dict(zip(group.storage, map(np.asarray, piece), strict=True))
            num = next(iter(arrays.values())).shape[1]
            for i, node in enumerate(group.nodes[start : start + num].tolist()):
                each = held.setdefault(node, Held({}))
                each.blocks[number] = {
                    name: array[:, i].copy() for name, array in arrays.items()
                }
            start += num
    snapshots = spilled.snapshots
    if snapshots is not None:
        for i, node in enumerate(snapshots.nodes.tolist()):
            each = held.setdefault(node, Held({}))
            each.num_pending = int(snapshots.num_pending[i])
            each.snapshot = {
                f"{part}.{number}.{name}": array[:, i].copy()
                for number, states in enumerate(snapshots.states)
                for part in ("rows", "inputs")
                for name, array in getattr(states, part).items()
            }
    if spilled.classes is not None and spilled.kept_until is not None:
        for node, each in held.items():
            each.keep = int(spilled.classes[node]), int(spilled.kept_until[node])
    return held


def put_together(
    tokens: np.ndarray,
    parents: np.ndarray,
    salt: int,
    held: dict[int, Held],
    layout: Layout,
) -> Spilled:
    """Return columns of a domain as `restore` takes them.

    They have tokens, i32[Q, T], parents, i32[Q], -1 for a text's first, and what nodes
    hold, by number.
    """
    groups = tuple(
        _group(number, held, of_group) for number, of_group in enumerate(layout.groups)
    )
    with_state = [node for node in sorted(held) if held[node].snapshot is not None]
    given = [held[node].snapshot or {} for node in with_state]
    pending = [held[node].num_pending for node in with_state]
    snapshots = SpilledSnapshots(
        nodes=np.array(with_state, np.int32),
        num_pending=np.array(pending, np.int32),
        states=tuple(
            _states(number, given, of_group)
            for number, of_group in enumerate(layout.states)
        ),
    )
    keep = np.zeros((2, len(parents)), np.int64)
    for node, each in held.items():
        keep[:, node] = each.keep or (0, 0)
    has_classes = any(each.keep is not None for each in held.values())
    return Spilled(
        classes=keep[0].astype(np.int32) if has_classes else None,
        kept_until=keep[1].astype(np.uint32) if has_classes else None,
        tokens=tokens,
        parents=parents,
        salts=np.full(len(parents), salt, np.int32),
        groups=groups,
        snapshots=snapshots if layout.states else None,
        layout=layout,
    )


def _group(number: int, held: dict[int, Held], layout: GroupLayout) -> SpilledGroup:
    nodes = [node for node in sorted(held) if number in held[node].blocks]
    blocks = [held[node].blocks[number] for node in nodes]
    storage = {
        name: cut_array(np.stack([block[name] for block in blocks], 1))
        if blocks
        else ()
        for name, *_ in layout.arrays
    }
    return SpilledGroup(nodes=np.array(nodes, np.int32), storage=storage)


def _states(number: int, given: list[Arrays], layout: StateLayout) -> SwappedStates:
    def stacked(part: str, kinds: tuple[ArrayKind, ...]) -> dict[str, np.ndarray]:
        paths = {kind[0]: (f"{part}.{number}.{kind[0]}", kind) for kind in kinds}
        return {
            name: np.stack([arrays[path] for arrays in given], 1)
            if given
            else empty(kind)
            for name, (path, kind) in paths.items()
        }

    num_layers = layout.rows[0][2]
    return SwappedStates(
        bases=np.zeros((num_layers, len(given)), np.int32),
        rows=stacked("rows", layout.rows),
        inputs=stacked("inputs", layout.inputs),
    )
