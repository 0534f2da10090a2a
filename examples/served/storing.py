"""Blocks that a server's pool has no room for, on the host and in a folder."""

import argparse
import concurrent.futures
import hashlib
from pathlib import Path

import jkv
from jkv.config import human_bytes, parse_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add where blocks go that the pool has no room for."""
    add = parser.add_argument
    said = "of cached blocks on the host, such as 4GB; none"
    add("--store", type=parse_bytes, metavar="BYTES", help=said)
    said = "of cached blocks on disk, which the next start finds"
    add("--store-folder", type=Path, metavar="FOLDER", help=said)
    said = "that the folder may take; ten times --store"
    add("--store-folder-bytes", type=parse_bytes, metavar="BYTES", help=said)
    said = "of cached blocks, which requests name by cache_keep; %(default)s"
    add("--keep-classes", type=int, default=1, metavar="N", help=said)


def make_store(options: argparse.Namespace) -> jkv.BlockStore | None:
    """Return the store of the command line; None without one.

    Raises:
        ValueError: for a folder of other weights.
    """
    if options.store is None and options.store_folder is None:
        return None
    max_bytes = options.store or 0
    if options.store_folder is None:
        return jkv.BlockStore(max_bytes)
    return jkv.BlockStore(
        max_bytes,
        folder=options.store_folder,
        max_folder_bytes=options.store_folder_bytes or 10 * max_bytes,
        version=find_version(options.model),
    )


def name_weights(store: jkv.BlockStore | None, model: str | Path) -> str | None:
    """Return the version of a checkpoint for a store's folder; None without one."""
    has_folder = store is not None and store.has_folder
    return find_version(model) if has_folder else None


def find_version(model: str | Path) -> str:
    """Return a hash of a checkpoint: of its weights and configuration.

    Files are read whole, at about a second for a gigabyte. The hash includes the
    version of jkv, as its reading of a configuration may have been mended.
    """
    path = Path(model)
    paths = [path] if path.is_file() else sorted(path.iterdir())
    paths = [
        each
        for each in paths
        if each.is_file()
        and (each.suffix in (".safetensors", ".gguf") or each.name == "config.json")
    ]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digests = [jkv.__version__, *pool.map(_hash_file, paths)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()} "


def keep(store: jkv.BlockStore | None) -> None:
    """Write the blocks in memory to the folder, as the server ends."""
    if store is not None and store.has_folder:
        print(f"{human_bytes(store.nbytes)} of blocks go to the folder", flush=True)
        store.save()
