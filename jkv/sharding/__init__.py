"""Several devices: loops inside `shard_map`, and arrays whose heads lie on a mesh."""
