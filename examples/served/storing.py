"""KV cache offloading to host memory and disk."""

import argparse
import concurrent.futures
import hashlib
from pathlib import Path

import jkv
from jkv.config import human_bytes, parse_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for offloading."""
    add = parser.add_argument
    help_text = "offload cached blocks to the host, such as 4GB; off"
    add("--store", type=parse_bytes, metavar="BYTES", help=help_text)
    help_text = "offload cached blocks to disk, also for the next start"
    add("--store-folder", type=Path, metavar="FOLDER", help=help_text)
    help_text = "limit of the folder; ten times --store"
    add("--store-folder-bytes", type=parse_bytes, metavar="BYTES", help=help_text)
    help_text = "retention priorities, set by cache_keep; %(default)s"
    add("--keep-classes", type=int, default=1, metavar="N", help=help_text)


def make_store(options: argparse.Namespace) -> jkv.BlockStore | None:
    """Return the command line's block store, or None.

    Raises:
        ValueError: for a folder without a limit, or with blocks of other weights.
    """
    if options.store_folder is None and options.store_folder_bytes is not None:
        raise ValueError("--store-folder-bytes needs --store-folder, got none")
    if options.store is None and options.store_folder is None:
        return None
    max_bytes = options.store or 0
    if options.store_folder is None:
        return jkv.BlockStore(max_bytes)
    if not max_bytes and options.store_folder_bytes is None:
        raise ValueError(
            "--store-folder needs a limit; pass --store or --store-folder-bytes"
        )
    return jkv.BlockStore(
        max_bytes,
        folder=options.store_folder,
        max_folder_bytes=options.store_folder_bytes or 10 * max_bytes,
        version=find_version(options.model),
    )


def name_weights(store: jkv.BlockStore | None, model: str | Path) -> str | None:
    """Return the checkpoint's version for the store's folder; None without a folder."""
    has_folder = store is not None and store.has_folder
    return find_version(model) if has_folder else None


def find_version(model: str | Path) -> str:
    """Return a hash of a checkpoint's weights and configuration.

    Files are read completely, in about one second per gigabyte. The hash includes jkv's
    version, since a new version may read a configuration differently.
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
    """Write the blocks in host memory to the folder."""
    if store is not None and store.has_folder:
        print(f"{human_bytes(store.nbytes)} of blocks go to the folder", flush=True)
        store.save()
