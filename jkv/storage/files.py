"""Files of named arrays in the safetensors format, written atomically and verified.

A file has the header's length in eight bytes, the header, which describes the arrays in
JSON, and the arrays' bytes (https://huggingface.co/docs/safetensors/index#format). Any
program for the format can read it. Files are written here and not by the `safetensors`
package, so that arrays can be written in parts, without a copy of all on the host, and
without another dependency.

The header's `__metadata__` has `format`, `version` and `checksum`: SHA-256 over the
file from the header on, with zeros in place of the checksum. A file is written under a
temporary name in the same folder and renamed once it is on disk, so that a reader finds
either the old or the new file, complete.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jkv.status import CacheError

Path: TypeAlias = str | os.PathLike[str]

FORMAT, VERSION = "jkv", 3

MAX_HEADER_BYTES = 10**8  # limit of the format

CHUNK_BYTES = 2**24  # read, hashed and written at a time

PROGRESS_SECONDS = 2.0  # between log messages

DTYPES = {
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E4M3FNUZ": np.dtype(jnp.float8_e4m3fnuz),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_NO_CHECKSUM = "0" * hashlib.sha256().digest_size * 2

# Start of every header written here; tells damaged files from foreign ones.
_BEGINNING = f'{{"__metadata__":{{"format":"{FORMAT}",'.encode()

logger = logging.getLogger("jkv")


class FileError(CacheError):
    """A file is not a valid one of `save`; the message has the reason.

    It is foreign (not written by jkv), truncated, damaged, or of another version. A
    missing or unreadable file raises an `OSError` as usual.

    Example:
      >>> import jkv
      >>> issubclass(jkv.FileError, jkv.CacheError)
      True
    """

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{os.fspath(path)} {fault}")


class Tensor(NamedTuple):
    """An array to write, given in parts."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: Iterable[np.ndarray]  # elements in order, split anywhere

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


def write_file(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]
) -> None:
    """Write a file atomically, replacing an existing one.

    Pass arrays with large elements first, so that each is aligned to its element size.
    """
    entries, start = _place_all(tensors)
    header = _header(metadata, entries, _NO_CHECKSUM)
    with replacing(path) as file:
        digest = hashlib.sha256(header)
        file.write(len(header).to_bytes(8, "little") + header)
        parts = (part for tensor in tensors.values() for part in tensor.parts)
        for part in _reported(_chunks(parts), start, f"saved to {os.fspath(path)}"):
            digest.update(part)
            file.write(part)
        if file.tell() != 8 + len(header) + start:
            raise ValueError("tensors must have parts of the size of their shape")
        file.seek(8)
        file.write(_header(metadata, entries, digest.hexdigest()))


def measure_file(tensors: dict[str, Tensor], metadata: dict[str, str]) -> int:
    """Return the size of the file written by `write_file`, in bytes."""
    entries, nbytes = _place_all(tensors)
    return 8 + len(_header(metadata, entries, _NO_CHECKSUM)) + nbytes


def _place_all(tensors: dict[str, Tensor]) -> tuple[dict[str, Any], int]:
    """Return the header entries of consecutive tensors, and their total bytes."""
    start, entries = 0, {}
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    return entries, start


def read_file(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Verify a file; return its metadata, and its arrays by name, memory-mapped."""
    with open(os.fspath(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        raw, header = _read_header(path, file, size)
        metadata = header.pop("__metadata__")
        try:
            entries = {name: _read_entry(entry) for name, entry in header.items()}
            length = max((where.stop for *_, where in entries.values()), default=0)
            checksum = metadata["checksum"].encode()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FileError(path, "is damaged: its header is invalid") from error
        expected = 8 + len(raw) + length
        if size < expected:
            raise FileError(path, f"is truncated: {size} bytes of {expected}")
        digest = hashlib.sha256(raw.replace(checksum, _NO_CHECKSUM.encode(), 1))
        verified = f"verified of {os.fspath(path)}"
        for part in _reported(_rest(file), size - 8 - len(raw), verified):
            digest.update(part)
        if size > expected or digest.hexdigest().encode() != checksum:
            raise FileError(path, "is damaged: its checksum does not match")
        data = np.memmap(file, np.uint8, "r")[8 + len(raw) :]
    arrays = {
        name: data[where].view(dtype).reshape(shape)
        for name, (dtype, shape, where) in entries.items()
    }
    return metadata, arrays


def _read_entry(entry: dict[str, Any]) -> tuple[Any, tuple[int, ...], slice]:
    """Return dtype, shape and byte range of an array; raise if they are invalid."""
    dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    start, stop = map(int, entry["data_offsets"])
    nbytes = Tensor(dtype, shape, ()).nbytes
    if min(shape, default=0) < 0 or start < 0 or stop - start != nbytes:
        raise ValueError("data_offsets do not match the shape and dtype")
    return dtype, shape, slice(start, stop)


def _header(metadata: dict[str, str], entries: dict[str, Any], checksum: str) -> bytes:
    """Return the header, padded so that the arrays start at a multiple of 64 bytes."""
    own = {"format": FORMAT, "version": str(VERSION), "checksum": checksum}
    header = {"__metadata__": own | metadata, **entries}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    return text + b" " * (-(8 + len(text)) % 64)


def _read_header(
    path: Path, file: IO[bytes], size: int
) -> tuple[bytes, dict[str, Any]]:
    """Return the header as bytes and JSON, after checking its format and version."""
    length = int.from_bytes(file.read(8), "little")
    raw = file.read(min(length, size, MAX_HEADER_BYTES))
    ours = raw.startswith(_BEGINNING)
    if length > size - 8:
        # A file truncated within its header still starts like ours.
        if size <= 8 or ours or _BEGINNING.startswith(raw):
            raise FileError(path, f"is truncated: {size} bytes end within the header")
        raise FileError(path, "is foreign: not a safetensors file")
    try:
        header = json.loads(raw)
        metadata = header.get("__metadata__", {})
        form, version = metadata.get("format"), metadata.get("version", "")
    except (ValueError, AttributeError) as error:
        is_foreign = "is foreign: not a safetensors file"
        fault = "is damaged: its header cannot be read" if ours else is_foreign
        raise FileError(path, fault) from error
    if form != FORMAT:
        raise FileError(path, "is foreign: a safetensors file that jkv did not write")
    if version != str(VERSION):
        raise FileError(
            path, f"has version {version} of the format, this jkv reads {VERSION}"
        )
    return raw, header


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `path` if the block succeeds."""
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if os.name == "posix":  # other systems cannot open a folder
        entry = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(entry)  # otherwise a power loss could undo the rename
        finally:
            os.close(entry)


def _chunks(parts: Iterable[np.ndarray]) -> Iterator[memoryview]:
    """Yield the bytes of arrays in chunks; contiguous arrays are not copied."""
    for part in parts:
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        for start in range(0, len(flat), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES]


def _rest(file: IO[bytes]) -> Iterator[memoryview]:
    """Yield the rest of a file in chunks; each overwrites the previous one."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # opened "rb"
        yield buffer[:count]


def _reported(
    chunks: Iterable[memoryview], total: int, done: str
) -> Iterator[memoryview]:
    """Pass chunks on, and log the progress every few seconds and at the end."""
    count, begin = 0, time.monotonic()
    last = begin
    for chunk in chunks:
        yield chunk
        count += len(chunk)
        now = time.monotonic()
        if now - last >= PROGRESS_SECONDS:
            last = now
            logger.info("%d of %d MB %s", count // 10**6, total // 10**6, done)
    seconds = time.monotonic() - begin
    logger.info("all %d MB %s in %.1f s", total // 10**6, done, seconds)
