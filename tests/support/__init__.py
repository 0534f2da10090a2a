"""Helpers shared by the tests.

Used everywhere:
`small_caches`: small caches, and verbs that pad their requests.
`oracle`: the cache in plain Python.
`tolerances`: numerical tolerances by dtype.
`jax_versions`: the tests that run with the oldest and with the newest JAX.
`compiled_hlo`: copies of a pool in a compiled module.
`marks`, `mesh_table`: a third kind of group, and functions on meshes.
`paths`: the repository's folders.

Packages by subject, each listed in its `__init__`: `caches`, `attention`, `states`,
`models`, `decoding`, `serving`, `grammar`, `checkpoints`.

Two programs: `mutations` plants one fault after another in the package, and `walks`
lists the files that run behind each entry point.
"""
