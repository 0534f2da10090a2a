"""`serve_batch.py`: results are neither lost nor repeated, whatever interrupts it."""

import argparse
import json
import resource
import signal
import subprocess
import sys
import time

import pytest
from support.paths import EXAMPLES

pytest.importorskip("tokenizers")
pytest.importorskip("rich")

from served import batch, display, lines, loading

pytestmark = pytest.mark.one_end

# As in test_serve_http.py: what is compiled serves both.
SIZES = "--context 64 --max-running 4 --max-new-tokens 24 --blocks 12 --rows 8"
SIZES = SIZES.split()
NUM_LINES = 24


def write_prompts(path):
    asked = [{"prompt": f"The {i} import", "id": f"name {i}"} for i in range(NUM_LINES)]
    asked[3] = {"prompt": ""}
    asked[5] = {"prompt": "Every class", "n": 3, "temperature": 0.7}
    asked[7] = {"prompt": "For a list", "stop": ["e", "zz"]}
    path.write_text("\n".join(map(json.dumps, asked)) + "\n\nnonsense\n")
    return path


def read_results(path):
    """Results by line; each line has one."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_line = {each.pop("line"): each for each in found}
    assert len(by_line) == len(found)
    return by_line


def options(prompts, results):
    parser = argparse.ArgumentParser()
    loading.add_options(parser)
    chosen = parser.parse_args(SIZES)
    chosen.prompts, chosen.results = str(prompts), str(results)
    return chosen


@pytest.mark.slow
def test_a_killed_process_is_gone_on_with(tmp_path, capsys):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    whole, parted = tmp_path / "whole.jsonl", tmp_path / "parted.jsonl"
    batch.serve(options(prompts, whole))
    assert f"{NUM_LINES + 1} of {NUM_LINES + 1} results" in capsys.readouterr().err
    expected = read_results(whole)
    assert sorted(expected) == list(range(NUM_LINES + 1))
    assert "not empty" in expected[3]["error"] and "error" in expected[NUM_LINES]
    assert len({c["text"] for c in expected[5]["choices"]}) > 1
    stopped = expected[7]["choices"][0]
    assert stopped["finish_reason"] == "length" or "e" not in stopped["text"]
    assert expected[9]["id"] == "name 9"

    # Killed as soon as it has written something, in a write that was not finished.
    command = [EXAMPLES / "serve_batch.py", prompts, parted, *SIZES]
    process = subprocess.Popen([sys.executable, *map(str, command)])
    end = time.monotonic() + 240
    while not parted.exists() or parted.stat().st_size < 500:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with parted.open("ab") as file:
        file.write(b'{"line": 11, "asked": "tor')
    num_before = len(parted.read_bytes().splitlines()) - 1
    assert 0 < num_before < NUM_LINES + 1
    batch.serve(options(prompts, parted))
    assert read_results(parted) == expected
    # Nothing is left to do: no model is read.
    chosen = options(prompts, parted)
    chosen.model = "nowhere"
    before = parted.read_bytes()
    batch.serve(chosen)
    assert parted.read_bytes() == before


def test_a_full_disk_loses_nothing(tmp_path):
    """The limit of a file's size stands for a disk: it takes a part of a line, too."""
    path, asked = tmp_path / "results.jsonl", [f"line {i}" for i in range(50)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with (
            pytest.raises(OSError),
            lines.ResultLines(path, asked) as results,
        ):
            for i in range(50):
                results.write(i, {"text": "x" * i})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    done = read_results(path)
    assert 3 < len(done) < 50 and sorted(done) == list(range(len(done)))
    assert path.read_bytes().endswith(b"\n")
    with lines.ResultLines(path, asked) as results:
        assert results.done == set(done)
        for i in set(range(50)) - results.done:
            results.write(i, {"text": "x" * i})
    assert [read_results(path)[i]["text"] for i in range(50)] == [
        "x" * i for i in range(50)
    ]


def test_results_of_other_prompts_are_left_alone(tmp_path):
    path = tmp_path / "results.jsonl"
    with lines.ResultLines(path, ["a", "b"]) as results:
        results.write(1, {"text": "of b"})
    before = path.read_bytes()
    for asked in (["a", "c"], ["b"], []):
        with pytest.raises(ValueError, match="results of other prompts"):
            lines.ResultLines(path, asked)
    assert path.read_bytes() == before
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match="results of other prompts"):
        lines.ResultLines(path, ["a"])


def test_what_cannot_be_read_is_said_in_one_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    results = tmp_path / "results.jsonl"
    with pytest.raises(SystemExit, match="error: .*No such file"):
        batch.serve(options(path, results))
    path.write_text(" \n")
    with pytest.raises(SystemExit, match="error: .* has no line"):
        batch.serve(options(path, results))
    path.write_bytes(b"\xff")
    with pytest.raises(SystemExit, match="error: .* is not UTF-8"):
        batch.serve(options(path, results))


def test_the_picture_shows_progress_speed_and_pool(monkeypatch):
    import io

    import jkv
    from jkv.serving.scheduler.measures import Measures

    class Engine:
        """What the picture looks at."""

        cache = jkv.init(
            jkv.CacheConfig(
                num_layers=1,
                num_kv_heads=1,
                head_dim=8,
                num_blocks=300,
                max_sequences=2,
                max_context_length=64,
                prefix_caching=True,
            ),
            storage=False,
        )

        def stats(self):
            return Measures().read(300, 0.0, waiting=5, running=3, preempted=0)

        def warm_up(self, progress):
            progress("window", 2, 3)

    shown = io.StringIO()
    console = display.Console(
        file=shown, force_terminal=True, color_system=None, width=150
    )
    monkeypatch.setattr(display, "Console", lambda **_: console)
    display.warm_up(Engine())
    assert "compiling window" in shown.getvalue() and "2/3" in shown.getvalue()
    with display.Display(Engine(), 10) as picture:
        picture.update(4)
        picture.update(5)  # a moment later: not drawn
    text = shown.getvalue()
    assert "3 run, 5 wait" in text and "4/10" in text and "5/10" not in text
    assert text.count(". ") >= 300
