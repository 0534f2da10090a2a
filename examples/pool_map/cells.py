"""Map of the block pool as coloured characters for a terminal."""

import colorsys
import string

import numpy as np
from rich.text import Text

FREE, CACHED, SHARED, FIRST_COLOUR = 0, 1, 2, 3
HEIGHT, WIDTH = 8, 20  # of the map, in blocks
SIGNS = ".o+" + string.ascii_uppercase[:24]
LEGEND = {FREE: "free", CACHED: "cached", SHARED: "shared", FIRST_COLOUR: "sequence A"}
TEXT_LEGEND = "  ".join(f"{SIGNS[n]} {words}" for n, words in LEGEND.items()) + ", ..."

# Free, cached and shared blocks, then sequences: eight hues in three tones.
TONES = [(0.75, 1.0), (0.85, 0.62), (0.45, 0.97)]  # saturation and value
HUES = [colorsys.hsv_to_rgb(i / 8, *tone) for tone in TONES for i in range(8)]
COLOURS = np.array([[0.1] * 3, [0.5] * 3, [1.0] * 3, *HUES])


def find_kinds(cache):
    """Return the kind of each block, an index into COLOURS, int[N]."""
    (group,) = cache.metadata.groups
    cells = np.where(np.asarray(cache.metadata.index.hashes) == 0, FREE, CACHED)
    for seq_id, table in enumerate(np.asarray(group.block_tables)):
        colour = FIRST_COLOUR + seq_id % (len(COLOURS) - FIRST_COLOUR)
        cells[table[table < cache.num_blocks]] = colour
    cells[np.asarray(group.reference_counts) > 1] = SHARED
    return cells


def draw_map(cache):
    """Return the map of a pool with HEIGHT * WIDTH blocks, int[HEIGHT, WIDTH]."""
    return find_kinds(cache).reshape(HEIGHT, WIDTH)


def draw_overview(cache, width=64, most_rows=8):
    """Return the map of a pool of any size, int[rows, width].

    A cell of a large pool represents several blocks and shows their largest kind.
    """
    kinds = find_kinds(cache)
    each = -(-len(kinds) // (width * most_rows))
    rows = -(-len(kinds) // (width * each))
    padded = np.pad(kinds, (0, rows * width * each - len(kinds)))
    return padded.reshape(rows, width, each).max(axis=2)


def as_text(cells, caption):
    """Return the map as text with one character per cell, coloured if supported."""
    text = Text(f"{caption}\n{TEXT_LEGEND}\n")
    for i, cell in enumerate(cells.flat):
        red, green, blue = (255 * COLOURS[cell]).astype(int)
        style = f"black on rgb({red},{green},{blue})" if cell != FREE else ""
        text.append(f"{SIGNS[cell]} ", style)
        text.append("" if (i + 1) % cells.shape[1] else "\n")
    return text
