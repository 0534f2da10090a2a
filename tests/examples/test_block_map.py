"""`block_map.py`: cells match the pool, and each step has a description."""

import importlib
import re

import numpy as np
import pytest

import jkv

pytestmark = pytest.mark.one_end


@pytest.fixture
def pool_map():
    """The module that draws the pool, and its optional packages."""
    for package in ("matplotlib", "PIL"):
        pytest.importorskip(package)
    return importlib.import_module("pool_map.cells")


@pytest.mark.further
@pytest.mark.slow
def test_block_map_draws_the_pool(pool_map, run_here, monkeypatch, tmp_path):
    """Prefix hits, forks, frees and a compaction; the cells equal the pool."""
    import rich
    from PIL import Image
    from pool_map import drawing

    path, steps, frames, save = tmp_path / "pool.gif", 26, [], drawing.save_picture

    def save_some(path, drawn):
        frames.extend(drawn)
        save(path, drawn[-3:])  # rendering is slow

    monkeypatch.setattr(drawing, "save_picture", save_some)
    monkeypatch.setattr(rich.get_console(), "width", 200)
    options = ("--delay", "0", "--steps", str(steps), "--save", str(path))
    output = run_here("block_map.py", *options).out
    lines = output.splitlines()
    assert re.match(rf"Step {steps}: \w.*; \d+ sequences are open$", lines[0])
    assert "+ shared" in lines[1]
    # Without colours the sign still identifies each block.
    rows = [line.split() for line in lines[2:10]]
    assert {len(row) for row in rows} == {20}
    assert {"o", "+"} < set(sum(rows, [])) <= set(pool_map.SIGNS)
    assert "compacted   1 times" in output
    with Image.open(path) as picture:
        assert picture.format == "GIF" and picture.n_frames == 3
        colours = picture.convert("RGB").getcolors(maxcolors=2**20)
        assert len(colours) > 5

    # Each step has its description.
    captions = [words for _, words in frames]
    assert len(captions) == steps
    assert all(
        re.fullmatch(r"Step \d+: .*; \d+ sequences are open", s) for s in captions
    )
    assert any(
        re.search(r"B opens, \d+ of its 56 tokens were found;", s) for s in captions
    )
    assert any(re.search(r"\d+ sequences grow by 8 tokens", s) for s in captions)


def test_block_map_distinguishes_states(pool_map, tmp_path):
    """Both sequences share blocks 0 and 1; 2 and 3 belong to one each."""
    from PIL import Image
    from pool_map import drawing, game

    cache = jkv.init(game.CONFIG, storage=False)
    prompts = np.full((2, game.PROMPT), -1)
    prompts[:, :9] = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 0]
    for seq_id, prompt in enumerate(prompts):
        cache, opened = jkv.allocate(cache, 0, tokens=prompt[None])
        found = int(opened.num_cached[0])
        rest = np.pad(prompt[found:], (0, found), constant_values=-1)
        cache = game.append(cache, [seq_id], rest[None])
    first = pool_map.FIRST_COLOUR
    cells = pool_map.draw_map(cache).flat[:5].tolist()
    shared, free = pool_map.SHARED, pool_map.FREE
    assert cells == [shared, shared, first, first + 1, free]
    cache, _ = jkv.free(cache, 0)
    cache, _ = jkv.free(cache, 1)
    cells = pool_map.draw_map(cache).flat[:5].tolist()
    assert cells == [pool_map.CACHED] * 2 + [free] * 3

    path = tmp_path / "pool.png"
    drawing.save_picture(str(path), [(pool_map.draw_map(cache), "the last step")])
    with Image.open(path) as picture:
        assert picture.format == "PNG" and getattr(picture, "n_frames", 1) == 1
        colours = picture.convert("RGB").getcolors(maxcolors=2**20)
        assert {colour for _, colour in colours} > {
            tuple(round(255 * part) for part in pool_map.COLOURS[state])
            for state in (pool_map.CACHED, free)
        }


def test_the_colours_of_the_map_differ(pool_map):
    colours = pool_map.COLOURS
    assert len(colours) == len(pool_map.SIGNS) == len(set(pool_map.SIGNS))
    apart = np.linalg.norm(colours[:, None] - colours[None], axis=-1)
    assert np.min(apart + 9 * np.eye(len(colours))) > 0.2
