"""What `examples/block_map.py` plays (`game.py`) and how it draws it (`drawing.py`)."""
