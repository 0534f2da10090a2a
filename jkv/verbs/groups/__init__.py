"""Groups of layers: caches of different lives behind the verbs of one."""
