"""Columns in a folder: a file each, named by its text, written whole or not at all."""

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import os
import threading
import time
import warnings
from typing import Any

import numpy as np

from jkv.status import UsageError
from jkv.storage.files import FileError, Tensor, read_file, replacing, write_file
from jkv.tiers.spilled import Held, Layout

logger = logging.getLogger("jkv")

ENDING, LAYOUT_NAME = ".safetensors", "layout.json"
# Of what waits to be written: a disk that is slower than the cache loses the rest.
MOST_WAITING_BYTES = 2**28
# A process that was killed leaves files of another name, which nobody writes any more.
ABANDONED_SECONDS = 3600.0
# After so long a process looks again at what others have written.
SCAN_SECONDS = 1.0


def first_digest(salt: int, version: str, layout: Layout) -> bytes:
    """Return what the digests of texts of one domain, model and layout begin from."""
    said = json.dumps([salt, version, layout])
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
        self._lock = threading.Lock()
        self._waiting: dict[str, Held] = {}  # being written
        self._waiting_bytes = 0
        self._damaged: set[str] = set()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "jkv-store")
        self._sizes = self._scan()

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that more could be lost."""
        return self._waiting_bytes > MOST_WAITING_BYTES // 2

    def agree(self, version: str, layout: Layout | None) -> Layout | None:
        """Return the layout of what lies here, or note one; refuse any other."""
        path = self._layout_path
        try:
            with open(path, encoding="utf-8") as file:
                said = json.load(file)
            there, theirs = said["version"], Layout.of_json(said["layout"])
        except FileNotFoundError:
            if layout is not None:
                said = {"version": version, "layout": layout}
                with replacing(path) as new:
                    new.write(json.dumps(said).encode())
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
        return theirs

    @property
    def nbytes(self) -> int:
        """Bytes of all files, as far as this process has seen them."""
        with self._lock:
            return sum(self._sizes.values())

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
            before = self._read(name, text, said) if os.path.exists(path) else None
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
            header = json.dumps(said | {"keep": held.keep})
            self._make_room(sum(tensor.nbytes for tensor in tensors.values()))
            write_file(path, tensors, {"column": header})
            with self._lock:
                self._sizes[name] = os.path.getsize(path)
        except OSError as error:
            self._shrink(error)
        except Exception:  # the writer goes on with the next
            logger.exception("a column was not written to %s", path)
        finally:
            with self._lock:
                self._waiting.pop(name, None)
                self._waiting_bytes -= nbytes

    def _shrink(self, error: OSError) -> None:
        """Go on with the room that there is."""
        with self._lock:
            self.max_bytes = sum(self._sizes.values())
        warnings.warn(
            f"{self.path} takes no more ({error}): the store goes on with the "
            f"{self.max_bytes:,} bytes that lie there",
            RuntimeWarning,
            stacklevel=2,
        )

    def has(self, digest: bytes) -> bool:
        """Whether there is a file of a text, which may be damaged."""
        name = digest.hex()
        with self._lock:
            is_near = name in self._waiting
        if name in self._damaged:
            return False
        return is_near or os.path.exists(self._file(name))

    def find(self, digest: bytes, text: np.ndarray, said: Any) -> Held | None:
        """Return what a column holds; None if it is not there, or damaged."""
        name = digest.hex()
        with self._lock:
            waiting = self._waiting.get(name)
        if waiting is not None:
            return waiting
        held = self._read(name, text, said)
        if held is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file(name))  # the longest unused goes first
        return held

    def _read(self, name: str, text: np.ndarray, said: Any) -> Held | None:
        path = self._file(name)
        if name in self._damaged:
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
        except (FileError, KeyError, ValueError, OSError) as error:
            self._damaged.add(name)
            warnings.warn(f"skipped: {error}", RuntimeWarning, stacklevel=2)
            return None
        return Held(arrays=arrays, keep=keep and (keep[0], keep[1]), is_saved=True)

    def _make_room(self, nbytes: int) -> None:
        """Remove the files that were unused for longest, so that one more fits."""
        is_near = time.monotonic() - self._scanned < SCAN_SECONDS
        with self._lock:
            if is_near and sum(self._sizes.values()) + nbytes <= self.max_bytes:
                return
        sizes = self._scan()
        total = sum(sizes.values()) + nbytes
        for name in [*sizes]:  # the longest unused first
            if total <= self.max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._file(name))
            total -= sizes.pop(name)
        with self._lock:
            self._sizes = sizes

    def _scan(self) -> dict[str, int]:
        """Return the sizes of all files, the longest unused first."""
        self._scanned = time.monotonic()
        found = []
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                is_old = time.time() - status.st_mtime > ABANDONED_SECONDS
                if entry.name.endswith(".tmp") and is_old:
                    os.unlink(entry.path)
                if entry.name.endswith(ENDING):
                    name = entry.name.removesuffix(ENDING)
                    found.append((status.st_mtime_ns, name, status.st_size))
        return {name: size for _, name, size in sorted(found)}

    def clear(self) -> None:
        self.flush()
        for path in (*map(self._file, self._scan()), self._layout_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
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
