"""What names the kinds of which a cache is made: init, partition_specs, save, load."""
