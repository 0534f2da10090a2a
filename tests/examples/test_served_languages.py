"""Structured output over HTTP: JSON, schemas, patterns and choices."""

import json
import os
import re
import signal
import time
import typing
from concurrent.futures import ThreadPoolExecutor

import openai
import pydantic
import pytest
from served.asking.languages import Language
from served.endpoints import continuing
from served.processors import compiling

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]

CHAT = [{"role": "user", "content": "The with"}]


class Answer(pydantic.BaseModel):
    a: typing.Literal["x", "y"]


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def ask(client, *, seed=1, **options):
    """Return the texts of a chat, and their finish reasons."""
    found = client.chat.completions.create(
        model="pydoc", messages=CHAT, max_tokens=24, seed=seed, **options
    )
    return [(each.message.content, each.finish_reason) for each in found.choices]


def test_the_openai_client_parses_answers_into_its_types(client):
    found = client.chat.completions.parse(
        model="pydoc",
        messages=CHAT,
        max_tokens=24,
        temperature=1.5,
        n=4,
        response_format=Answer,
    )
    for choice in found.choices:
        assert isinstance(choice.message.parsed, Answer)
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    "fields, pattern",
    [
        ({"structured_outputs": {"regex": "[a-c]{3,5}x"}}, "[a-c]{3,5}x"),
        ({"guided_regex": "(with|try)? ?!"}, "(with|try)? ?!"),
        ({"structured_outputs": {"choice": ["yes", "no, never"]}}, "yes|no, never"),
        ({"guided_choice": ["é", "ü"]}, "[éü]"),
    ],
)
def test_patterns_and_choices(client, fields, pattern):
    for text, reason in ask(client, n=3, temperature=1.5, extra_body=fields):
        assert re.fullmatch(pattern, text) and reason == "stop"


def test_json_objects_and_streams(client):
    (text, reason), *_ = ask(client, response_format={"type": "json_object"})
    # A truncated text is a prefix of valid JSON.
    assert text.startswith("{") and reason in ("stop", "length")
    if reason == "stop":
        assert isinstance(json.loads(text), dict)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": False}}
    schema["json_schema"]["schema"] = {"type": "integer", "minimum": 7, "maximum": 12}
    pieces = client.completions.create(
        model="pydoc",
        prompt="The with",
        max_tokens=8,
        stream=True,
        extra_body={"response_format": schema},
    )
    assert 7 <= int("".join(piece.choices[0].text for piece in pieces)) <= 12


def hold(served, *texts):
    """Hold a grammar of each text, as running requests do."""
    return [
        served.hold(Language("choice", json.dumps([text]), "guided_choice"))
        for text in texts
    ]


def test_grammars_are_loaded_and_evicted(client, served, monkeypatch):
    """The test server has room for three."""
    for turn in range(2):
        for number in range(5):
            fields = {"guided_choice": [f"{number}", f"{number}{number}"]}
            ((text, _),) = ask(client, seed=turn, extra_body=fields)
            assert set(text) == {str(number)}
    held = hold(served, *"abc")
    with monkeypatch.context() as patch:
        patch.setattr(continuing, "ROOM_SECONDS", 0.2)
        with pytest.raises(openai.RateLimitError, match="all room for grammars"):
            ask(client, extra_body={"guided_choice": ["d"]})
    # Loaded grammars are still served.
    assert ask(client, extra_body={"guided_choice": ["a"]}) == [("a", "stop")]
    for each in held:
        each.release()
    assert ask(client, extra_body={"guided_choice": ["d"]}) == [("d", "stop")]


def test_a_request_waits_for_room(client, served):
    """If all places are in use, requests wait and are served one after another."""
    held = hold(served, *"abc")
    with ThreadPoolExecutor(4) as threads:
        waiting = [
            threads.submit(ask, client, extra_body={"guided_choice": [text]})
            for text in "defg"
        ]
        time.sleep(0.3)
        assert not any(each.done() for each in waiting)
        for each in held:
            each.release()
        assert [each.result() for each in waiting] == [[(t, "stop")] for t in "defg"]


@pytest.fixture
def compiling_stands_still(client, served):
    """Stop the compiler processes, as if a grammar took forever."""
    assert ask(client, extra_body={"guided_choice": ["h"]}) == [("h", "stop")]
    workers = list(served.processors._compilers._workers)
    for worker in workers:
        os.kill(worker._process.pid, signal.SIGSTOP)
    yield
    for worker in workers:
        if worker._process.is_alive():
            os.kill(worker._process.pid, signal.SIGCONT)


@pytest.mark.usefixtures("compiling_stands_still")
def test_grammar_compilation_does_not_block_others(client, monkeypatch):
    """Everything else is served until compilation times out."""
    monkeypatch.setattr(compiling, "MOST_SECONDS", 2.0)
    with ThreadPoolExecutor(2) as threads:
        # Both request the same grammar.
        slow = {"guided_regex": "slow+"}
        waiting = [threads.submit(ask, client, extra_body=slow) for _ in range(2)]
        there = {"guided_choice": ["h"]}
        assert ask(client, extra_body=there) == [("h", "stop")]
        assert ask(client)[0][1] in ("stop", "length")
        assert not any(each.done() for each in waiting)
        for each in waiting:
            with pytest.raises(openai.BadRequestError, match="2 seconds to compile"):
                each.result()


def test_a_new_process_compiles_after_one_was_killed(client, served):
    assert ask(client, extra_body={"guided_choice": ["h"]}) == [("h", "stop")]
    (worker,) = served.processors._compilers._idle[-1:]
    worker._process.kill()
    with pytest.raises(openai.BadRequestError, match="its process has died"):
        ask(client, extra_body={"guided_choice": ["new", "h"]})
    for number in range(2):
        text = f"new {number}"
        assert ask(client, extra_body={"guided_choice": [text]}) == [(text, "stop")]


@pytest.mark.usefixtures("compiling_stands_still")
def test_compilation_counts_toward_the_timeout(client):
    fields = {"guided_regex": "slower+", "timeout": 0.3}
    before = time.monotonic()
    with pytest.raises(openai.APIStatusError, match="timeout") as caught:
        ask(client, extra_body=fields)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline")
    assert time.monotonic() - before < compiling.MOST_SECONDS


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"response_format": "json"}, "must be an object with a type"),
        ({"response_format": {"type": "xml"}}, "got 'xml'"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format.schema is not supported",
        ),
        (
            {"response_format": {"type": "text", "foo": 1}},
            "response_format.foo is not supported",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "foo": 1},
                }
            },
            "response_format.json_schema.foo is not supported",
        ),
        ({"response_format": {"type": "json_schema"}}, "an object with a schema"),
        ({"guided_json": "{"}, "is not JSON"),
        ({"guided_json": [1]}, "must be a JSON schema"),
        ({"guided_json": {"type": "thing"}}, "thing"),
        ({"guided_regex": "(?=a)b"}, "guided_regex: "),
        ({"guided_regex": "("}, "guided_regex: "),
        ({"guided_choice": []}, "at least one string"),
        ({"structured_outputs": {"grammar": "x"}}, "grammar is not supported"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "exclude each other"),
        ({"guided_choice": ["a" * 70_000]}, "limit of 65536"),
        ({"guided_regex": "[a-z]{1,50000}"}, "guided_regex: "),
    ],
)
def test_invalid_grammars_are_refused_by_name(client, fields, words):
    with pytest.raises(openai.BadRequestError, match=re.escape(words)):
        ask(client, extra_body=fields)
