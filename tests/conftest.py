"""Fixtures of all tests: strict JAX, counted traces, and the tests of each suite."""

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

pytest_plugins = ["support.compiled_shapes"]

# No tests; looking for doctests would import the packages of optional extras.
collect_ignore = ["support"]

_played = itertools.count(1)
_compiled = []  # seconds of each program


def pytest_configure():
    """Enable Ctrl-C in child processes: one in the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    jax.monitoring.register_event_duration_secs_listener(_note_compiled)


def _note_compiled(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(seconds)


def pytest_terminal_summary(terminalreporter):
    """Say how much of the time was compiling; the dearest tests stand above it."""
    said = f"{len(_compiled)} programs compiled in {sum(_compiled):.0f} seconds"
    terminalreporter.write_line(said)


def pytest_collection_modifyitems(config, items):
    """Leave out tests for the other end of the range of JAX, or of a later suite."""
    here = [item for item in items if runs_here(_has_one_end(item), _is_further(item))]
    config.hook.pytest_deselected(items=[item for item in items if item not in here])
    items[:] = here


def pytest_collection_finish():
    """Look for garbage seldom, and not among imported objects: traces make much."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _has_one_end(item):
    """True if a test is for one end: marked so, or an example of a docstring."""
    return _is_example(item) or item.get_closest_marker("one_end")


def _is_further(item):
    """True if it is for later: marked so, or an example that compiles whole loops.

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

    Each program on CPU takes a few; Linux allows 65,530, and LLVM dies beyond them.
    Counting takes milliseconds, so it is done after every eighth test.
    """
    maps = pathlib.Path("/proc/self/maps")
    if next(_played) % 8 or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()
