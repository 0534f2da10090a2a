"""Draw the block pool while sequences are added, forked, freed and compacted.

    python examples/block_map.py --steps 60 --save pool.png     (or pool.gif)

Each cell is a block. A letter with its own colour marks the block of one sequence, `+`
a block shared by several sequences, `o` a free block that is still in the prefix index,
and `.` a free block. The operations are in `pool_map/game.py`.
"""

import time

from generating.arguments import Parser, at_least, new_file
from generating.exiting import answering_errors, errors_in_one_line
from pool_map import cells, drawing, game
from rich.live import Live

import jkv


def main():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--steps", type=at_least(1), default=120)
    add("--delay", type=at_least(0, float), default=0.1, help="seconds per step")
    file = new_file(".png", ".gif")
    add("--save", type=file, help="a .png of the last step or a .gif of all")
    options = parser.parse_args()
    jkv.keep_compiled_programs()
    cache, frames = jkv.init(game.CONFIG, storage=False), []
    with Live(auto_refresh=False) as live:
        for state, caption in game.play(cache, options.steps, seed=0):
            frames.append((cells.draw_map(state), caption))
            live.update(cells.as_text(*frames[-1]), refresh=True)
            time.sleep(options.delay)
    print(jkv.stats(state))
    if options.save:
        with answering_errors():
            drawing.save_picture(str(options.save), frames)


if __name__ == "__main__":
    with errors_in_one_line():
        main()
