"""Random operations (`game.py`) as cells (`cells.py`) and pictures (`drawing.py`),
for `examples/block_map.py`."""
