"""Host tier of spilled blocks, with an optional disk tier, keyed by tokens."""

import collections
import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jkv.arguments import explains_class
from jkv.config.counts import human_bytes
from jkv.metadata.requests import as_salts
from jkv.status import UsageError
from jkv.tiers.folder import Folder, first_digest, next_digest
from jkv.tiers.spilled import Held, Layout, Spilled

# Name of a cache salt: an int valid in all processes, or the hash of a string.
Salt = int | str


def _same_number(salt: int) -> Salt | None:
    return salt


def _as_count(name: str, count: Any) -> int:
    """Return a number of bytes or tokens, an int of 0 or more."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise UsageError(
            f"{name} must be an int, got {count!r:.60}; pass a whole number"
        )
    if count < 0:
        raise UsageError(f"{name} must be >= 0, got {count}")
    return int(count)


def _as_version(name: str, version: Any) -> str:
    """Return the name of a version; refuse other types."""
    if not isinstance(version, str):
        raise UsageError(f"{name} must be a str, got {version!r:.60}")
    return version


def _as_tokens(tokens: Any) -> np.ndarray:
    """Return token ids as i32[n]; refuse floats, which would be truncated."""
    try:
        ids = np.asarray(tokens)
    except ValueError:  # lists of several lengths
        ids = np.zeros((), object)
    if ids.shape == (0,):
        return np.zeros(0, np.int32)
    is_integer = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer)
    if not is_integer or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise UsageError(
            f"tokens must be one list of token ids, integers from 0 to 2**31 - 1, got "
            f"{tokens!r:.60}"
        )
    return ids.astype(np.int32)


def _as_salt(salt: Any) -> int:
    """Return a cache salt as a cache stores it, signed."""
    number = np.asarray(salt)
    if number.ndim or not np.issubdtype(number.dtype, np.integer):
        raise UsageError(f"salt must be an int of 32 bits, got {salt!r:.60}")
    return int(np.asarray(as_salts("salt", number)))


class Names(NamedTuple):
    """Process-independent names of weights and cache salts."""

    version: str  # of the weights
    # Returns the name of a salt in a cache; None: its blocks are not stored.
    salt: Callable[[int], Salt | None] = _same_number


@dataclasses.dataclass(eq=False)
class _Node:
    """A column of a sequence, in a tree of token prefixes."""

    parent: "_Node | None"  # None for a root
    version: str
    salt: Salt
    tokens: np.ndarray  # i32[T]
    digest: bytes
    children: dict[bytes, "_Node"] = dataclasses.field(default_factory=dict)
    held: Held | None = None

    def tokens_to_end(self) -> np.ndarray:
        """Return all tokens up to the column's end, i32[n T]."""
        columns, node = [], self
        while node.parent is not None:
            columns.append(node.tokens)
            node = node.parent
        return np.concatenate(columns[::-1])


@explains_class
class BlockStore:
    """Host tier for KV cache offloading, with an optional disk tier.

    Eviction is LRU by column: from host memory to the folder, and from the folder for
    good. A column is identified by all tokens up to its end and its salt, never by a
    hash alone. A store belongs to one model, version and cache layout. It is
    thread-safe, and processes may share its folder.

    Args:
      max_bytes: capacity in host memory, in bytes.
      folder: disk tier for columns evicted from memory, created if missing. Files are
        safetensors, each written atomically; damaged ones are skipped with a warning.
      max_folder_bytes: capacity of the folder, in bytes.
      version: name of the weights and of the model's settings. Blocks of other versions
        never hit. An engine uses a digest if this is empty (`Engine(store_version=)`).

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig.toy(prefix_caching=True)
      >>> cache, opened = jkv.allocate(jkv.init(config), 0)
      >>> prompt = jnp.arange(9)
      >>> cache, batch = jkv.append(cache, 0, 9, capacity=9, tokens=prompt)
      >>> cache, _ = jkv.free(jkv.commit(cache, batch), 0)
      >>> store = jkv.BlockStore(2**20)
      >>> cache, spilled = jkv.spill(cache, 4)
      >>> store.put(spilled)
      >>> store.num_blocks, store.find([0, 1, 2, 3, 9, 9]).num_blocks
      (2, 1)
      >>> store.find([5, 6, 7, 8, 9]) is None
      True
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        folder: str | os.PathLike[str] | None = None,
        max_folder_bytes: int = 0,
        version: str = "",
    ) -> None:
        self._max_bytes = _as_count("max_bytes", max_bytes)
        self.version = _as_version("version", version)
        most_in_folder = _as_count("max_folder_bytes", max_folder_bytes)
        self._lock = threading.RLock()
        self._folder: Folder | None = None
        self._layout: Layout | None = None
        if folder is not None:
            self._folder = Folder(os.fspath(folder), most_in_folder)
            self._layout = self._folder.agree(version, None)
        self._roots: dict[tuple[str, Salt], _Node] = {}
        # Nodes with contents in memory, least recently used first.
        self._used: collections.OrderedDict[_Node, None] = collections.OrderedDict()
        self._nbytes = 0

    @property
    def max_bytes(self) -> int:
        """Capacity in host memory, in bytes; a lower one evicts blocks at once."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, max_bytes: int) -> None:
        with self._lock:
            self._max_bytes = _as_count("max_bytes", max_bytes)
            self._make_room()

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks and snapshots in memory."""
        return self._nbytes

    @property
    def num_blocks(self) -> int:
        """Number of blocks in memory, summed over groups."""
        with self._lock:
            return sum(len(node.held.groups) for node in self._used if node.held)

    @property
    def folder_bytes(self) -> int:
        """Bytes of the files as of this process's last scan."""
        return 0 if self._folder is None else self._folder.nbytes

    def __repr__(self) -> str:
        on_disk = ""
        if self._folder is not None:
            on_disk = f", {human_bytes(self.folder_bytes)} in {self._folder.path}"
        return (
            f"BlockStore({self.num_blocks} blocks, {human_bytes(self.nbytes)} of "
            f"{human_bytes(self.max_bytes)}{on_disk})"
        )

    def belong(self, layout: Layout) -> None:
        """Set the layout of the store, or raise if it has another.

        Args:
          layout: of a cache.

        Raises:
          ValueError: if the store has another layout.
        """
        with self._lock:
            if self._folder is not None and self._layout is None:
                self._layout = self._folder.agree(self.version, layout)
            self._layout = self._layout or layout
            if different := self._layout.differences(layout):
                raise UsageError(
                    f"store must have the layout of the cache: {'; '.join(different)}; "
                    f"create a store for each model and cache"
                )

    def put(self, spilled: Spilled, *, names: Names | None = None) -> None:
        """Store spilled blocks.

        Args:
          spilled: from a cache of this store's model, version and layout.
          names: names of the weights and salts; None: this store's version, and salts
            by number.

        Raises:
          ValueError: for another layout.
        """
        names = names or Names(self.version)
        with self._lock:
            self.belong(spilled.layout)
            nodes: list[_Node | None] = []
            for tokens, parent, salt in zip(
                spilled.tokens,
                spilled.parents.tolist(),
                spilled.salts.tolist(),
                strict=True,
            ):
                before = self._root(names, salt) if parent < 0 else nodes[parent]
                nodes.append(None if before is None else self._child(before, tokens))
            for number, held in spilled.held.items():
                node = nodes[number]
                if held.arrays and node is not None:
                    self._hold(node, held)
            named = [node for node in nodes if node is not None]
            self._touch(named)
            self._make_room()
            for node in named:
                self._prune(node)

    def count(self, tokens: Any, salt: int = 0, *, names: Names | None = None) -> int:
        """Return the number of prompt tokens up to the last stored column.

        Args:
          tokens: i32[n], the prompt; its last token is never included.
          salt: cache salt.
          names: as for `put`.
        """
        ids, number = _as_tokens(tokens), _as_salt(salt)
        with self._lock:
            path, folder = self._walk(ids, number, names), self._folder
            held = [
                i
                for i, node in enumerate(path)
                if node.held is not None or folder and folder.has(node.digest)
            ]
            for node in path[::-1]:
                self._prune(node)
        return 0 if not held else (held[-1] + 1) * len(path[0].tokens)

    def find(
        self,
        tokens: Any,
        salt: int = 0,
        *,
        skip: int = 0,
        names: Names | None = None,
    ) -> Spilled | None:
        """Return the stored columns of a prompt.

        Args:
          tokens: i32[n], the prompt; its last token is never included.
          salt: cache salt.
          skip: number of leading tokens to omit, as the cache has them.
          names: as for `put`.

        Returns:
          The input of `restore`, with all tokens from the start and gaps where no
          contents are stored; None if there are none. The store keeps them.

        Raises:
          ValueError: if another process has created the folder with another version.
        """
        ids, number, skip = _as_tokens(tokens), _as_salt(salt), _as_count("skip", skip)
        with self._lock:
            path = self._walk(ids, number, names)
            found = None
            if self._layout is not None and path:
                wanted = path[skip // self._layout.block_size :]
                found = self._bring(path, wanted, number, self._layout)
            self._touch(path)
            self._make_room()
            for node in path[::-1]:
                self._prune(node)
            return found

    def _bring(
        self, path: list[_Node], wanted: list[_Node], salt: int, layout: Layout
    ) -> Spilled | None:
        """Return the contents of the columns `wanted`, the end of `path`, or None."""
        first = len(path) - len(wanted)
        sequence = np.concatenate([node.tokens for node in path])
        for i, node in enumerate(wanted, first):
            if self._folder is not None and node.held is None:
                tokens = sequence[: (i + 1) * layout.block_size]
                found = self._folder.find(node.digest, tokens, self._header(node))
                if found is not None:
                    self._hold(node, found)
        numbered = enumerate(wanted, first)
        held = {i: node.held for i, node in numbered if node.held is not None}
        if not held:
            return None
        num = max(held) + 1
        return Spilled(
            tokens=np.stack([node.tokens for node in path[:num]]),
            parents=np.arange(-1, num - 1, dtype=np.int32),
            salts=np.full(num, salt, np.int32),
            held=held,
            layout=layout,
        )

    def _walk(self, tokens: np.ndarray, salt: int, names: Names | None) -> list[_Node]:
        """Return the nodes of a prompt's columns, as far as contents may follow."""
        if self._layout is None and self._folder is not None:
            self._layout = self._folder.agree(self.version, None)  # others may fill it
        if self._layout is None:
            return []
        node = self._root(names or Names(self.version), salt)
        if node is None:
            return []
        size = self._layout.block_size
        num_columns, path = max(len(tokens) - 1, 0) // size, []
        for column in tokens[: num_columns * size].reshape(num_columns, size):
            if self._folder is None and column.tobytes() not in node.children:
                break
            node = self._child(node, column)
            path.append(node)
        if not path:
            self._prune(node)
        return path

    def discard(self, tokens: Any, salt: int = 0) -> None:
        """Remove a sequence's columns from memory, except the prefixes of others.

        Blocks in the folder stay. A column that is the last of two sequences goes
        with the first of them.

        Args:
          tokens: i32[n], the sequence; its last token is never included.
          salt: cache salt.
        """
        ids, number = _as_tokens(tokens), _as_salt(salt)
        with self._lock:
            for node in self._walk(ids, number, None)[::-1]:
                if node.children:
                    return
                if node.held is None:
                    self._prune(node)
                else:
                    self._drop(node)

    @property
    def has_folder(self) -> bool:
        """True if the store has a disk tier."""
        return self._folder is not None

    def clear(self) -> None:
        """Remove everything, in memory and in the folder, of all versions."""
        with self._lock:
            self._roots.clear()
            self._used.clear()
            self._nbytes = 0
            if self._folder is not None:
                self._folder.clear()
                if self._layout is not None:
                    self._folder.note(self.version, self._layout)

    def begin_version(self, version: str) -> None:
        """Set the version of the weights for new blocks, and for the folder.

        Args:
          version: of the new weights. Files of the old ones stay for other processes,
            until they are evicted.
        """
        with self._lock:
            self.version = _as_version("version", version)
            if self._folder is not None and self._layout is not None:
                self._folder.note(version, self._layout)

    def forget(self, version: str) -> None:
        """Remove the blocks of a version from memory."""
        version = _as_version("version", version)
        with self._lock:
            for node in [each for each in self._used if each.version == version]:
                self._drop(node)

    def rename(self, old: str, new: str) -> None:
        """Rename the blocks of a version in memory to a version without blocks."""
        old, new = _as_version("old", old), _as_version("new", new)
        with self._lock:
            self.forget(new)
            for key in [key for key in self._roots if key[0] == old]:
                root = self._roots.pop(key)
                assert self._layout is not None
                self._rename(root, new, first_digest(root.salt, new, self._layout))
                self._roots[new, root.salt] = root

    def _rename(self, root: _Node, version: str, digest: bytes) -> None:
        """Rename a node and its descendants, which have no files under the new name."""
        left = [(root, digest)]
        while left:
            node, digest = left.pop()
            node.version, node.digest = version, digest
            if node.held is not None:
                node.held = dataclasses.replace(node.held, is_saved=False)
            left += [
                (child, next_digest(node.digest, child.tokens))
                for child in node.children.values()
            ]

    def flush(self) -> None:
        """Wait for pending writes to the folder."""
        if self._folder is not None:
            self._folder.flush()

    def save(self) -> None:
        """Write all blocks in memory to the folder, for another process."""
        with self._lock:
            nodes = [*self._used]
        for node in nodes:
            while self._folder is not None and self._folder.is_full:
                self.flush()
            with self._lock:
                self._write(node)
        self.flush()

    def _root(self, names: Names, salt: int) -> _Node | None:
        """Return the root node of a salt; None if the salt has no name."""
        named = names.salt(salt)
        if named is None:
            return None
        key = names.version, named
        if key not in self._roots:
            assert self._layout is not None
            digest = first_digest(named, names.version, self._layout)
            self._roots[key] = _Node(None, *key, np.zeros(0, np.int32), digest)
        return self._roots[key]

    def _child(self, node: _Node, tokens: np.ndarray) -> _Node:
        """Return the node of a column, i32[T], below another, adding it if needed."""
        key = tokens.tobytes()
        if key not in node.children:
            digest = next_digest(node.digest, tokens)
            node.children[key] = _Node(
                node, node.version, node.salt, tokens.copy(), digest
            )
        return node.children[key]

    def _hold(self, node: _Node, held: Held) -> None:
        """Add contents to a column, without replacing existing ones."""
        if node.held is None:
            self._used[node] = None
        else:
            self._nbytes -= node.held.nbytes
            held = node.held.with_more(held)
        node.held = held
        self._nbytes += held.nbytes

    def _touch(self, nodes: list[_Node]) -> None:
        """Mark nodes as most recently used, parents after children."""
        for node in reversed(nodes):
            if node in self._used:
                self._used.move_to_end(node)

    def _make_room(self) -> None:
        """Evict least recently used nodes, to the folder if there is one."""
        while self._nbytes > self.max_bytes:
            node = next(iter(self._used))
            self._write(node)
            self._drop(node)

    def _drop(self, node: _Node) -> None:
        """Remove a column's contents from memory."""
        del self._used[node]
        assert node.held is not None
        self._nbytes -= node.held.nbytes
        node.held = None
        self._prune(node)

    def _write(self, node: _Node) -> None:
        held = node.held
        if self._folder is None or held is None or held.is_saved:
            return
        self._folder.write(node.digest, node.tokens_to_end(), held, self._header(node))

    def _header(self, node: _Node) -> dict[str, Any]:
        """Return the header of a column's file."""
        return {"salt": node.salt, "version": node.version, "layout": self._layout}

    def _prune(self, node: _Node) -> None:
        """Remove nodes without contents and children, upwards."""
        while node.parent is not None and node.held is None and not node.children:
            node.parent.children.pop(node.tokens.tobytes(), None)
            node = node.parent
        if node.parent is None and not node.children:
            self._roots.pop((node.version, node.salt), None)
