"""Helpers of the tests: none of it is a test.

Caches and the games played on them:
  `small_caches`: caches of one shape, and the verbs on them with padded requests.
  `random_operations`, `random_reuse`: games of random calls, checked by the oracle.
  `oracle`: the cache in plain Python.

Models, and their texts without a cache:
  `small_attention_model`: two layers of attention.
  `windowed_model`: layers with windows.
  `sharded_model`: heads spread over a mesh.
  `tunix_models`: models of google-tunix.
  `plain_queue`: a model of hashes, and the serving loop in plain Python.
  `plain_beam_search`, `plain_tree_search`, `plain_attention`: the algorithms in plain
    Python.
  `automata`, `derivatives`: logits processors, and regular expressions, in plain
    Python.
  `cloned_texts`: texts of a tree search as dense arrays, the bundled model on them.
  `small_engines`: engines around the model of hashes.

Expected results and tolerances:
  `attention_workloads`: the shapes of attention, which benchmarks share.
  `tolerances`: how close two results must be, by dtype.
  `jax_versions`: which tests run with the oldest JAX, and which with the newest.

Compiled programs:
  `compiled_hlo`: copies of a pool in a compiled module.
  `kernel_lowering`: kernels lowered for GPUs that are not there.
  `triton_machine_code`, `amd_instruction_walk`: their machine code, and its cycles.

Files:
  `paths`: where the repository's folders are.
  `config_json`: the settings of a checkpoint.
  `checkpoint_fixtures`, `beam_fixtures`: programs that write `tests/fixtures`.

And `mutations`, a program that puts one fault after another into the package.
"""
