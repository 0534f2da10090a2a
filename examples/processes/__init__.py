"""Generation on several processes (`examples/multiprocess.py`)."""
