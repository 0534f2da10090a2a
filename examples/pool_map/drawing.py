"""The pool's map as a picture or animation."""

import numpy as np
from matplotlib import animation, patches, pyplot

from .cells import COLOURS, LEGEND, SHARED, SIGNS


def save_picture(path, frames):
    """Save the last frame as a picture, or all frames as a GIF."""
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
