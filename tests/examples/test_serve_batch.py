"""`serve_batch.py`: results are neither lost nor repeated after any interruption."""

import argparse
import contextlib
import json
import pathlib
import resource
import signal
import subprocess
import sys
import time
import types

import pretrained
import pytest
from batching import answering, lines
from batching import command as batch
from served import display, loading
from support.http_server import load_served
from support.paths import EXAMPLES

import jkv
from jkv.serving import Completion, EngineError, Event

pytestmark = pytest.mark.one_end

# As in test_serve_http.py, to share compiled programs.
SIZES = "--context 64 --max-running 4 --max-new-tokens 24 --blocks 12 --rows 8"
SIZES = [*SIZES.split(), "--scan-layers"]
NUM_LINES = 24


def write_prompts(path):
    asked = [{"prompt": f"The {i} import", "id": f"name {i}"} for i in range(NUM_LINES)]
    asked[3] = {"prompt": 3, "id": "name 3"}
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


def serve_with_errors(prompts, results, chosen=None):
    """Serve lines, some with errors; the exit status reports them."""
    with pytest.raises(SystemExit) as ended:
        batch.serve(chosen or options(prompts, results))
    assert ended.value.code == 1


@pytest.mark.slow
def test_a_killed_process_is_gone_on_with(tmp_path, capsys):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    whole, parted = tmp_path / "whole.jsonl", tmp_path / "parted.jsonl"
    serve_with_errors(prompts, whole)
    said = f"{NUM_LINES - 1} of {NUM_LINES + 1} lines are answered in {whole}, 2 have"
    assert said in capsys.readouterr().err
    expected = read_results(whole)
    assert sorted(expected) == list(range(NUM_LINES + 1))
    assert "prompt must be" in expected[3]["error"] and "error" in expected[NUM_LINES]
    assert len({c["text"] for c in expected[5]["choices"]}) > 1
    stopped = expected[7]["choices"][0]
    assert stopped["finish_reason"] == "length" or "e" not in stopped["text"]
    assert expected[9]["id"] == "name 9" and expected[3]["id"] == "name 3"

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
    serve_with_errors(prompts, parted)
    assert read_results(parted) == expected
    # Nothing is left to do: no model is read.
    chosen = options(prompts, parted)
    chosen.model = "nowhere"
    before = parted.read_bytes()
    serve_with_errors(prompts, parted, chosen)
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


OWN = ["mine", '{"prompt": "mine"}', "{}", '{"line": 7, "asked": "x"', '{"line": 0, "a']


@pytest.mark.parametrize("content", [*OWN, '{"line": 0}\n{"line"'])
def test_a_file_of_something_else_is_never_cut(tmp_path, content):
    """Its last line may have no newline, as half of a result has none."""
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    is_ours = content == OWN[-1]  # a killed process may leave it
    if not is_ours:
        with pytest.raises(ValueError, match="give another file"):
            lines.ResultLines(path, ["a", "b"])
        assert path.read_text() == content
        return
    with lines.ResultLines(path, ["a", "b"]) as results:
        assert not results.done
    assert path.read_text() == ""


def test_prompts_named_as_results_stay(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}')
    with pytest.raises(SystemExit) as ended:
        batch.serve(options(path, path))
    assert ended.value.code == 2 and "give another file" in capsys.readouterr().err
    assert path.read_text() == '{"prompt": "a"}'


class Echo:
    """Stands for an engine: every prompt is continued by itself."""

    cache = types.SimpleNamespace(metadata=types.SimpleNamespace(num_classes=1))

    def __init__(self):
        self.asked = []

    def close(self):
        pass

    def submit(self, ask):
        self.asked.append((ask.tokens, ask.n))
        return len(self.asked) - 1

    def step(self):
        waiting = [number for number, (prompt, _) in enumerate(self.asked) if prompt]
        return [Event(n, 0, [], [], "", jkv.FinishReason.STOP) for n in waiting]

    def results(self, number, **_):
        prompt, n = self.asked[number]
        self.asked[number] = (None, n)
        stop = jkv.FinishReason.STOP
        return [Completion(number, i, prompt, [0.0], stop, "x") for i in range(n)]


@pytest.fixture
def echo(monkeypatch):
    """Give `serve` an engine that computes nothing."""
    tokenizer = pretrained.load_tokenizer(loading.BUNDLED)
    folder = pathlib.Path(loading.BUNDLED)
    served = loading.Served(
        Echo(), tokenizer, folder, 64, 24, vocabulary_size=tokenizer.get_vocab_size()
    )
    monkeypatch.setattr(batch, "load", lambda _, **__: served)
    monkeypatch.setattr(batch, "warm_up", lambda _: 0)
    still = types.SimpleNamespace(update=lambda _: None)
    monkeypatch.setattr(batch, "Display", lambda *_: contextlib.nullcontext(still))
    return served.engine


# Lines that cannot be answered, and the id that their results have.
HOSTILE = [
    ("[" * 100_000, None),
    ('{"id": 1, "prompt": ' + "[" * 100_000, None),
    ('{"id": "a", "prompt": "\\ud800"}', "a"),
    ('{"id": "b", "prompt": "x", "stop": ["\\udfff"]}', "b"),
    ('{"id": {"c": [1]}, "messages": [{"role": "user", "content": "\\ud83d"}]}', ...),
    ('{"id": "\\ud800", "prompt": {}}', "\ud800"),
    ('{"id": null, "prompt": 7}', None),
    ('{"id": "d", "prompt": ["two", "prompts"]}', "d"),
    ('{"prompt": "a", "temprature": 1}', None),
    ('{"prompt": "a", "model": "gpt"}', None),
    ('{"prompt": "a", "stream": true}', None),
    ('{"prompt": "a", "logprobs": 1}', None),
    ('{"prompt": "a", "response_format": {"type": "json_object"}}', None),
    ('{"prompt": "a", "presence_penalty": 1}', None),
    # The bundled model has no template.
    ('{"id": "e", "messages": [{"role": "user", "content": "a"}]}', "e"),
    ("7", None),
    ('"\\udc00"', None),
]
ANSWERED = '{"id": "\\udc00", "prompt": "of an odd id"}'


def test_no_line_stops_the_others(tmp_path, capsys, echo):
    """Each hostile line has an error with its id; the next start reads them."""
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    asked = [line for line, _ in HOSTILE]
    prompts.write_text("\n".join([*asked, ANSWERED]))
    for _ in range(2):
        serve_with_errors(prompts, results)
        said = capsys.readouterr().err
        assert f"1 of {len(HOSTILE) + 1} lines are answered" in said
        assert f"{len(HOSTILE)} have an error there" in said and said.count("\n") == 1
        found = read_results(results)
        for number, (_, name) in enumerate(HOSTILE):
            assert found[number]["error"], number
            expected = {"c": [1]} if name is ... else name
            assert found[number].get("id") == expected
        assert found[len(HOSTILE)]["id"] == "\udc00"
        assert found[len(HOSTILE)]["choices"][0]["text"] == "x"
    assert len(echo.asked) == 1  # nothing was computed again


def of_batch(name, url="/v1/completions", **body):
    """A line in the form of OpenAI's batches."""
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


WRONG_FORMS = [
    ({"custom_id": 3, "method": "POST", "url": "/v1/completions", "body": {}}, 400),
    ({"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}, 400),
    (of_batch("b", "/v1/embeddings", input="a"), 400),
    (of_batch("c", prompt="a", frobnicate=1), 400),
    (of_batch("d", prompt="a", model="gpt"), 404),
    (of_batch("e", "/v1/messages", messages=[]), 400),
    ({**of_batch("f", prompt="a"), "x": 1}, 400),
]


@pytest.mark.usefixtures("echo")
def test_lines_of_batches_have_answers_of_that_form(tmp_path, capsys):
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    good = [
        of_batch("1", model="pydoc", prompt="a"),
        of_batch("2", "/v1/responses", input="a"),
    ]
    asked = [*good, *(line for line, _ in WRONG_FORMS)]
    prompts.write_text("\n".join(map(json.dumps, asked)))
    serve_with_errors(prompts, results)
    found = read_results(results)
    for line in found.values():
        line.pop("asked")
        assert {*line} == {"id", "custom_id", "response", "error"}
    first = found[0]
    assert first["custom_id"] == "1" and first["error"] is None
    assert first["response"]["status_code"] == 200 and first["response"]["request_id"]
    body = first["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "x" and body["usage"]["completion_tokens"] == 1
    # The bundled model has no template: a chat is refused in its line.
    assert found[1]["response"]["status_code"] == 400
    for number, (line, status) in enumerate(WRONG_FORMS, start=len(good)):
        told = found[number]
        assert told["custom_id"] == line["custom_id"]
        assert told["response"]["status_code"] == status, told
        assert told["error"]["message"] == told["response"]["body"]["error"]["message"]
    assert f"1 of {len(asked)} lines" in capsys.readouterr().err
    # Failed lines are not tried again, and nothing is written twice.
    before = results.read_bytes()
    serve_with_errors(prompts, results)
    assert results.read_bytes() == before


@pytest.mark.further
def test_batch_lines_are_constrained_like_requests(tmp_path):
    """More languages than there is room for, rules, and a template that fails."""
    served = load_served(tmp_path / "pydoc")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}}
    schema["required"] = ["a"]
    chat = [{"role": "user", "content": "The with"}]
    asked = [
        *({"prompt": "The", "guided_choice": [text]} for text in "abcdef"),
        {"prompt": "The", "logit_bias": {"5": 100}, "temperature": 0},
        {"messages": chat, "response_format": {"type": "json_schema"}},
        {"messages": [{"role": "alien", "content": "a"}]},
        {"prompt": "The", "guided_regex": "("},
        {"prompt": "The", "temperature": 0},
        {"prompt": "The", "n": 2, "best_of": 3},
        {"prompt": "The", "temperature": 0, "logprobs": 2},
        {"prompt": "The with", "max_tokens": 0, "echo": True, "logprobs": 0},
        of_batch(
            "chat",
            "/v1/chat/completions",
            messages=chat,
            max_tokens=4,
            logprobs=True,
            top_logprobs=1,
        ),
        of_batch("message", "/v1/messages", messages=chat, max_tokens=4),
        of_batch("response", "/v1/responses", input="The", max_output_tokens=4),
    ]
    asked[7]["response_format"]["json_schema"] = {"schema": schema}
    lines_asked = [
        json.dumps(each if "custom_id" in each else {"max_tokens": 24, **each})
        for each in asked
    ]
    still = types.SimpleNamespace(update=lambda _: None)
    path = tmp_path / "results.jsonl"
    with lines.ResultLines(path, lines_asked) as results:
        answering.answer_all(served, lines_asked, results, still, 4)
    served.end()
    found = read_results(path)
    texts = {
        i: each["choices"][0]["text"] for i, each in found.items() if "choices" in each
    }
    assert [texts[i] for i in range(6)] == list("abcdef")
    assert texts[6] == served.tokenizer.decode([5]) * 24 != texts[10]
    assert json.loads(texts[7])["a"] in ("x", "y")
    assert "unknown role" in found[8]["error"] and "guided_regex" in found[9]["error"]
    assert [each["index"] for each in found[11]["choices"]] == [0, 1]
    told = found[12]["choices"][0]["logprobs"]
    assert "".join(told["tokens"]) == texts[12] == texts[10]
    assert len(told["top_logprobs"][0]) >= 2
    told = found[13]["choices"][0]["logprobs"]
    assert texts[13] == "The with" == "".join(told["tokens"])
    assert told["token_logprobs"][0] is None and told["token_logprobs"][1] < 0
    bodies = [found[i]["response"]["body"] for i in (14, 15, 16)]
    told = bodies[0]["choices"][0]["logprobs"]["content"]
    assert len(told) == 4 and len(told[0]["top_logprobs"]) == 1
    assert bodies[1]["content"][0]["text"] and bodies[1]["type"] == "message"
    assert bodies[2]["object"] == "response" and bodies[2]["output"]
    assert int(jkv.num_free_blocks(served.engine.cache)) == 12


def test_lines_that_are_all_answered_end_well(tmp_path, capsys, echo):
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two", "n": 2}')
    batch.serve(options(prompts, results))
    assert f"2 of 2 lines are answered in {results}\n" == capsys.readouterr().err
    assert [n for _, n in echo.asked] == [1, 2]


def test_an_engine_that_fails_can_be_gone_on_with(tmp_path, capsys, echo, monkeypatch):
    def fail():
        raise EngineError("a step failed")

    monkeypatch.setattr(echo, "step", fail)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}')
    serve_with_errors(prompts, tmp_path / "results.jsonl")
    said = capsys.readouterr().err
    assert said == "error: a step failed; run it again to go on from what is written\n"


def test_unreadable_batch_files_print_one_line(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    results = tmp_path / "results.jsonl"

    def says(status):
        with pytest.raises(SystemExit) as ended:
            batch.serve(options(path, results))
        said = capsys.readouterr().err
        assert ended.value.code == status and said.startswith("error: ")
        assert said.count("\n") == 1
        return said

    assert "No such file" in says(1)
    path.write_text(" \n")
    assert " has no line" in says(2)
    path.write_bytes(b"\xff")
    assert " is not UTF-8" in says(2)


def test_the_picture_shows_progress_speed_and_pool(monkeypatch):
    import io

    from jkv.serving.scheduler.measures import Measures

    class Engine:
        """The fields that the picture reads."""

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
