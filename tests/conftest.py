"""Fixtures of all tests: strict JAX, trace counts, and test selection by suite."""

import gc
import itertools
import pathlib
import signal

import chex
import jax
import pytest
from support.jax_versions import runs_here

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

pytest_plugins = ["support.attention.compiled_shapes"]

# Not tests; collecting doctests would import optional packages.
collect_ignore = ["support"]

_played = itertools.count(1)
_compiled = []  # seconds of each program


def pytest_configure():
    """Enable Ctrl-C in child processes: background processes ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    jax.monitoring.register_event_duration_secs_listener(_note_compiled)


def _note_compiled(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(seconds)


def pytest_terminal_summary(terminalreporter):
    """Print the compile time, below the slowest tests."""
    summary = f"{len(_compiled)} programs compiled in {sum(_compiled):.0f} seconds"
    terminalreporter.write_line(summary)


def pytest_collection_modifyitems(config, items):
    """Deselect tests of the other JAX version, or of a further suite."""
    here = [item for item in items if runs_here(*_marks_of(item))]
    config.hook.pytest_deselected(items=[item for item in items if item not in here])
    items[:] = here


def pytest_collection_finish():
    """Run the garbage collector rarely and skip imported objects: traces are large."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _marks_of(item):
    """Return the arguments of `runs_here`."""
    is_newest_further = item.get_closest_marker("newest_further") is not None
    return _has_one_end(item), _is_further(item), is_newest_further


def _has_one_end(item):
    """Return True for tests of one JAX version: marked ones and docstring examples."""
    return _is_example(item) or item.get_closest_marker("one_end")


def _is_further(item):
    """Return True for further tests: marked ones, and examples that compile loops.

    The tests of their packages compile them, too.
    """
    has_loops = item.nodeid.startswith(("jkv/decoding/", "jkv/trees/", "jkv/jitted"))
    is_marked = item.get_closest_marker("further") is not None
    return is_marked or (_is_example(item) and has_loops)


def _is_example(item):
    return isinstance(item, pytest.DoctestItem) and item.path.suffix == ".py"


@pytest.fixture(autouse=True)
def fresh_trace_counts():
    """Clear the trace counts before every test."""
    chex.clear_trace_counter()


def pytest_runtest_teardown():
    """Free compiled programs before the process has too many memory maps.

    Each program on a CPU takes a few; Linux allows 65,530, and LLVM crashes beyond.
    Counting takes milliseconds, so it runs after every eighth test.
    """
    maps = pathlib.Path("/proc/self/maps")
    if next(_played) % 8 or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()
