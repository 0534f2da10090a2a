"""jkv's own lowering: from the jaxpr of a kernel to a module of Triton as text."""
