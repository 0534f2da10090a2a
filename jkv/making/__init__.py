"""Creation of caches from their concrete classes: init, partition_specs, save, load."""
