"""Logits rules of requests: biases, minimum length, bans, allowed tokens."""

import json
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from served.endpoints import continuing
from served.mistakes import Refused
from served.processors.penalties import CountPenalties
from served.processors.rule_table import Rules, RuleTable
from served.processors.variants import Processors

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]

PROMPT, MOST = "The with", 12


@pytest.fixture
def ask(client):
    """Return the text of a completion, and its finish reason."""

    def complete(**fields):
        found = client.completions.create(
            model="pydoc",
            prompt=PROMPT,
            max_tokens=MOST,
            temperature=fields.pop("temperature", 0),
            extra_body=fields,
        ).choices[0]
        return found.text, found.finish_reason

    return complete


def tokens_of(served, *texts):
    return [served.tokenizer.encode(t, add_special_tokens=False).ids for t in texts]


def test_biases_are_added(ask, served, continued):
    (first,) = tokens_of(served, "!")
    assert ask(logit_bias={str(first[0]): 100}) == ("!" * MOST, "length")
    plain = continued(PROMPT, max_new_tokens=MOST)
    assert ask(logit_bias={str(plain.tokens[0]): -100})[0] != plain.text
    # A small bias and empty values change nothing.
    assert ask(logit_bias={str(first[0]): -0.5})[0] == plain.text
    for nothing in ({"logit_bias": {}}, {"min_tokens": 0}, {"bad_words": []}):
        assert ask(**nothing)[0] == plain.text


def test_only_allowed_tokens_are_generated(ask, served):
    allowed = [*tokens_of(served, "a", "b", "!")]
    ids = [tokens[0] for tokens in allowed]
    for seed in range(3):
        text, _ = ask(allowed_token_ids=ids, temperature=1.5, seed=seed)
        assert set(text) <= {*"ab!"} and len(text) == MOST


def test_bad_words_are_not_generated(ask, continued):
    plain = continued(PROMPT, max_new_tokens=MOST).text
    words = [word for word in plain.split() if len(word) > 2][:2]
    found, _ = ask(bad_words=words)
    assert not any(word in found for word in words) and found != plain


def test_a_completion_has_its_minimum_length(ask, served):
    """The end token would be chosen, but for the minimum length."""
    end = {str(served.stop_tokens[0]): 100}
    assert ask(logit_bias=end) == ("", "stop")
    text, reason = ask(logit_bias=end, min_tokens=5)
    assert reason == "stop" and len(tokens_of(served, text)[0]) >= 3
    # Stop tokens of the request do not end it earlier, either.
    (stop,) = tokens_of(served, "!")
    fields = dict(logit_bias={str(stop[0]): 100}, stop_token_ids=stop)
    assert ask(**fields)[1] == "stop"
    assert ask(**fields, min_tokens=MOST)[1] == "length"


def test_rules_combine_with_grammars(ask, served):
    (letter,) = tokens_of(served, "b")
    bias = {str(letter[0]): 100}
    language = {"guided_regex": "[a-c]{3}x"}
    assert ask(logit_bias=bias, **language) == ("bbbx", "stop")
    assert ask(min_tokens=MOST, guided_regex="[a-c]+")[1] == "length"
    plain = ask(**language)
    assert plain[1] == "stop" and plain[0] != "bbbx"
    with pytest.raises(openai.BadRequestError, match="no token is allowed") as caught:
        ask(allowed_token_ids=letter, guided_regex="a+")
    assert caught.value.code == "nothing_allowed"


def test_penalties_lower_generated_tokens(ask, continued):
    """OpenAI's definition applies: once per distinct token, or per occurrence."""
    plain = continued(PROMPT, max_new_tokens=MOST)
    assert len(set(plain.tokens)) < len(plain.tokens), "this text repeats itself"
    for fields in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        assert ask(**fields)[0] != plain.text
    for fields in ({"presence_penalty": 0}, {"frequency_penalty": 0.0}):
        assert ask(**fields)[0] == plain.text
    # Negative penalties make tokens repeat.
    found, _ = ask(frequency_penalty=-2, presence_penalty=-2)
    assert found != plain.text


def test_penalties_follow_the_openai_formula():
    penalties = CountPenalties(np.float32([0.5, 0.0]), np.float32([0.25, 1.0]), 4)
    state = penalties.begin(np.int32([0, 1]), np.zeros((2, 1), np.int32))
    for tokens in ([1, 1], [1, 2], [3, -1]):
        state = penalties.advance(state, np.int32(tokens))
    found = penalties.process(state, np.zeros((2, 4), np.float32))
    assert found.tolist() == [[0.0, -1.0, 0.0, -0.75], [0.0, -1.0, -1.0, 0.0]]


def test_rule_rows_are_reused_and_exhaustion_is_refused(ask, served, monkeypatch):
    """The test server has three rows."""
    (first,) = tokens_of(served, "!")
    for _ in range(5):
        assert ask(logit_bias={str(first[0]): 100})[0] == "!" * MOST
    rules = Rules({}, 1, [], [], None)
    held = [served.hold(None, rules) for _ in range(3)]
    assert len({each.variant for each in held}) == 3
    with monkeypatch.context() as patch:
        patch.setattr(continuing, "ROOM_SECONDS", 0.2)
        with pytest.raises(openai.RateLimitError, match="all room for rules"):
            ask(min_tokens=1)
    # A grammar alone needs none.
    assert ask(guided_choice=["yes"]) == ("yes", "stop")
    held.pop().release()
    assert ask(min_tokens=1)[1] in ("stop", "length")
    for each in held * 2:  # releasing twice does nothing
        each.release()


def test_failed_streams_release_their_rows(served, client, monkeypatch):
    """More streams than rows; each ends with an error event."""

    def fail(_):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(served.scorer, "score", fail)
    request = dict(model="pydoc", prompt=PROMPT, max_tokens=4, logprobs=2, stream=True)
    for _ in range(4):
        with pytest.raises(openai.APIError, match="the server failed: RuntimeError"):
            list(client.completions.create(extra_body={"min_tokens": 1}, **request))
    response = dict(model="pydoc", input=PROMPT, max_output_tokens=4, stream=True)
    response |= dict(top_logprobs=2, include=["message.output_text.logprobs"])
    (*_, last) = client.responses.create(extra_body={"min_tokens": 1}, **response)
    assert last.type == "response.failed"
    held = [served.hold(None, Rules({}, 1, [], [], None)) for _ in range(3)]
    for each in held:
        each.release()


def test_shutdown_releases_requests_waiting_for_a_row():
    """Otherwise the process would wait for them at exit."""
    processor = Processors(None, RuleTable(1, 4, 16))
    engine = types.SimpleNamespace(replace_logits_processor=lambda _: None)
    rules = Rules({}, 1, [], [], None)

    def hold(seconds):
        return processor.hold(engine, None, rules, time.monotonic() + seconds)

    held = hold(0)
    with pytest.raises(Refused, match="all room for rules") as caught:
        hold(0.05)
    assert caught.value.status == 429
    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(hold, 60)
        held.release()
        assert second.result().variant == held.variant
        third = threads.submit(hold, 60)
        time.sleep(0.05)
        processor.close()
        with pytest.raises(Refused, match="shutting down") as caught:
            third.result()
        assert caught.value.status == 503


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"logit_bias": []}, "an object of at most 256"),
        ({"logit_bias": {str(i): 1 for i in range(257)}}, "an object of at most 256"),
        ({"logit_bias": {"a": 1}}, "'a' is not a token id"),
        ({"logit_bias": {"-1": 1}}, "'-1' is not a token id"),
        ({"logit_bias": {"3072": 1}}, "'3072' is not a token id"),
        ({"logit_bias": {"1": 101}}, "from -100 to 100"),
        ({"logit_bias": {"1": "x"}}, "a number of type float"),
        ({"min_tokens": -1}, "from 0 to 16"),
        ({"min_tokens": 17}, "from 0 to 16"),
        ({"presence_penalty": 2.5}, "from -2 to 2"),
        ({"frequency_penalty": "a"}, "a number of type float"),
        ({"min_tokens": True}, "a number of type int"),
        ({"bad_words": "word"}, "a list of at most 32"),
        ({"bad_words": [" "]}, "more than spaces"),
        ({"bad_words": ["a"] * 33}, "a list of at most 32"),
        ({"bad_words": ["one two three four five six"]}, "limit of 8"),
        ({"bad_words": ["a" * 10_000]}, "above the limit of"),
        ({"allowed_token_ids": []}, "1 to 1024"),
        ({"allowed_token_ids": [3072]}, "3072 is not a token id"),
        ({"allowed_token_ids": [-1]}, "-1 is not a token id"),
    ],
)
def test_invalid_rules_are_refused_by_name(post, fields, words):
    body = {"prompt": PROMPT, "max_tokens": 16, **fields}
    status, reply = post(json.dumps(body).encode())
    error = reply["error"]
    assert status == 400 and error["param"] in fields and words in error["message"]
