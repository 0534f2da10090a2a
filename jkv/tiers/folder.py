"""Columns in a folder: a file each, named by its text, written whole or not at all."""

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
# Causes of a write that found no room.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of what waits to be written: a disk that is slower than the cache loses the rest.
MOST_WAITING_BYTES = 2**28
# A process that was killed leaves files of another name, which nobody writes any more.
ABANDONED_SECONDS = 3600.0
# After so long a process looks again at what others have written.
SCAN_SECONDS = 1.0


def first_digest(domain: int | str, version: str, layout: Layout) -> bytes:
    """Return what the digests of texts of one domain, model and layout begin from."""
    said = json.dumps([domain, version, layout])
    return hashlib.blake2b(said.encode(), digest_size=24).digest()


def next_digest(digest: bytes, tokens: np.ndarray) -> bytes:
    """Return the digest of a text that is longer by a column, i32[T]."""
    return hashlib.blake2b(digest + tokens.tobytes(), digest_size=24).digest()


class Folder:
    """The files of a store; other processes may read, write and remove them, too."""

    def __init__(self, path: str, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise UsageError(
                "a store with a folder needs max_folder_bytes=, the most that its "
                "files may take together"
            )
        os.makedirs(path, exist_ok=True)
        self.path, self.max_bytes = path, max_bytes
        # Most bytes that had room when the disk was full last; None: it was not.
        self._room: int | None = None
        self._lock = threading.Lock()
        self._waiting: dict[str, Held] = {}  # being written
        self._waiting_bytes = 0
        self._damaged: dict[str, _Identity] = {}  # files that were read and are wrong
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "jkv-store")
        self._note: bytes | None = None  # of version and layout
        self._is_noted = False
        self._sizes = self._scan()

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that more could be lost."""
        return self._waiting_bytes > MOST_WAITING_BYTES // 2

    def agree(self, version: str, layout: Layout | None) -> Layout | None:
        """Return the layout of what lies here, or note one; refuse any other."""
        path = self._layout_path
        try:
            with open(path, "rb") as file:
                note = file.read()
            said = json.loads(note)
            there, theirs = said["version"], Layout.of_json(said["layout"])
        except FileNotFoundError:
            if layout is not None:
                self.note(version, layout)
            return layout
        except OSError as error:
            self._warn(f"{path} cannot be read ({error})")
            return layout
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} is damaged: remove the folder, or name another"
            ) from error
        if there != version:
            raise UsageError(
                f"{self.path} holds blocks of version {there!r}, and this store has "
                f"{version!r}: name another folder, or remove that one"
            )
        if layout is not None and layout != theirs:
            different = "; ".join(theirs.differences(layout))
            raise UsageError(
                f"{self.path} holds blocks of another layout: name another folder, or "
                f"remove that one ({different})"
            )
        self._note, self._is_noted = note, True
        return theirs

    def note(self, version: str, layout: Layout) -> None:
        """Note of what version and layout the folder is, as soon as there is room."""
        said = {"version": version, "layout": layout}
        self._note, self._is_noted = json.dumps(said).encode(), False
        try:
            self._write_note()
        except OSError as error:
            self._warn(f"{self._layout_path} is not written yet ({error})")

    def _write_note(self) -> None:
        """Write the note unless it is there: the folder may have been emptied."""
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
        """Bytes of all columns' files, as far as this process has seen them."""
        with self._lock:
            return sum(
                size for name, size in self._sizes.items() if name.endswith(ENDING)
            )

    def write(self, digest: bytes, text: np.ndarray, held: Held, said: Any) -> None:
        """Write a column soon; until then it is found as if it were written.

        Its text, i32[n T], ends with the column, and the header says domain, version
        and layout. Where too much waits it is lost, as the disk is slower than what
        comes.
        """
        name = digest.hex()
        with self._lock:
            if self._waiting_bytes + held.nbytes > MOST_WAITING_BYTES:
                return
            self._waiting[name] = held
            self._waiting_bytes += held.nbytes
        self._writer.submit(self._write, name, text, held, said)

    def _write(self, name: str, text: np.ndarray, held: Held, said: Any) -> None:
        path, nbytes = self._file(name), held.nbytes
        try:
            self._write_note()
            before = self._read(name, text, said)
            if before is not None:
                held = before.with_more(held)
                if held.is_saved:
                    return
            arrays = {"tokens": text} | held.arrays
            tensors = {
                path: Tensor(array.dtype, array.shape, (array,))
                for path, array in sorted(
                    arrays.items(), key=lambda item: -item[1].itemsize
                )
            }
            metadata = {"column": json.dumps(said | {"keep": held.keep})}
            if self._make_room(name, measure_file(tensors, metadata)):
                write_file(path, tensors, metadata)
                self._enter(name, os.path.getsize(path))
        except OSError as error:
            if error.errno in NO_ROOM:
                sizes = self._scan()
                with self._lock:
                    self._sizes, self._room = sizes, sum(sizes.values())
                self._warn(f"{self.path} takes no more ({error})")
            else:
                self._warn(f"{path} is not written ({error})")
        except Exception:  # the writer goes on with the next
            logger.exception("a column was not written to %s", path)
        finally:
            with self._lock:
                self._waiting.pop(name, None)
                self._waiting_bytes -= nbytes

    def _enter(self, name: str, size: int) -> None:
        """Count a file that was written; a disk that took one may take another."""
        with self._lock:
            self._sizes[name + ENDING] = size
        self._damaged.pop(name, None)
        if self._room is not None:
            self._room += size
            if self._room >= self.max_bytes:
                self._room = None

    def _warn(self, text: str) -> None:
        warnings.warn(f"{text}; the store goes on", RuntimeWarning, stacklevel=3)

    def has(self, digest: bytes) -> bool:
        """Whether there is a file of a text, which nobody found damaged."""
        name = digest.hex()
        with self._lock:
            if name in self._waiting:
                return True
        try:
            found = _Identity.of(self._file(name))
        except OSError:
            return False
        return found is not None and found != self._damaged.get(name)

    def find(self, digest: bytes, text: np.ndarray, said: Any) -> Held | None:
        """Return what a column holds; None if it is not there, or damaged."""
        name = digest.hex()
        with self._lock:
            waiting = self._waiting.get(name)
        if waiting is not None:
            return waiting
        try:
            held = self._read(name, text, said)
        except OSError as error:
            self._warn(f"{self._file(name)} cannot be read now ({error})")
            return None
        if held is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file(name))  # the longest unused goes first
        return held

    def _read(self, name: str, text: np.ndarray, said: Any) -> Held | None:
        """Return what a file holds; None if it is not there, or is wrong."""
        path = self._file(name)
        found = _Identity.of(path)
        if found is None or found == self._damaged.get(name):
            return None
        try:
            metadata, mapped = read_file(path)
            header = json.loads(metadata["column"])
            keep = header.pop("keep")
            arrays = {key: np.array(array) for key, array in mapped.items()}
            # A digest only proposes: the file has all tokens.
            if header != json.loads(json.dumps(said)) or not np.array_equal(
                arrays.pop("tokens"), text
            ):
                raise FileError(path, "holds another text than its name says")
        except FileNotFoundError:
            return None
        except (FileError, KeyError, ValueError) as error:
            self._damaged[name] = found
            warnings.warn(f"skipped: {error}", RuntimeWarning, stacklevel=2)
            return None
        return Held(arrays=arrays, keep=keep and (keep[0], keep[1]), is_saved=True)

    def _make_room(self, name: str, nbytes: int) -> bool:
        """Remove files that were unused for longest, so that one more fits, if it can.

        The bound is judged now: the folder's own, and the room that the disk has.
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
                with contextlib.suppress(OSError):  # it stays, and others may go
                    os.unlink(os.path.join(self.path, other))
                    total, free = total - size, free + size
                    del sizes[other]
        with self._lock:
            self._sizes = sizes
        if total + nbytes <= self.max_bytes and nbytes <= free:
            return True
        self._warn(f"{self.path} has no room for the {nbytes:,} bytes of {name}")
        return False

    def _scan(self) -> dict[str, int]:
        """Return the sizes of all files by name, the longest unused first."""
        self._scanned = time.monotonic()
        found = []
        try:
            entries = [*os.scandir(self.path)]
        except OSError:  # it is made again by what is written next
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
        """Wait until all that waits is written."""
        self._writer.submit(lambda: None).result()

    @property
    def _layout_path(self) -> str:
        return os.path.join(self.path, LAYOUT_NAME)

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name + ENDING)


class _Identity(NamedTuple):
    """What tells a file from one that is written anew."""

    inode: int
    changed: int  # in nanoseconds
    size: int

    @classmethod
    def of(cls, path: str) -> "_Identity | None":
        """Return that of a file; None where there is none."""
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        return cls(found.st_ino, found.st_mtime_ns, found.st_size)
