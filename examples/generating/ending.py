"""How a command ends when it does not end by itself."""

import contextlib
import os
import sys
from collections.abc import Iterator

# What a shell reports of a process that a signal has ended: 128 and its number.
INTERRUPTED, NOBODY_READS = 128 + 2, 128 + 13


@contextlib.contextmanager
def ending_in_one_line() -> Iterator[None]:
    """End with a line and the usual exit status on Ctrl-C and on a closed pipe."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # What is still buffered goes nowhere; else Python complains when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("\nstopped: the output was closed", file=sys.stderr)
        sys.exit(NOBODY_READS)
