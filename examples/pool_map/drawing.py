"""The pool as cells: what each block is, in colours and in signs."""

import colorsys
import string

import numpy as np
from matplotlib import animation, patches, pyplot
from rich.text import Text

FREE, CACHED, SHARED, FIRST_COLOUR = 0, 1, 2, 3
HEIGHT, WIDTH = 8, 20  # of the map, in blocks
SIGNS = ".o+" + string.ascii_uppercase[:24]
LEGEND = {FREE: "free", CACHED: "cached", SHARED: "shared", FIRST_COLOUR: "sequence A"}
TEXT_LEGEND = "  ".join(f"{SIGNS[n]} {words}" for n, words in LEGEND.items()) + ", ..."

# Of free, cached and shared blocks, then of the sequences: eight hues in three tones.
TONES = [(0.75, 1.0), (0.85, 0.62), (0.45, 0.97)]  # saturation and value
HUES = [colorsys.hsv_to_rgb(i / 8, *tone) for tone in TONES for i in range(8)]
COLOURS = np.array([[0.1] * 3, [0.5] * 3, [1.0] * 3, *HUES])


def draw_map(cache):
    """Return what each block is, a row of COLOURS, int[HEIGHT, WIDTH]."""
    meta = cache.metadata
    cells = np.where(np.asarray(meta.prefix.hashes) == 0, FREE, CACHED)
    for seq_id, table in enumerate(np.asarray(meta.block_tables)):
        cells[table[table < cache.num_blocks]] = FIRST_COLOUR + seq_id
    cells[np.asarray(meta.reference_counts) > 1] = SHARED
    return cells.reshape(HEIGHT, WIDTH)


def as_text(cells, said):
    """Return the map with a sign for each block, coloured where there are colours."""
    text = Text(f"{said}\n{TEXT_LEGEND}\n")
    for i, cell in enumerate(cells.flat):
        red, green, blue = (255 * COLOURS[cell]).astype(int)
        style = f"black on rgb({red},{green},{blue})" if cell != FREE else ""
        text.append(f"{SIGNS[cell]} ", style)
        text.append("" if (i + 1) % WIDTH else "\n")
    return text


def save_picture(path, frames):
    """Write the last frame as a picture, or all of them as a GIF."""
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots(figsize=(8, 4.4), facecolor="#333338")
    boxes = [patches.Patch(color=COLOURS[n], label=LEGEND[n]) for n in LEGEND]
    figure.legend(boxes, LEGEND.values(), loc="lower center", ncols=4, fontsize=9)

    def show(frame):
        axes.clear()
        axes.set_axis_off()
        axes.set_title(frame[1], fontsize=11, color="white")
        axes.pcolormesh(COLOURS[frame[0]][::-1], edgecolors="#333338", linewidth=2)
        for (row, column), cell in np.ndenumerate(frame[0][::-1]):
            sign = SIGNS[cell] if cell > SHARED else ""
            axes.text(column + 0.5, row + 0.5, sign, ha="center", va="center")

    frames = frames if path.endswith(".gif") else frames[-1:]
    film = animation.FuncAnimation(figure, show, frames, cache_frame_data=False)
    film.save(path, writer=animation.PillowWriter(fps=5), dpi=120)
