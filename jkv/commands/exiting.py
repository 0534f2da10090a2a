"""Exit of a command: one-line errors, and an exit after Ctrl-C without cleanup.

JAX compiles on its own threads: Ctrl-C interrupts the main thread, while the compiler
continues for up to half a minute. Destructors at exit then free the client and tables
that the compiler uses, and the process crashes with SIGSEGV. Keeping the client alive
does not help: half of the processes then crashed in LLVM, whose tables are freed by
`exit`. So an interrupted process exits by `os._exit`.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

# Exit statuses: invalid value, other failure, and the shell's status after SIGINT.
BAD_VALUE, FAILED, INTERRUPTED = 2, 1, 130


class Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors."""

    def error(self, message: str) -> NoReturn:
        """Exit with the message and status 2."""
        self.exit(BAD_VALUE, f"error: {message}\n")


def run_process(main: Callable[[], int]) -> NoReturn:
    """Exit with the status of a command; after Ctrl-C without waiting for threads."""
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
