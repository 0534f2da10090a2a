"""One file of named arrays in the safetensors format, whole and unharmed or an error.

A file is eight bytes that say how long the header is, the header, which names the
arrays in JSON, and the arrays' bytes
(https://huggingface.co/docs/safetensors/index#format). Any program that reads the
format can read ours. Files are written here rather than by the `safetensors` package so
that arrays can go to disk in parts, without a copy of all of them on the host, and so
that the core of jkv needs no further package.

The header's `__metadata__` carries `format`, `version` and `checksum`: SHA-256 over the
whole file from the header on, with zeros in place of the checksum itself. A file is
written under another name in the same folder and renamed when it is safely on disk, so
that a reader finds the old file or the new one, never a part of it.
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

MAX_HEADER_BYTES = 10**8  # more is not allowed by the format

CHUNK_BYTES = 2**24  # read, hashed and written at a time

PROGRESS_SECONDS = 2.0  # between two lines in the log

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

# Our files begin so; it tells a harmed one from one that was never ours.
_BEGINNING = f'{{"__metadata__":{{"format":"{FORMAT}",'.encode()

logger = logging.getLogger("jkv")


class FileError(CacheError):
    """A file does not hold what `save` wrote; the message says what is wrong with it.

    It is foreign (not one of ours), truncated, damaged, or of another version. A file
    that is not there, or cannot be read, raises an `OSError` as always.

    Example:
      >>> import jkv
      >>> issubclass(jkv.FileError, jkv.CacheError)
      True
    """

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{os.fspath(path)} {fault}")


class Tensor(NamedTuple):
    """An array to be written, whose bytes come in parts."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: Iterable[np.ndarray]  # its elements in order, cut anywhere

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


def write_file(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]
) -> None:
    """Write a file, whole or not at all; it replaces one that is there.

    Arrays of large elements come first: then each begins at a multiple of its element
    size.
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
            raise ValueError("the parts of a tensor do not make up its shape")
        file.seek(8)
        file.write(_header(metadata, entries, digest.hexdigest()))


def measure_file(tensors: dict[str, Tensor], metadata: dict[str, str]) -> int:
    """Return how many bytes `write_file` writes."""
    entries, nbytes = _place_all(tensors)
    return 8 + len(_header(metadata, entries, _NO_CHECKSUM)) + nbytes


def _place_all(tensors: dict[str, Tensor]) -> tuple[dict[str, Any], int]:
    """Return the header's entries of tensors, one after the other, and their bytes."""
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
    """Verify a file of ours; return its metadata, and its arrays by name, mapped."""
    with open(os.fspath(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        raw, header = _read_header(path, file, size)
        metadata = header.pop("__metadata__")
        try:
            entries = {name: _read_entry(entry) for name, entry in header.items()}
            length = max((where.stop for *_, where in entries.values()), default=0)
            checksum = metadata["checksum"].encode()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FileError(path, "is damaged: its header makes no sense") from error
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
    """Return dtype, shape and bytes of an array; raise whatever a wrong one does."""
    dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    start, stop = map(int, entry["data_offsets"])
    nbytes = Tensor(dtype, shape, ()).nbytes
    if min(shape, default=0) < 0 or start < 0 or stop - start != nbytes:
        raise ValueError("an array's shape and its bytes do not agree")
    return dtype, shape, slice(start, stop)


def _header(metadata: dict[str, str], entries: dict[str, Any], checksum: str) -> bytes:
    """Return the header, padded so that the arrays begin at a multiple of 64 bytes."""
    own = {"format": FORMAT, "version": str(VERSION), "checksum": checksum}
    header = {"__metadata__": own | metadata, **entries}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    return text + b" " * (-(8 + len(text)) % 64)


def _read_header(
    path: Path, file: IO[bytes], size: int
) -> tuple[bytes, dict[str, Any]]:
    """Return the header as bytes and as JSON, known to be of our format and version."""
    length = int.from_bytes(file.read(8), "little")
    raw = file.read(min(length, size, MAX_HEADER_BYTES))
    ours = raw.startswith(_BEGINNING)
    if length > size - 8:
        # A file cut within its header still begins as ours do.
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
    if os.name == "posix":  # elsewhere a folder cannot be opened
        entry = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(entry)  # else a loss of power could undo the renaming
        finally:
            os.close(entry)


def _chunks(parts: Iterable[np.ndarray]) -> Iterator[memoryview]:
    """Return the bytes of arrays, a chunk at a time; contiguous ones are not copied."""
    for part in parts:
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        for start in range(0, len(flat), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES]


def _rest(file: IO[bytes]) -> Iterator[memoryview]:
    """Return the rest of a file, a chunk at a time; each is overwritten by the next."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # opened "rb"
        yield buffer[:count]


def _reported(
    chunks: Iterable[memoryview], total: int, done: str
) -> Iterator[memoryview]:
    """Pass chunks on and log how far they are, every few seconds and at the end."""
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
