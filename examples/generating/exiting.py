"""Exit with one line of output on errors and signals.

Ctrl-C exits by `os._exit`. JAX compiles in threads that cannot be interrupted, for up
to half a minute. A normal exit destroys the client and the tables in use, and the
process dies of a SIGSEGV. Keeping the client alive does not help: half of the processes
then died in LLVM, whose own tables `exit` destroys.
"""

import contextlib
import gc
import importlib.util
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

# A shell's status for a process ended by a signal: 128 plus its number.
INTERRUPTED, OUTPUT_CLOSED = 128 + 2, 128 + 13

# Status of an invalid value, as in argparse, and of other failures.
BAD_VALUE, FAILED = 2, 1

# Threshold of the garbage collector. Tracing creates many long-lived objects; with the
# default of 700, it runs about 800 times before the first token.
COLLECTED_AFTER = 20_000

# Extra of jkv that installs a package; the default is `examples`.
EXTRAS = {"tunix": "tunix", "starlette": "http", "uvicorn": "http"}


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print one line and exit with the usual status on errors outside the program.

    These are Ctrl-C, a closed pipe, and a missing package: import all third-party
    packages within this context.
    """
    set_known_flags()
    gc.set_threshold(COLLECTED_AFTER)
    # Background jobs ignore Ctrl-C; keep that.
    handles_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles_interrupt:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        end_now(INTERRUPTED, "\ninterrupted")
    except BrokenPipeError:
        # Redirect buffered output, otherwise Python reports an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("\nstopped: the output was closed", file=sys.stderr)
        sys.exit(OUTPUT_CLOSED)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(package, "examples")
        fail(FAILED, f"{error}; pip install '.[{extra}]' in the folder of jkv")
    finally:
        if handles_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def set_known_flags() -> None:
    """Set XLA flags found by `jkv.doctor --first-light`; call before importing JAX."""
    found = importlib.util.find_spec("jkv")
    for folder in (found and found.submodule_search_locations) or ():
        runpy.run_path(f"{folder}/xla_flags.py")["set_known_flags"]()


@contextlib.contextmanager
def answering_errors() -> Iterator[None]:
    """Exit with one line on a ValueError (status 2) or an OSError (status 1)."""
    try:
        yield
    except BrokenPipeError:
        raise
    except ValueError as error:
        fail(BAD_VALUE, error)
    except OSError as error:
        fail(FAILED, error)


def fail(status: int, reason: object) -> NoReturn:
    """Print an error in one line and exit."""
    print(f"error: {' '.join(str(reason).split())}", file=sys.stderr)
    sys.exit(status)


def interrupt(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once while a module is imported.

    Half-imported C++ modules crash, or raise ImportError instead.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            end_now(INTERRUPTED, "\ninterrupted")
        frame = frame.f_back
    raise KeyboardInterrupt


def end_now(status: int, message: str) -> None:
    """Exit immediately, without waiting for threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # already handled
    # Standard output and error may both be closed.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)
    os._exit(status)
