"""Abnormal ends of a command: one line of output, for every cause.

Ctrl-C ends the process at once, by `os._exit`. JAX compiles on threads of its own: the
main thread is interrupted, the compiler is not, and it takes up to half a minute. At
exit Python and C++ destroy the client and the tables that it works with, and the
process dies of a SIGSEGV. A client that is kept alive does not help: half of the
processes then died in LLVM, as its own tables go when `exit` runs.
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

# A shell's status for a process that a signal has ended: 128 and its number.
INTERRUPTED, OUTPUT_CLOSED = 128 + 2, 128 + 13

# An invalid value, as in argparse; and a failure for another reason.
BAD_VALUE, FAILED = 2, 1

# New objects after which Python looks for cycles. Tracing makes many that stay: after
# 700 of them, as usual, it looks some 800 times until a first text.
COLLECTED_AFTER = 20_000

# The extra of jkv that brings a package; all others are in `examples`.
EXTRAS = {"tunix": "tunix", "starlette": "http", "uvicorn": "http"}


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End with a line and the usual exit status on errors outside the program.

    They are Ctrl-C, a closed pipe, and a package that is not installed: import all
    packages but Python's own within.
    """
    set_known_flags()
    gc.set_threshold(COLLECTED_AFTER)
    # A job in the background ignores Ctrl-C, and goes on to do so.
    is_asked = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_asked:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        end_now(INTERRUPTED, "\ninterrupted")
    except BrokenPipeError:
        # Buffered output goes nowhere; else Python complains when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("\nstopped: the output was closed", file=sys.stderr)
        sys.exit(OUTPUT_CLOSED)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(package, "examples")
        fail(FAILED, f"{error}; pip install '.[{extra}]' in the folder of jkv")
    finally:
        if is_asked:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def set_known_flags() -> None:
    """Set XLA's flags that `jkv.doctor --first-light` found, before JAX is imported."""
    found = importlib.util.find_spec("jkv")
    for folder in (found and found.submodule_search_locations) or ():
        runpy.run_path(f"{folder}/xla_flags.py")["set_known_flags"]()


@contextlib.contextmanager
def answering_errors() -> Iterator[None]:
    """End with a line on a value that cannot be (2) and on a file that fails (1)."""
    try:
        yield
    except BrokenPipeError:
        raise
    except ValueError as error:
        fail(BAD_VALUE, error)
    except OSError as error:
        fail(FAILED, error)


def fail(status: int, reason: object) -> NoReturn:
    """Say in one line why the command ends."""
    print(f"error: {' '.join(str(reason).split())}", file=sys.stderr)
    sys.exit(status)


def interrupt(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or end now while a module is imported.

    Modules in C++ that are half imported crash, or tell of it as an ImportError.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            end_now(INTERRUPTED, "\ninterrupted")
        frame = frame.f_back
    raise KeyboardInterrupt


def end_now(status: int, said: str) -> None:
    """End the process and all of its threads, as they are."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is answered already
    # Where a pipe is closed, too, there is nothing to say.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        print(said, file=sys.stderr, flush=True)
    os._exit(status)
