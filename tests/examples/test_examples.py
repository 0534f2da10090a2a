"""The scripts of examples/ as users run them, and their errors for invalid input.

`run_example` runs scripts in a separate process with warnings as errors, as a first
start by a user. `run_here` runs the others in this process, to reuse imports and
compiled programs.
"""

import functools
import os
import re
import runpy
import subprocess
import sys

import pretrained
import pytest
from support.paths import EXAMPLES, ROOT

import jkv

# Other scripts of examples/, and the files that test them.
TESTED_ELSEWHERE = {
    "agent_tree.py": "test_agent_tree",
    "block_map.py": "test_block_map",
    "chat.py": "test_chat",
    "diffusion.py": "test_diffusion",
    "measure_pydoc.py": "test_bundled_model",
    "multiprocess.py": "test_processes",
    "prefix_lm.py": "test_hrm_text",
    "train_pydoc.py": "test_bundled_model",
    "train_draft.py": "test_bundled_model",
    "train_drafter.py": "test_train_drafter",
    "flax_model.py": "test_framework_models",
    "formats.py": "test_real_models",
    "equinox_model.py": "test_framework_models",
    "serve_batch.py": "test_serve_batch",
    "serve_http.py": "test_serve_http",
    "serve_ray.py": "test_serve_ray",
    "train_with_tunix.py": "test_tunix_training",
    "tree_search.py": "test_tree_search",
}


def run_example(script, *arguments):
    """Run a script in a separate process, and return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=600,
        env=os.environ | {"PYTHONIOENCODING": "utf-8", "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def complaint(monkeypatch, capsys):
    """Function that runs a script here and returns its exit status and error line."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        output = capsys.readouterr()
        assert output.err.endswith("\n") and len(output.err.splitlines()) == 1, (
            output.err
        )
        assert "error: " in output.err and not output.out
        return stopped.value.code, output.err

    return run


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    """Fail the test if a model is loaded or a program compiled."""

    def refuse(*_, **__):
        raise AssertionError("too early")

    monkeypatch.setattr(pretrained, "load", refuse)
    monkeypatch.setattr(jkv, "init", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.mark.one_end
def test_every_script_is_run_by_some_test():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    here = {"quickstart.py", "generate.py"}
    here |= {"parallel_sampling.py", "best_of_n.py", "beam_search.py"}
    here |= {"speculate.py", "data_parallel.py", "long_context.py", "edit_context.py"}
    assert scripts == here | TESTED_ELSEWHERE.keys()
    for test in TESTED_ELSEWHERE.values():
        assert list((ROOT / "tests").rglob(f"{test}.py"))


@pytest.mark.one_end
def test_examples_are_short():
    """At most 120 lines; scripts that only call a package have fewer."""
    fewer = {"quickstart.py": 60, "generate.py": 40, "serve_batch.py": 40}
    fewer |= {"serve_http.py": 60, "serve_ray.py": 80, "multiprocess.py": 60}
    lengths = {
        path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")
    }
    for script, length in lengths.items():
        assert length <= fewer.get(script, 120), script


@pytest.mark.one_end
def test_quickstart_is_in_the_docs_with_its_output(run_here):
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    first_block = page.split("```python\n")[1].split("```")[0]
    assert first_block == (EXAMPLES / "quickstart.py").read_text(encoding="utf-8")
    output = run_here("quickstart.py").out
    assert f"```text\n{output}```" in page
    assert "free blocks after free: 32" in output


@pytest.mark.further
@pytest.mark.one_end
def test_data_parallel_reports_each_replica():
    """On four simulated devices, both replicas work, each on its share of devices."""
    output = run_example("data_parallel.py", "--max-new-tokens", "8").stdout
    texts, replicas = output.split("\n\n4 devices, 2,049 KiB of cache a replica\n")
    assert len(texts.splitlines()) == 6 and "The with statement is used to" in texts
    pattern = (
        r"replica (\d) on devices (\[\d, \d\]): (\d+) blocks taken, \d+ at one time, "
        r"64 free again; keys and values ([\d,]+) KiB on each device"
    )
    found = [re.fullmatch(pattern, line).groups() for line in replicas.splitlines()]
    assert [each[:2] for each in found] == [("0", "[0, 1]"), ("1", "[2, 3]")]
    assert all(int(blocks) >= 3 for _, _, blocks, _ in found)
    assert {each[3] for each in found} == {"1,024"}


@pytest.mark.further
@pytest.mark.one_end
def test_a_context_is_edited(run_here):
    """Spans are removed from the middle; positions continue without recomputation."""
    lines = run_here("edit_context.py", "--new-tokens", "4").out.splitlines()
    sizes = [re.search(r"(\d+) -> (\d+) tokens", line) for line in lines]
    sizes = [tuple(map(int, found.groups())) for found in sizes if found]
    assert [before > after for before, after in sizes] == [True, True]
    assert sizes[0][1] == sizes[1][0]
    assert lines[-1] == f"next position {sizes[0][0]} of {sizes[0][0] + 1} tokens"


@pytest.mark.further
@pytest.mark.one_end
def test_a_long_context_is_sharded_over_all_devices():
    """On four simulated devices, each holds a quarter of the keys, at every length."""
    options = ("--tokens", "150", "--max-new-tokens", "4")
    text, devices = run_example("long_context.py", *options).stdout.split(
        "\n\n154 tokens in blocks of 64 on 4 devices:\n"
    )
    assert len(text) > 100
    pattern = r"  device (\d): (\d+) tokens, keys of (\d+) KiB of (\d+)"
    found = [re.fullmatch(pattern, line).groups() for line in devices.splitlines()]
    assert [int(number) for number, *_ in found] == [0, 1, 2, 3]
    assert sum(int(count) for _, count, *_ in found) == 154
    assert all(4 * int(share) == int(whole) for *_, share, whole in found)


GREEDY = ("--max-new-tokens", "24", "--temperature", "0")


@pytest.fixture(scope="module")
def streamed():
    """The output that a separate process streams for one prompt."""
    return run_example("generate.py", *GREEDY)


@pytest.mark.newest_further
@pytest.mark.slow
def test_generate_streams_one_prompt(streamed):
    assert streamed.stdout.startswith("The with statement is used to")
    assert len(streamed.stdout.split()) > 10
    assert re.search(
        r"24 tokens, \d+ tokens/s after [\d.]+ s; 0 of 6 blocks in use, 2 at the peak, "
        r"\d+% of their slots empty when it was reached; ended by LENGTH",
        streamed.stderr,
    )


@pytest.mark.slow
@pytest.mark.one_end
@pytest.mark.usefixtures("one_size")
def test_prompts_come_from_arguments_and_from_stdin(run_here):
    done = run_here(
        "generate.py",
        "class Path",
        *("--file", "-", "--max-new-tokens", "9", "--repetition-penalty", "1.3"),
        *("--top-k", "40", "--min-p", "0.02", "--seeds", "5", "--kv-dtype", "int8"),
        *("--value-dtype", "int4", "--scan-layers"),
        stdin="The import statement\nRaise an error if\n",
    )
    texts = done.out.split("\n\n---\n\n")
    starts = ["class Path", "The import statement", "Raise an error if"]
    assert [t[: len(s)] for t, s in zip(texts, starts, strict=True)] == starts
    assert all(len(t) > len(s) for t, s in zip(texts, starts, strict=True))
    assert "27 tokens" in done.err and "0 of 15 blocks" in done.err


@pytest.mark.slow
@pytest.mark.one_end
@pytest.mark.usefixtures("one_size")
def test_generate_ends_before_a_stop_string(streamed, run_here):
    whole = streamed.stdout
    stop = whole[len("The with statement is used to") :][20:24]
    stops = "--stop", stop, "--stop", "never"
    done = run_here("generate.py", *GREEDY, *stops, "--scan-layers")
    assert whole.startswith(done.out) and stop not in done.out.partition("to")[2]
    assert whole[len(done.out) :].startswith(stop) and "ended by STOP" in done.err


@pytest.mark.further
@pytest.mark.slow
@pytest.mark.one_end
def test_the_best_of_several_samples(run_here):
    options = ("--samples", "3", "--max-new-tokens", "4", "--temperature", "0")
    vote = ("--by", "majority", "--answer", "no such words")
    for choice in ((), vote):
        output = run_here("best_of_n.py", *options, *choice).out
        votes = re.findall(r"prompt \d: sample \d, .*; (\d) of 3 votes", output)
        assert votes == ["3", "3"]  # equal answers, or none
        # Each sample has a tail of its own; full prompt blocks are shared.
        assert "10 blocks at the peak, 18 if each sample" in output


@pytest.mark.further
@pytest.mark.slow
@pytest.mark.one_end
def test_parallel_samples_share_blocks(run_here):
    output = run_here("parallel_sampling.py", "--max-new-tokens", "12").out
    tables = [line.split()[3:] for line in output.splitlines() if "blocks 0" in line]
    assert len(tables) == 4
    # All blocks are equal except for the partial last one.
    assert len({tuple(table[:-1]) for table in tables}) == 1
    assert len({table[-1] for table in tables}) == 4
    peak, apart = map(
        int, re.search(r"(\d+) blocks at the peak, (\d+) without", output).groups()
    )
    assert peak <= apart / 2
    free, total = re.search(r"(\d+) of (\d+) blocks free at the end", output).groups()
    assert free == total
    samples = re.split(r"--- sample \d\n", output.rsplit("\n\n", 1)[0])[1:]
    assert len(set(samples)) == 4


@pytest.mark.further
@pytest.mark.slow
@pytest.mark.one_end
def test_beams_share_blocks(run_here):
    output = run_here("beam_search.py", "--max-new-tokens", "12", "--beams", "3").out
    lines = re.findall(r"^(?:greedy|beam \d) +(-[\d.]+)  (.+)$", output, re.M)
    greedy, *scores = [float(score) for score, _ in lines]
    assert len(set(lines)) >= 3 and scores == sorted(scores, reverse=True)
    assert scores[0] >= greedy
    shared, alone = re.search(
        r"(\d+) blocks of \d+ tokens at the peak; .* would take (\d+):", output
    ).groups()
    assert int(shared) < 0.7 * int(alone)


@pytest.mark.further
@pytest.mark.slow
@pytest.mark.one_end
def test_speculation_saves_steps_and_preserves_text(run_here, monkeypatch):
    """A draft model and one step size are used; loops are tested with other drafts.

    The text is that of the model card, computed without a cache.
    """
    generate = functools.partial(jkv.generate, row_counts=(16,))
    monkeypatch.setattr(jkv, "generate", generate)
    prompt = 'The "with" statement'
    options = ("--max-new-tokens", "120", "--ways", "drafted")
    output = run_here("speculate.py", prompt, *options).out
    text, counts = output.rsplit("]\n\n", 1)
    card = (EXAMPLES / "models" / "pydoc" / "README.md").read_text()
    sample = card.split(f"`{prompt}`, greedy:\n\n~~~text\n")[1].split("\n~~~")[0]
    assert text.removeprefix(prompt + "[") == sample.removeprefix(prompt)
    found = re.search(r"(\d+) steps .* (\d+) of \d+ draft tokens", counts)
    steps, right = map(int, found.groups())
    assert steps == 120 - right < 112


@pytest.mark.one_end
def test_bad_input_is_reported_in_one_sentence(complaint, tmp_path):
    def error_of(*arguments, status=2):
        found, output = complaint("generate.py", *arguments)
        assert found == status
        return output

    missing = str(tmp_path / "none")
    assert "config.json is missing" in error_of("x", "--model", missing, status=1)
    assert "prompt 1 is empty" in error_of("  ")
    assert "prompt 2 is empty" in error_of("one", "")
    assert "--max-new-tokens must be at least 1" in error_of(
        "x", "--max-new-tokens", "0"
    )
    assert "No such file" in error_of("--file", missing, status=1)
    long = "a b c d e f g h " * 400
    assert re.search(r"prompt 1 has \d{4} tokens, the context is 2048", error_of(long))


# An invalid value for each script, and words of its error message.
BAD_VALUES = {
    "serve_ray.py": [
        ("--replicas 0", "--replicas must be 3 or 1-8, got '0'"),
        ("--replicas 3-1", "--replicas must be 3 or 1-8, got '3-1'"),
        ("--gpus -1", "--gpus must be at least 0"),
    ],
    "beam_search.py": [
        ("--beams 0", "--beams must be at least 1, got 0"),
        ("--max-new-tokens x", "invalid int value: 'x'"),
        (["   "], "prompt must not be empty"),
    ],
    "best_of_n.py": [
        ("--samples -1", "--samples must be at least 1"),
        ("--temperature nan", "--temperature must be at least 0, got nan"),
        ("--answer (", "--answer must be a regular expression"),
    ],
    "block_map.py": [
        ("--steps -1", "--steps must be at least 1, got -1"),
        ("--delay inf", "--delay must be at least 0, got inf"),
        ("--save /nope/x.png", "--save must be in an existing folder"),
        ("--save x.txt", "--save must end in .png or .gif"),
    ],
    "chat.py": [
        ("--branches 0", "--branches must be at least 1"),
        ("--context 0", "--context must be at least 1"),
        ("--temperature -1", "--temperature must be at least 0"),
    ],
    "data_parallel.py": [
        ("--replicas 0", "--replicas must be at least 1"),
        ("--tensor-parallel -2", "--tensor-parallel must be at least 1"),
    ],
    "generate.py": [
        ("--tensor-parallel 0", "--tensor-parallel must be at least 1"),
        ("--kv-dtype int3", "dtype must be one of"),
        ("--value-dtype int3", "dtype must be one of"),
        ("--top-p 2", "Sampling.top_p must be from 0 to 1"),
        ("--stop= x", "--stop must not be empty"),
    ],
    "long_context.py": [
        ("--devices 0", "--devices must be at least 1"),
        ("--module nope", "--module must be a module that Python finds, got 'nope'"),
    ],
    "parallel_sampling.py": [("x --samples 0", "--samples must be at least 1")],
    "serve_batch.py": [
        ("a b --max-running 0", "--max-running must be at least 1"),
        ("a b --context x", "invalid int value: 'x'"),
    ],
    "speculate.py": [
        ("--draft-tokens 0", "--draft-tokens must be at least 1"),
        ("--ways dice", "invalid choice: 'dice'"),
    ],
    "tree_search.py": [
        ("--lines 0", "--lines must be at least 1, got 0"),
        ("--width x", "invalid int value: 'x'"),
        ("--choices 1", "--choices must be at least 2, got 1"),
        ("--simulations -1", "--simulations must be at least 1"),
        ([" "], "prompt must not be empty"),
    ],
}


@pytest.mark.one_end
@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("script", BAD_VALUES)
def test_bad_values_are_reported_before_anything_is_loaded(complaint, script):
    for arguments, message in BAD_VALUES[script]:
        given = arguments.split(" ") if isinstance(arguments, str) else arguments
        status, output = complaint(script, *given)
        assert status == 2 and message in output, output


@pytest.mark.one_end
def test_invalid_files_are_reported_in_one_line(complaint, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    nowhere, somewhere = str(tmp_path / "none"), str(file)
    for script, *given in (
        ("beam_search.py", "--model", nowhere),
        ("best_of_n.py", "--model", somewhere),
        ("parallel_sampling.py", "--model", nowhere),
        ("speculate.py", "--draft", nowhere),
        ("tree_search.py", "--model", nowhere),
        ("serve_batch.py", nowhere, somewhere),
        ("measure_pydoc.py", "--model", nowhere),
        ("train_pydoc.py", "--output", somewhere),
        ("train_draft.py", "--output", somewhere),
    ):
        status, output = complaint(script, *given)
        assert status == 1 and ("none" in output or "file" in output), output


@pytest.mark.one_end
@pytest.mark.usefixtures("nothing_is_loaded")
def test_every_script_has_help(monkeypatch, capsys):
    """`--help` does nothing else, and imports no trainer packages."""
    for path in sorted(EXAMPLES.glob("*.py")):
        if path.name in ("train_with_tunix.py", "multiprocess.py"):
            continue  # tested in `test_launching.py`
        monkeypatch.setattr(sys, "argv", [path.name, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        output = capsys.readouterr().out
        first = path.read_text(encoding="utf-8").split('"""')[1].partition("\n")[0]
        assert ended.value.code == 0 and output.startswith(f"usage: {path.name}")
        assert first in " ".join(output.split()), output


@pytest.mark.one_end
def test_a_missing_package_is_named(complaint, monkeypatch):
    monkeypatch.setitem(sys.modules, "tunix", None)
    status, output = complaint("train_with_tunix.py", "--help")
    assert status == 1 and "tunix" in output and "pip install '.[tunix]'" in output
    monkeypatch.setitem(sys.modules, "ray", None)
    status, output = complaint("serve_ray.py")
    assert status == 1 and "pip install '.[ray]'" in output
