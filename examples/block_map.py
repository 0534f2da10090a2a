"""The pool drawn while sequences come, branch, reuse prefixes, go and are compacted.

    python examples/block_map.py --steps 60 --save pool.png     (or pool.gif)

One cell is a block. Its colour is the sequence that holds it; a block of several is
white, one that is free but still found by its prefix is grey, and a free one dark.
"""

import argparse
import time

import numpy as np
from matplotlib import animation, pyplot
from rich.live import Live
from rich.text import Text

import jkv

FREE, CACHED, SHARED, FIRST_COLOUR = 0, 1, 2, 3
NUM_SEQUENCES, LONGEST, PROMPT, GROWTH = 24, 96, 56, 8  # the last three in tokens
HEIGHT, WIDTH = 8, 20  # of the map, in blocks
LEGEND = "dark: free, grey: cached, white: shared, colours: one sequence each"

# Of free, cached and shared blocks, then of the sequences: hues that lie far apart.
hues = np.arange(NUM_SEQUENCES)[:, None] * 0.618 + np.array([0, 1 / 3, 2 / 3])
COLOURS = np.append([[0.1] * 3, [0.5] * 3, [1] * 3], 0.6 + np.cos(6.3 * hues) / 3, 0)


def draw_map(cache):
    """Return what each block is, a row of COLOURS, int[HEIGHT, WIDTH]."""
    meta = cache.metadata
    cells = np.where(np.asarray(meta.prefix.hashes) == 0, FREE, CACHED)
    for seq_id, table in enumerate(np.asarray(meta.block_tables)):
        cells[table[table < cache.num_blocks]] = FIRST_COLOUR + seq_id
    cells[np.asarray(meta.reference_counts) > 1] = SHARED
    return cells.reshape(HEIGHT, WIDTH)


def append(cache, seq_ids, tokens):
    """Grow sequences by rows of tokens, [B, Q], -1 after each row's end."""
    counts, width = np.sum(tokens >= 0, axis=1), tokens.shape[1]
    cache, batch = jkv.append(
        cache, seq_ids, counts, max_query_length=width, tokens=tokens.reshape(-1)
    )
    return jkv.commit(cache, batch)  # a model would write and attend before


def play(cache, num_steps, seed):
    """Yield the cache after each step, and what was done."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(1000, size=(3, PROMPT - 8))  # prompts begin like one of them
    for step in range(1, num_steps + 1):
        is_open = np.asarray(cache.metadata.is_open)
        kind = rng.choice(["open", "grow", "fork", "free"], p=[0.4, 0.3, 0.15, 0.15])
        if step % 25 == 0:
            cache, said = jkv.compact(cache), "compact"
        elif kind == "open" or not is_open.any():
            prompt = np.append(starts[rng.integers(3)], rng.integers(1000, size=8))
            cache, opened = jkv.allocate(cache, PROMPT, tokens=prompt[None])
            seq_id, found = int(opened.seq_ids[0]), int(opened.num_cached[0])
            rest = np.append(prompt[found:], [-1] * found)
            cache = append(cache, [seq_id], rest[None])
            said = f"open {seq_id}: {found} of {PROMPT} tokens found"
            if seq_id == jkv.NO_SEQUENCE:
                cache, gone = jkv.evict(cache, cache.num_blocks // 2)
                said = f"no room: evict {np.sum(np.asarray(gone) >= 0)} sequences"
        elif kind == "grow":
            grows = is_open & (np.asarray(cache.metadata.context_lengths) < LONGEST)
            seq_ids = np.where(grows, np.arange(NUM_SEQUENCES), jkv.NO_SEQUENCE)
            tokens = rng.integers(1000, size=(NUM_SEQUENCES, GROWTH))
            cache, said = append(cache, seq_ids, tokens), f"{GROWTH} more tokens each"
        else:
            seq_id = int(rng.choice(np.flatnonzero(is_open)))
            cache, said = getattr(jkv, kind)(cache, seq_id)[0], f"{kind} {seq_id}"
        yield cache, f"{step:4}  {said}"


def save_picture(path, frames):
    """Write the last frame as a picture, or all of them as a GIF."""
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots(figsize=(8, 4), facecolor="#333338")

    def show(frame):
        axes.clear()
        axes.set_axis_off()
        axes.set_title(f"{frame[1]}\n{LEGEND}", fontsize=9, color="white")
        axes.pcolormesh(COLOURS[frame[0]][::-1], edgecolors="#333338", linewidth=2)

    frames = frames if path.endswith(".gif") else frames[-1:]
    film = animation.FuncAnimation(figure, show, frames, cache_frame_data=False)
    film.save(path, writer=animation.PillowWriter(fps=5), dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--delay", type=float, default=0.1, help="seconds a step")
    parser.add_argument("--save", help="a .png of the last step, a .gif of all")
    options = parser.parse_args()
    sizes = dict(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4)
    sizes |= dict(max_sequences=NUM_SEQUENCES, max_context_length=LONGEST)
    config = jkv.CacheConfig(**sizes, num_blocks=HEIGHT * WIDTH, prefix_caching=True)
    cache, frames = jkv.init(config, storage=False), []
    with Live(auto_refresh=False) as live:
        for state, said in play(cache, options.steps, seed=0):
            frames.append((draw_map(state), said))
            text = Text(f"{said}\n{LEGEND}\n")
            for i, cell in enumerate(frames[-1][0].flat):
                style = "rgb({},{},{})".format(*(255 * COLOURS[cell]).astype(int))
                text.append("██" if (i + 1) % WIDTH else "██\n", style)
            live.update(text, refresh=True)
            time.sleep(options.delay)
    print(jkv.stats(state))
    if options.save:
        save_picture(options.save, frames)


if __name__ == "__main__":
    main()
