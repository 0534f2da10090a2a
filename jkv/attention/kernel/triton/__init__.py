"""jkv's own lowering, from the jaxpr of a kernel to Triton's IR as text."""
