"""Disk tier: one file per column, named by its prefix's digest, written atomically."""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import threading
import time
import warnings
from typing import Any, NamedTuple

import numpy as np

from jkv.status import UsageError
from jkv.storage.files import (
    FileError,
    Tensor,
    measure_file,
    read_file,
    replacing,
    write_file,
)
from jkv.tiers.spilled import Held, Layout

logger = logging.getLogger("jkv")

ENDING, UNFINISHED, LAYOUT_NAME = ".safetensors", ".tmp", "layout.json"
# Errors of a full disk.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Queued bytes; columns beyond are dropped if the disk is slower than the cache.
MOST_WAITING_BYTES = 2**28
# Temporary files older than this belong to a killed process.
ABANDONED_SECONDS = 3600.0
# Interval between scans for files of other processes.
SCAN_SECONDS = 1.0


def first_digest(salt: int | str, version: str, layout: Layout) -> bytes:
    """Return the initial digest of sequences with one salt, version and layout."""
    key = json.dumps([salt, version, layout])
    return hashlib.blake2b(key.encode(), digest_size=24).digest()


def next_digest(digest: bytes, tokens: np.ndarray) -> bytes:
    """Return the digest of a sequence extended by a column, i32[T]."""
    return hashlib.blake2b(digest + tokens.tobytes(), digest_size=24).digest()


class Folder:
    """Files of a store; other processes may read, write and remove them, too."""

    def __init__(self, path: str, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise UsageError(
                f"max_folder_bytes must be > 0 with a folder, got {max_bytes}; pass "
                f"the largest total size of its files"
            )
        os.makedirs(path, exist_ok=True)
        self.path, self.max_bytes = path, max_bytes
        # Total size when the disk was last full; None: not full.
        self._room: int | None = None
        self._lock = threading.Lock()
        self._waiting: dict[str, Held] = {}  # queued for writing
        self._waiting_bytes = 0
        self._damaged: dict[str, _Identity] = {}  # files found damaged
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "jkv-store")
        self._note: bytes | None = None  # JSON of version and layout
        self._is_noted = False
        self._sizes = self._scan()

    @property
    def is_full(self) -> bool:
        """True if the write queue is half full, so that more could be dropped."""
        return self._waiting_bytes > MOST_WAITING_BYTES // 2

    def agree(self, version: str, layout: Layout | None) -> Layout | None:
        """Return the folder's layout, or write `layout`; raise if either differs."""
        path = self._layout_path
        try:
            with open(path, "rb") as file:
                note = file.read()
            noted = json.loads(note)
            there, theirs = noted["version"], Layout.of_json(noted["layout"])
        except FileNotFoundError:
            if layout is not None:
                self.note(version, layout)
            return layout
        except OSError as error:
            self._warn(f"could not read {path} ({error})")
            return layout
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"folder has a damaged {path}; remove the folder or pass another"
            ) from error
        if there != version:
            raise UsageError(
                f"folder must have version {version!r}, got {there!r} in {self.path}; "
                f"remove it or pass another folder"
            )
        if layout is not None and layout != theirs:
            different = "; ".join(theirs.differences(layout))
            raise UsageError(
                f"folder must have the layout of the cache, got another in {self.path} "
                f"({different}); remove it or pass another folder"
            )
        self._note, self._is_noted = note, True
        return theirs

    def note(self, version: str, layout: Layout) -> None:
        """Write the folder's version and layout now, or later if the disk is full."""
        noted = {"version": version, "layout": layout}
        self._note, self._is_noted = json.dumps(noted).encode(), False
        try:
            self._write_note()
        except OSError as error:
            self._warn(f"could not write {self._layout_path} yet ({error})")

    def _write_note(self) -> None:
        """Write the note unless it exists: the folder may have been emptied."""
        note = self._note
        if note is None or (self._is_noted and os.path.exists(self._layout_path)):
            return
        os.makedirs(self.path, exist_ok=True)
        with replacing(self._layout_path) as file:
            file.write(note)
        with self._lock:
            self._sizes[LAYOUT_NAME] = len(note)
        self._is_noted = True

    @property
    def nbytes(self) -> int:
        """Bytes of all columns' files as of this process's last scan."""
        with self._lock:
            return sum(
                size for name, size in self._sizes.items() if name.endswith(ENDING)
            )

    def write(
        self, digest: bytes, tokens: np.ndarray, held: Held, expected: Any
    ) -> None:
        """Queue a column for writing; until then, `find` returns it from memory.

        Its sequence, i32[n T], ends with the column; the header has salt, version and
        layout. The column is dropped if the queue is full.
        """
        name = digest.hex()
        with self._lock:
            if self._waiting_bytes + held.nbytes > MOST_WAITING_BYTES:
                return
            earlier = self._waiting.get(name)
            waiting = held if earlier is None else earlier.with_more(held)
            self._waiting[name] = waiting
            self._waiting_bytes += held.nbytes
        done = self._writer.submit(self._write, name, tokens, held, expected)
        done.add_done_callback(lambda _: self._forget(name, waiting, held.nbytes))

    def _write(self, name: str, tokens: np.ndarray, held: Held, expected: Any) -> None:
        path = self._file(name)
        try:
            self._write_note()
            before = self._read(name, tokens, expected)
            if before is not None:
                held = before.with_more(held)
                if held.is_saved:
                    return
            arrays = {"tokens": tokens} | held.arrays
            tensors = {
                path: Tensor(array.dtype, array.shape, (array,))
                for path, array in sorted(
                    arrays.items(), key=lambda item: -item[1].itemsize
                )
            }
            metadata = {"column": json.dumps(expected | {"keep": held.keep})}
            if self._make_room(name, measure_file(tensors, metadata)):
                write_file(path, tensors, metadata)
                self._enter(name, os.path.getsize(path))
        except OSError as error:
            if error.errno in NO_ROOM:
                sizes = self._scan()
                with self._lock:
                    self._sizes, self._room = sizes, sum(sizes.values())
                self._warn(f"the disk of {self.path} is full ({error})")
            else:
                self._warn(f"could not write {path} ({error})")
        except Exception:  # the writer thread continues
            logger.exception("could not write a column to %s", path)

    def _forget(self, name: str, waiting: Held, nbytes: int) -> None:
        """Remove a written column from the queue, unless more of it is queued."""
        with self._lock:
            self._waiting_bytes -= nbytes
            if self._waiting.get(name) is waiting:
                del self._waiting[name]

    def _enter(self, name: str, size: int) -> None:
        """Record a written file; after a success the disk may have more space."""
        with self._lock:
            self._sizes[name + ENDING] = size
        self._damaged.pop(name, None)
        if self._room is not None:
            self._room += size
            if self._room >= self.max_bytes:
                self._room = None

    def _warn(self, text: str) -> None:
        warnings.warn(f"{text}; the store continues", RuntimeWarning, stacklevel=3)

    def has(self, digest: bytes) -> bool:
        """True if the sequence has a file that is not known to be damaged."""
        name = digest.hex()
        with self._lock:
            if name in self._waiting:
                return True
        try:
            found = _Identity.of(self._file(name))
        except OSError:
            return False
        return found is not None and found != self._damaged.get(name)

    def find(self, digest: bytes, tokens: np.ndarray, expected: Any) -> Held | None:
        """Return a column's contents; None if missing or damaged."""
        name = digest.hex()
        with self._lock:
            waiting = self._waiting.get(name)
        if waiting is not None:
            return waiting
        try:
            held = self._read(name, tokens, expected)
        except OSError as error:
            self._warn(f"could not read {self._file(name)} ({error})")
            return None
        if held is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file(name))  # mark as most recently used
        return held

    def _read(self, name: str, tokens: np.ndarray, expected: Any) -> Held | None:
        """Return a file's contents; None if missing or damaged."""
        path = self._file(name)
        found = _Identity.of(path)
        if found is None or found == self._damaged.get(name):
            return None
        try:
            metadata, mapped = read_file(path)
            header = json.loads(metadata["column"])
            keep = header.pop("keep")
            arrays = {key: np.array(array) for key, array in mapped.items()}
            # Digests may collide, so all tokens are compared.
            if header != json.loads(json.dumps(expected)) or not np.array_equal(
                arrays.pop("tokens"), tokens
            ):
                raise FileError(path, "has the tokens of another sequence")
        except FileNotFoundError:
            return None
        except (FileError, KeyError, ValueError) as error:
            self._damaged[name] = found
            warnings.warn(f"skipped: {error}", RuntimeWarning, stacklevel=2)
            return None
        return Held(arrays=arrays, keep=keep and (keep[0], keep[1]), is_saved=True)

    def _make_room(self, name: str, nbytes: int) -> bool:
        """Remove least recently used files until one more fits; return True on success.

        The limit is the folder's `max_bytes` and the free space on disk, read now.
        """
        free = shutil.disk_usage(self.path).free
        is_near = time.monotonic() - self._scanned < SCAN_SECONDS
        with self._lock:
            sizes = dict(self._sizes)
        bound = self.max_bytes if self._room is None else self._room
        total = sum(sizes.values())
        if is_near and total + nbytes <= bound and nbytes <= free:
            return True
        sizes = self._scan()
        total = sum(sizes.values())
        columns = {each: sizes[each] for each in sizes if each.endswith(ENDING)}
        least = total - sum(columns.values()) + nbytes
        if least <= self.max_bytes and nbytes <= free + sum(columns.values()):
            for other, size in columns.items():
                if total + nbytes <= bound and nbytes <= free:
                    break
                with contextlib.suppress(OSError):  # undeletable files are skipped
                    os.unlink(os.path.join(self.path, other))
                    total, free = total - size, free + size
                    del sizes[other]
        with self._lock:
            self._sizes = sizes
        if total + nbytes <= self.max_bytes and nbytes <= free:
            return True
        self._warn(f"{self.path} has no space for the {nbytes:,} bytes of {name}")
        return False

    def _scan(self) -> dict[str, int]:
        """Return the sizes of all files by name, least recently used first."""
        self._scanned = time.monotonic()
        found = []
        try:
            entries = [*os.scandir(self.path)]
        except OSError:  # the next write recreates the folder
            entries = []
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                is_old = time.time() - status.st_mtime > ABANDONED_SECONDS
                if entry.name.endswith(UNFINISHED) and is_old:
                    os.unlink(entry.path)
                elif entry.name.endswith((ENDING, UNFINISHED, LAYOUT_NAME)):
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
        return {name: size for _, name, size in sorted(found)}

    def clear(self) -> None:
        self.flush()
        for name in self._scan():
            if not name.endswith(UNFINISHED):  # another process may be writing it
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.path, name))
        with self._lock:
            self._sizes = {}

    def flush(self) -> None:
        """Wait for the write queue."""
        self._writer.submit(lambda: None).result()

    @property
    def _layout_path(self) -> str:
        return os.path.join(self.path, LAYOUT_NAME)

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name + ENDING)


class _Identity(NamedTuple):
    """Inode, time and size of a file, to detect a replacement."""

    inode: int
    changed: int  # nanoseconds
    size: int

    @classmethod
    def of(cls, path: str) -> "_Identity | None":
        """Return the identity of a file; None if it does not exist."""
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        return cls(found.st_ino, found.st_mtime_ns, found.st_size)
