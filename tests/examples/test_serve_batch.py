"""`serve_batch.py`: no result is lost or repeated after an interruption."""

import argparse
import contextlib
import itertools
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
from support.paths import EXAMPLES
from support.serving.http_server import load_served

import jkv
from jkv.serving import Completion, EngineError, Event

pytestmark = pytest.mark.one_end

# As in test_serve_http.py, to share compiled programs.
SIZES = "--context 64 --max-running 4 --max-new-tokens 24 --blocks 12 --rows 8"
SIZES = [*SIZES.split(), "--scan-layers"]
NUM_LINES = 24


def write_prompts(path):
    bodies = [
        {"prompt": f"The {i} import", "id": f"name {i}"} for i in range(NUM_LINES)
    ]
    bodies[3] = {"prompt": 3, "id": "name 3"}
    bodies[5] = {"prompt": "Every class", "n": 3, "temperature": 0.7}
    bodies[7] = {"prompt": "For a list", "stop": ["e", "zz"]}
    path.write_text("\n".join(map(json.dumps, bodies)) + "\n\nnonsense\n")
    return path


def read_results(path):
    """Return results by line; assert that each line has one."""
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
    """Serve lines, some with errors; assert that the exit status is 1."""
    with pytest.raises(SystemExit) as ended:
        batch.serve(chosen or options(prompts, results))
    assert ended.value.code == 1


@pytest.mark.further
@pytest.mark.slow
def test_a_killed_run_is_resumed(tmp_path, capsys):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    whole, parted = tmp_path / "whole.jsonl", tmp_path / "parted.jsonl"
    serve_with_errors(prompts, whole)
    output = f"{NUM_LINES - 1} of {NUM_LINES + 1} lines are answered in {whole}, 2 have"
    assert output in capsys.readouterr().err
    expected = read_results(whole)
    assert sorted(expected) == list(range(NUM_LINES + 1))
    assert "prompt must be" in expected[3]["error"] and "error" in expected[NUM_LINES]
    assert len({c["text"] for c in expected[5]["choices"]}) > 1
    stopped = expected[7]["choices"][0]
    assert stopped["finish_reason"] == "length" or "e" not in stopped["text"]
    assert expected[9]["id"] == "name 9" and expected[3]["id"] == "name 3"

    # Killed after its first output, in the middle of a write.
    command = [EXAMPLES / "serve_batch.py", prompts, parted, *SIZES]
    process = subprocess.Popen([sys.executable, *map(str, command)])
    end = time.monotonic() + 240
    while not parted.exists() or parted.stat().st_size < 500:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with parted.open("ab") as file:
        file.write(b'{"line": 11, "digest": "tor')
    num_before = len(parted.read_bytes().splitlines()) - 1
    assert 0 < num_before < NUM_LINES + 1
    serve_with_errors(prompts, parted)
    assert read_results(parted) == expected
    # All results exist, so no model is loaded.
    chosen = options(prompts, parted)
    chosen.model = "nowhere"
    before = parted.read_bytes()
    serve_with_errors(prompts, parted, chosen)
    assert parted.read_bytes() == before


def test_a_full_disk_loses_nothing(tmp_path):
    """A file size limit simulates the full disk, which stores part of a line."""
    path, bodies = tmp_path / "results.jsonl", [f"line {i}" for i in range(50)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with (
            pytest.raises(OSError),
            lines.ResultLines(path, bodies) as results,
        ):
            for i in range(50):
                results.write(i, {"text": "x" * i})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    done = read_results(path)
    assert 3 < len(done) < 50 and sorted(done) == list(range(len(done)))
    assert path.read_bytes().endswith(b"\n")
    with lines.ResultLines(path, bodies) as results:
        assert results.done == set(done)
        for i in set(range(50)) - results.done:
            results.write(i, {"text": "x" * i})
    assert [read_results(path)[i]["text"] for i in range(50)] == [
        "x" * i for i in range(50)
    ]


def test_results_of_other_prompts_are_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    with lines.ResultLines(path, ["a", "b"]) as results:
        results.write(1, {"text": "of b"})
    before = path.read_bytes()
    for bodies in (["a", "c"], ["b"], []):
        with pytest.raises(ValueError, match="results of other prompts"):
            lines.ResultLines(path, bodies)
    assert path.read_bytes() == before
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match="results of other prompts"):
        lines.ResultLines(path, ["a"])


OWN = [
    "mine",
    '{"prompt": "mine"}',
    "{}",
    '{"line": 7, "digest": "x"',
    '{"line": 0, "d',
]


@pytest.mark.parametrize("content", [*OWN, '{"line": 0}\n{"line"'])
def test_an_unrelated_file_is_never_truncated(tmp_path, content):
    """Its last line may lack a newline, like a partial result."""
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    is_ours = content == OWN[-1]  # a killed process may leave it
    if not is_ours:
        with pytest.raises(ValueError, match="pass another file"):
            lines.ResultLines(path, ["a", "b"])
        assert path.read_text() == content
        return
    with lines.ResultLines(path, ["a", "b"]) as results:
        assert not results.done
    assert path.read_text() == ""


def test_a_prompts_file_is_refused_as_results(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}')
    with pytest.raises(SystemExit) as ended:
        batch.serve(options(path, path))
    assert ended.value.code == 2 and "pass another file" in capsys.readouterr().err
    assert path.read_text() == '{"prompt": "a"}'


class Echo:
    """A fake engine that repeats every prompt."""

    cache = types.SimpleNamespace(metadata=types.SimpleNamespace(num_classes=1))

    def __init__(self):
        self.requests, self.seeds = [], []
        self.reasons = (jkv.FinishReason.STOP,)  # of samples, repeated

    def close(self):
        pass

    def submit(self, ask):
        self.requests.append((ask.tokens, ask.n))
        self.seeds.append(ask.sampling.seeds)
        return len(self.requests) - 1

    def step(self):
        waiting = [number for number, (prompt, _) in enumerate(self.requests) if prompt]
        return [Event(n, 0, [], [], "", jkv.FinishReason.STOP) for n in waiting]

    def results(self, number, **_):
        prompt, n = self.requests[number]
        self.requests[number] = (None, n)
        reasons = itertools.islice(itertools.cycle(self.reasons), n)
        return [
            Completion(number, i, prompt, [0.0], reason, "x")
            for i, reason in enumerate(reasons)
        ]


@pytest.fixture
def echo(monkeypatch):
    """A `serve` function whose engine computes nothing."""
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


# Invalid lines, and the ids of their results.
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
    # The bundled model has no chat template.
    ('{"id": "e", "messages": [{"role": "user", "content": "a"}]}', "e"),
    ("7", None),
    ('"\\udc00"', None),
]
ANSWERED = '{"id": "\\udc00", "prompt": "of an odd id"}'


def test_an_invalid_line_does_not_stop_the_others(tmp_path, capsys, echo):
    """Each invalid line has an error with its id; a second run reads them."""
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    bodies = [line for line, _ in HOSTILE]
    prompts.write_text("\n".join([*bodies, ANSWERED]))
    for _ in range(2):
        serve_with_errors(prompts, results)
        output = capsys.readouterr().err
        assert f"1 of {len(HOSTILE) + 1} lines are answered" in output
        assert (
            f"{len(HOSTILE)} have an error there" in output and output.count("\n") == 1
        )
        found = read_results(results)
        for number, (_, name) in enumerate(HOSTILE):
            assert found[number]["error"], number
            expected = {"c": [1]} if name is ... else name
            assert found[number].get("id") == expected
        assert found[len(HOSTILE)]["id"] == "\udc00"
        assert found[len(HOSTILE)]["choices"][0]["text"] == "x"
    assert len(echo.requests) == 1  # nothing was recomputed


@pytest.mark.parametrize(
    "reason, words",
    [
        (jkv.FinishReason.NAN_LOGITS, "NaN logits"),
        (jkv.FinishReason.DEADLINE, "within its timeout"),
        (jkv.FinishReason.NOTHING_ALLOWED, "no token is allowed"),
    ],
)
def test_failed_generation_is_an_error_in_both_formats(tmp_path, echo, reason, words):
    """Also of a completion that is not returned."""
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    bodies = [{"id": 1, "prompt": "a", "best_of": 2}, of_batch("2", prompt="a")]
    prompts.write_text("\n".join(map(json.dumps, bodies)))
    echo.reasons = reason, jkv.FinishReason.STOP
    serve_with_errors(prompts, results)
    found = read_results(results)
    assert words in found[0]["error"] and "choices" not in found[0]
    assert words in found[1]["error"]["message"]


def test_lines_without_a_seed_have_a_reproducible_one(tmp_path, echo):
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    bodies = [{"prompt": "a", **seed} for seed in ({}, {"seed": None}, {"seed": 7})]
    prompts.write_text("\n".join(map(json.dumps, bodies)))
    batch.serve(options(prompts, results))
    assert sorted(echo.seeds) == [0, 1, 7]


def of_batch(name, url="/v1/completions", **body):
    """Return a line in OpenAI's batch format."""
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
def test_batch_lines_have_results_in_the_batch_format(tmp_path, capsys):
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    good = [
        of_batch("1", model="pydoc", prompt="a"),
        of_batch("2", "/v1/responses", input="a"),
    ]
    bodies = [*good, *(line for line, _ in WRONG_FORMS)]
    prompts.write_text("\n".join(map(json.dumps, bodies)))
    serve_with_errors(prompts, results)
    found = read_results(results)
    for line in found.values():
        line.pop("digest")
        assert {*line} == {"id", "custom_id", "response", "error"}
    first = found[0]
    assert first["custom_id"] == "1" and first["error"] is None
    assert first["response"]["status_code"] == 200 and first["response"]["request_id"]
    body = first["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "x" and body["usage"]["completion_tokens"] == 1
    # Without a chat template, the chat line has an error.
    assert found[1]["response"]["status_code"] == 400
    for number, (line, status) in enumerate(WRONG_FORMS, start=len(good)):
        answer = found[number]
        assert answer["custom_id"] == line["custom_id"]
        assert answer["response"]["status_code"] == status, answer
        assert (
            answer["error"]["message"] == answer["response"]["body"]["error"]["message"]
        )
    assert f"1 of {len(bodies)} lines" in capsys.readouterr().err
    # Failed lines are not retried, and nothing is written twice.
    before = results.read_bytes()
    serve_with_errors(prompts, results)
    assert results.read_bytes() == before


@pytest.mark.further
def test_batch_lines_are_constrained_like_requests(tmp_path):
    """More grammars than fit, logits rules, and a failing template."""
    served = load_served(tmp_path / "pydoc")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}}
    schema["required"] = ["a"]
    chat = [{"role": "user", "content": "The with"}]
    requests = [
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
    requests[7]["response_format"]["json_schema"] = {"schema": schema}
    prompt_lines = [
        json.dumps(each if "custom_id" in each else {"max_tokens": 24, **each})
        for each in requests
    ]
    still = types.SimpleNamespace(update=lambda _: None)
    path = tmp_path / "results.jsonl"
    with lines.ResultLines(path, prompt_lines) as results:
        answering.answer_all(served, prompt_lines, results, still, 4)
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
    answer = found[12]["choices"][0]["logprobs"]
    assert "".join(answer["tokens"]) == texts[12] == texts[10]
    assert len(answer["top_logprobs"][0]) >= 2
    answer = found[13]["choices"][0]["logprobs"]
    assert texts[13] == "The with" == "".join(answer["tokens"])
    assert answer["token_logprobs"][0] is None and answer["token_logprobs"][1] < 0
    bodies = [found[i]["response"]["body"] for i in (14, 15, 16)]
    answer = bodies[0]["choices"][0]["logprobs"]["content"]
    assert len(answer) == 4 and len(answer[0]["top_logprobs"]) == 1
    assert bodies[1]["content"][0]["text"] and bodies[1]["type"] == "message"
    assert bodies[2]["object"] == "response" and bodies[2]["output"]
    assert int(jkv.num_free_blocks(served.engine.cache)) == 12


def test_a_finished_batch_exits_normally(tmp_path, capsys, echo):
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two", "n": 2}')
    batch.serve(options(prompts, results))
    assert f"2 of 2 lines are answered in {results}\n" == capsys.readouterr().err
    assert [n for _, n in echo.requests] == [1, 2]


def test_a_failed_engine_can_be_resumed(tmp_path, capsys, echo, monkeypatch):
    def fail():
        raise EngineError("a step failed")

    monkeypatch.setattr(echo, "step", fail)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}')
    serve_with_errors(prompts, tmp_path / "results.jsonl")
    output = capsys.readouterr().err
    assert (
        output == "error: a step failed; run it again to go on from what is written\n"
    )


def test_unreadable_batch_files_print_one_line(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    results = tmp_path / "results.jsonl"

    def error_of(status):
        with pytest.raises(SystemExit) as ended:
            batch.serve(options(path, results))
        output = capsys.readouterr().err
        assert ended.value.code == status and output.startswith("error: ")
        assert output.count("\n") == 1
        return output

    assert "No such file" in error_of(1)
    path.write_text(" \n")
    assert " is empty" in error_of(2)
    path.write_bytes(b"\xff")
    assert " is not UTF-8" in error_of(2)


def test_the_display_shows_progress_speed_and_pool(monkeypatch):
    import io

    from jkv.serving.scheduler.measures import Measures

    class Engine:
        """The fields that the display reads."""

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
        picture.update(5)  # shortly after: not drawn
    text = shown.getvalue()
    assert "3 run, 5 wait" in text and "4/10" in text and "5/10" not in text
    assert text.count(". ") >= 300
