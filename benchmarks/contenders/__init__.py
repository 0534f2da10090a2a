"""Contenders of `rollouts.py`, each in a process of its own (`run_one.py`).

`workloads.py` defines the workloads; `of_jkv.py`, `of_transformers.py` and
`of_tunix.py` have the contenders, each the only importer of its library. A contender is
constructed with a workload; `prepare` compiles, and `run` does the work and returns its
counts, including new tokens.
"""
