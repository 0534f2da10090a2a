"""Several processes: the example, killed midway, and files written by all.

A process starts with two devices, not with the eight of the tests.
"""

import argparse
import os
import pickle
import re
import signal
import threading

import jax
import numpy as np
import pytest
from generating.options import BUNDLED
from jax.sharding import AxisType
from processes.generation import continue_prompts
from processes.options import PROMPTS
from support.jax_versions import dealt, further
from support.models.sharded_model import Layout
from support.paths import EXAMPLES
from support.serving.processes import SECONDS, TESTS, run_pair, start
from support.small_caches import without_refusals
from test_moving import filled, small

import jkv

EXAMPLE = EXAMPLES / "multiprocess.py"
COORDINATOR, WORKER = 0, 1
NEW_TOKENS = 24


def run(folder, *, deaths=()):
    """Run the example, kill a process after each of the first saves; return its lines.

    It restarts after each death but the last.
    """
    options = "--save-every=8", f"--max-new-tokens={NEW_TOKENS}", "--heartbeat=5"
    restarts = f"--restarts={max(len(deaths) - 1, 0)}"
    launcher = start(EXAMPLE, "--state", folder, *options, restarts)
    watch = threading.Timer(SECONDS, launcher.kill)
    watch.start()
    pids, lines, waiting = [], [], list(deaths)
    try:
        for line in launcher.stdout:
            lines.append(line.rstrip())
            if found := re.search(r"process \d has pid (\d+)", line):
                pids.append(int(found[1]))
            # Once per attempt: a line may come after the death.
            attempt = len(pids) // 2
            is_alive = len(deaths) - len(waiting) < attempt
            if line.startswith("saved after") and waiting and is_alive:
                os.kill(pids[-2:][waiting.pop(0)], signal.SIGKILL)
    finally:
        watch.cancel()
        launcher.stdout.close()
    assert launcher.wait() == bool(deaths), lines
    return lines


def assert_output(lines, deaths):
    """Assert that the launcher reports both exits, and restarts."""
    output = "\n".join(line for line in lines if line.startswith("launcher: "))
    attempts = []
    for death in deaths:
        attempts += [
            r"launcher: process 0 has pid \d+",
            r"launcher: process 1 has pid \d+",
            rf"launcher: process {death} was ended by SIGKILL after [\d.]+ s; .*",
            # By itself, within the heartbeat's seconds; else the launcher would kill
            # it.
            rf"launcher: process {1 - death} .*ended .* [\d.]+ s later; .*",
            r"launcher: starting again, 1 of 1",
        ]
    attempts[-1] = "launcher: the same command goes on from what was saved"
    assert re.fullmatch("\n".join(attempts), output), output


def output_of_one_device(folder):
    """Return the completions of one device of this process."""
    options = argparse.Namespace(
        model=BUNDLED,
        state=folder,
        prompts=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        save_every=NEW_TOKENS,
    )
    mesh = jax.make_mesh((1, 1), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    return continue_prompts(options, mesh)


# The oldest JAX kills one process after the other, the newest none.
@pytest.mark.parametrize("deaths", dealt([*further([((WORKER, COORDINATOR),)]), ()]))
def test_processes_print_the_output_of_one_device(deaths, tmp_path):
    """Also if a process is killed midway: the other one exits, none hangs.

    Both are restarted and continue from the saved state.
    """
    state, steps = tmp_path / "state", 0
    if deaths:
        lines = run(state, deaths=deaths)
        assert_output(lines, deaths)
        steps = 8 * sum(line.startswith("saved after") for line in lines)
        assert steps >= 16 and f"go on after {steps - 8} steps" in lines
    lines = run(state)
    (begin,) = (i for i, line in enumerate(lines) if re.match("begin|go on", line))
    assert lines[begin] == (f"go on after {steps} steps" if deaths else "begin")
    last = max(i for i, line in enumerate(lines) if line.startswith("saved after"))
    texts = "\n".join(lines[last + 1 :])
    wanted = output_of_one_device(tmp_path / "alone")
    assert texts.strip() == "\n\n".join(wanted).strip()
    assert all(text.startswith(p) for text, p in zip(wanted, PROMPTS, strict=True))


@pytest.mark.one_end
def test_multi_process_files_equal_single_process_files(tmp_path):
    """Byte by byte, with heads or pools sharded over processes; swapped sequences, too.

    `two_processes.py` has the program of each process and its assertions.
    """
    layout = Layout("repeated", (("dp", 2), ("tp", 2)), AxisType.Auto, "int8")
    alone = filled(layout, {})
    jkv.save(tmp_path / "cache", alone)
    cache = jkv.init(small(layout), mesh=layout.mesh, heads="tp", pools="dp")
    cache, _ = jkv.over_pools(jkv.allocate)(cache, np.array([[4, 9], [12, -1]]))
    rng = np.random.default_rng(1)
    storage = {
        name: jax.device_put(
            rng.integers(100, size=pool.shape).astype(pool.dtype), pool.sharding
        )
        for name, pool in cache.storage[0].arrays.items()
    }
    cache = cache.with_group_storage(0, cache.storage[0].with_arrays(storage))
    jkv.save(tmp_path / "pools", cache)

    run_pair(TESTS / "devices" / "two_processes.py", tmp_path)

    swapped = pickle.loads((tmp_path / "swapped").read_bytes())
    wanted = jkv.swap_out(alone, [1, 2])[1]
    for found, leaf in zip(
        jax.tree.leaves(swapped.groups[0].contents),
        jax.tree.leaves(wanted.groups[0].contents),
        strict=True,
    ):
        np.testing.assert_array_equal(found, leaf)


@pytest.mark.one_end
def test_files_of_pools_are_loaded_with_pools(tmp_path):
    """The number of ranks must be equal; other caches are refused."""
    layout = Layout("sharded", (("dp", 2), ("tp", 4)), AxisType.Explicit)
    path, config = tmp_path / "pools", small(layout)
    cache = jkv.init(config, mesh=layout.mesh, pools="dp")
    cache, _ = jkv.over_pools(jkv.allocate)(cache, np.array([[4, 9], [12, -1]]))
    jkv.save(path, cache)
    on_two = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("ranks",))
    found = jkv.load(path, mesh=layout.mesh, pools="dp")
    kinds = [jax.typeof(each.storage[0].key_pool) for each in (found, cache)]
    assert kinds[0] == kinds[1]
    for other in (found, jkv.load(path, mesh=on_two, pools="ranks")):
        for again, pool in zip(
            jkv.split_pools(other), jkv.split_pools(cache), strict=True
        ):
            assert without_refusals(again) == without_refusals(pool)
    for options in ({}, {"mesh": on_two}, {"mesh": layout.mesh, "pools": "tp"}):
        with pytest.raises(ValueError, match="must be a mesh axis .* has 2 pools"):
            jkv.load(path, **options)
    with pytest.raises(ValueError, match="with several pools"):
        jkv.save(path, cache, 0)
    jkv.save(path, jkv.split_pools(cache)[0])
    with pytest.raises(ValueError, match="has one pool, without ranks"):
        jkv.load(path, mesh=on_two, pools="ranks")
