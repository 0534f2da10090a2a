"""Random operations for `examples/block_map.py` (`game.py`), in cells (`cells.py`)
and pictures (`drawing.py`)."""
