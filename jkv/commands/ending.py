"""How a command ends: on a mistake in one line, after Ctrl-C without cleaning up.

JAX compiles on threads of its own: Ctrl-C interrupts the main thread, the compiler goes
on for up to half a minute. What Python and C++ do at exit destroys the client and the
tables that it works with, and the process dies of a SIGSEGV. A client that is kept
alive does not help: half of the processes then died in LLVM, whose own tables go when
`exit` runs. So an interrupted process ends by `os._exit`.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

# A value that cannot be; what failed for another reason; and what a shell reports of a
# process that SIGINT has ended.
BAD_VALUE, FAILED, INTERRUPTED = 2, 1, 130


class Parser(argparse.ArgumentParser):
    """Parse a command line; say what is wrong with it in one line."""

    def error(self, message: str) -> NoReturn:
        """End with the message and exit status 2."""
        self.exit(BAD_VALUE, f"error: {message}\n")


def run_process(main: Callable[[], int]) -> NoReturn:
    """End the process with what a command returns; after Ctrl-C with all threads."""
    try:
        status = main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        status = INTERRUPTED
    if status != INTERRUPTED:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
