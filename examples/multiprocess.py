"""Continue texts on several processes, and go on after one of them was killed.

    python examples/multiprocess.py --state FOLDER
    python examples/multiprocess.py --state FOLDER --coordinator HOST:PORT --process 0
    srun --kill-on-bad-exit=1 python examples/multiprocess.py --state FOLDER \
        --coordinator auto --devices 0

The first starts two processes here, each with two simulated devices: the devices of one
share the model (tensor parallel), each process has texts of its own (data parallel).
The second is the command for one process, to start by hand; `--process 1` is the other,
on another host too. Under SLURM, Open MPI or on a TPU JAX finds the others itself.

State is saved to FOLDER every few steps. When a process ends before its work is done
the others end, too; the same command then goes on where they stopped. The code is in
`processes/`: `launching.py` starts and watches, `generation.py` runs in each.
"""

import sys

from generating.exiting import answering_errors, errors_in_one_line
from processes.options import parse_arguments

if __name__ == "__main__":
    with errors_in_one_line():
        options = parse_arguments(__doc__)
        # Imported here, as the launcher needs no JAX and a process configures it.
        if options.coordinator is None:
            from processes.launching import launch

            with answering_errors():
                sys.exit(launch(options))
        from processes.generation import run_process

        run_process(options)
