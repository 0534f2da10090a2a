"""What `examples/block_map.py` plays (`game.py`), in cells (`cells.py`) and pictures
(`drawing.py`)."""
