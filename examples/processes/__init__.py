"""Several processes that continue texts together (`examples/multiprocess.py`)."""
