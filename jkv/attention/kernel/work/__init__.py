"""Work lists of the kernels' programs."""
