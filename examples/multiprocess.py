"""Generate on several processes, and resume after one of them was killed.

    python examples/multiprocess.py --state FOLDER
    python examples/multiprocess.py --state FOLDER --coordinator HOST:PORT --process 0
    srun --kill-on-bad-exit=1 python examples/multiprocess.py --state FOLDER \
        --coordinator auto --devices 0

The first command starts two local processes with two simulated devices each. The
devices of a process share the model (tensor parallelism); each process has its own
prompts (data parallelism). The second command starts one process by hand; `--process 1`
is the other, possibly on another host. Under SLURM, Open MPI or on TPUs, JAX finds the
peers.

State is saved to FOLDER every few steps. If a process exits early, the others exit
too; run the same command to resume. The code is in `processes/`: `launching.py` starts
and monitors the processes, `generation.py` runs in each of them.
"""

import sys

from generating.exiting import answering_errors, errors_in_one_line
from processes.options import parse_arguments

if __name__ == "__main__":
    with errors_in_one_line():
        options = parse_arguments(__doc__)
        # Imported here: the launcher needs no JAX; each process configures JAX itself.
        if options.coordinator is None:
            from processes.launching import launch

            with answering_errors():
                sys.exit(launch(options))
        from processes.generation import run_process

        run_process(options)
