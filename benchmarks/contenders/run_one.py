"""Run one contender of `rollouts.py` once; print seconds and counts as JSON.

Usage, in benchmarks/: python -m contenders.run_one MODULE CLASS WORKLOAD
"""

import importlib
import json
import pathlib
import statistics
import sys
import time

from contenders.workloads import Workload


def main() -> None:
    """Prepare, run, print."""
    module, name, path = sys.argv[1:]
    workload = Workload.read(pathlib.Path(path))
    contender = getattr(importlib.import_module(f"contenders.{module}"), name)(workload)
    contender.prepare()
    seconds = []
    for _ in range(workload.repeats):
        began = time.perf_counter()
        found = contender.run()
        seconds.append(time.perf_counter() - began)
        assert found["tokens"] == workload.num_tokens, (found, workload.num_tokens)
    print(json.dumps({"seconds": statistics.median(seconds), **found}))


if __name__ == "__main__":
    main()
