"""What files of version 0.2 named in another way, or left out."""

from typing import Any

Leaves = dict[str, Any]

# What has another place now: paths, or beginnings of some.
_RENAMED = {
    "metadata.states.num_pending": "metadata.sequences.num_pending",
    "metadata.states.texts": "metadata.index.snapshots.sequence_texts",
    "metadata.states.snapshots.": "metadata.index.snapshots.",
}
# What was numbered by kind: what has blocks, and what has a state.
_BLOCKS, _STATES = ("metadata.groups", "storage", "groups"), "states"


def bring_up_to_date(leaves: Leaves, *, is_cache: bool) -> Leaves:
    """Return leaves of a file, of a cache or of sequences, by their present names."""
    for before, now in _RENAMED.items():
        leaves = {
            now + name.removeprefix(before) if name.startswith(before) else name: leaf
            for name, leaf in leaves.items()
        }
    leaves = _number_groups(leaves, is_cache)
    for name in list(leaves):
        root, _, path = name.rpartition(".")
        if root.startswith("storage.") and path == "key_pool" and root.count(".") == 1:
            _add_head_dims(leaves, root)
        if path == "dtype" and root.count(".") == 1:
            # Values were stored as the keys are.
            leaves.setdefault(f"{root}.value_dtype", leaves[name])
    return leaves


def _number_groups(leaves: Leaves, is_cache: bool) -> Leaves:
    """Number groups by their place among all, of sequences those with blocks first."""
    kinds = {name.split(".")[0] for name in leaves}
    if _STATES not in kinds and "state_numbers" not in kinds:
        return leaves
    for none in (*_BLOCKS, _STATES):  # where there are no groups of a kind
        leaves.pop(none, None)
    root = "storage" if is_cache else "groups"
    num_blocks, num_states = (
        len({name.split(".")[1] for name in leaves if name.startswith(f"{kind}.")})
        for kind in (root, _STATES)
    )
    num_groups = num_blocks + num_states
    with_state = leaves.pop("state_numbers", None) or [*range(num_blocks, num_groups)]
    with_blocks = [number for number in range(num_groups) if number not in with_state]

    def renamed(name: str) -> str:
        for before in (*_BLOCKS, _STATES):
            if name.startswith(f"{before}."):
                number, rest = name.removeprefix(f"{before}.").split(".", 1)
                is_state = before == _STATES
                place = (with_state if is_state else with_blocks)[int(number)]
                return f"{root if is_state else before}.{place}.{rest}"
        return name

    most = leaves.pop("metadata.states.max_pending", None)
    leaves = {renamed(name): leaf for name, leaf in leaves.items()}
    if is_cache:
        leaves |= {f"metadata.groups.{i}.max_pending": most for i in with_state}
        leaves["metadata.parts"] = ()
    return leaves


def _add_head_dims(leaves: Leaves, group: str) -> None:
    """Add what was left to the shapes of keys and values."""
    if f"{group}.head_dim" in leaves:
        return
    in_keys = leaves.pop(f"{group}.latent_value_dim", None)
    width = in_keys or leaves[f"{group}.value_pool"].shape[-1]
    leaves |= {
        f"{group}.head_dim": leaves[f"{group}.key_pool"].shape[-1],
        f"{group}.value_head_dim": width,
        f"{group}.values_in_keys": in_keys is not None,
    }
