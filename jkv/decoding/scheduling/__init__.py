"""Who runs next: pure functions on small arrays, without a cache or a model."""
