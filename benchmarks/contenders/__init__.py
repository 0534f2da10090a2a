"""The contenders of `rollouts.py`, each in a process of its own (`run_one.py`).

`workloads.py` says what is asked; `of_jkv.py`, `of_transformers.py` and `of_tunix.py`
hold the contenders, and each imports its library alone. A contender is made with a
workload, `prepare`s (compiling falls in there), and `run` does the work and returns its
counts, among them the new tokens.
"""
