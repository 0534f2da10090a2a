"""The program of both processes of `test_processes.py`, with files.

    python two_processes.py PROCESS PORT FOLDER

Each has two devices. FOLDER holds files of one process; these write them again, with
heads sharded over both processes, and with a pool on each.
"""

import pathlib
import pickle
import sys

import jax
import numpy as np


def write_again(process: int, folder: pathlib.Path) -> None:
    """Load, compare, and save; process 0 also saves values without a mesh."""
    import jkv

    devices = np.asarray(jax.devices())
    heads = jax.sharding.Mesh(devices, ("tp",))
    cache = jkv.load(folder / "cache", mesh=heads, heads="tp")
    assert not cache.storage[0].key_pool.is_fully_addressable
    jkv.check(cache)
    jkv.save(folder / "cache again", cache)
    # All processes have waited for the file.
    assert (folder / "cache again").read_bytes() == (folder / "cache").read_bytes()
    assert jkv.stats(cache).live_sequences == 2
    # Sequences are swapped out and in on each process.
    cache, swapped = jkv.swap_out(cache, [1, 2])
    if process == 0:
        (folder / "swapped").write_bytes(pickle.dumps(swapped))
    cache, back = jkv.swap_in(cache, swapped)
    jkv.raise_for_status(back.status)
    jkv.check(cache)

    # Heads side by side on a process, a pool on each; replicated heads.
    mesh = jax.sharding.Mesh(devices.reshape(2, 2), ("dp", "tp"))
    pools = jkv.load(folder / "pools", mesh=mesh, heads="tp", pools="dp")
    jkv.save(folder / "pools again", pools)
    assert (folder / "pools again").read_bytes() == (folder / "pools").read_bytes()
    assert [jkv.stats(pool).live_sequences for pool in jkv.split_pools(pools)] == [2, 1]
    # All processes report a fault of the writing one.
    try:
        jkv.save(folder / "nowhere" / "cache", pools)
    except OSError as error:
        output = str(error)
    assert ("another process failed" in output) == (process == 1), output


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    number = int(sys.argv[1])
    jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, number)
    write_again(number, pathlib.Path(sys.argv[3]))
    print("done", flush=True)
