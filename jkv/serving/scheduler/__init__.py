"""Host side of the engine: queue, scheduling, parking, offloading and statistics."""
