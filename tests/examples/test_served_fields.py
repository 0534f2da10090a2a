"""Each field of the API's bodies has an effect, or is refused by name."""

import json
import math
import typing

import openai
import pytest
from openai.types import completion_create_params as of_texts
from openai.types.chat import completion_create_params as of_chats
from served.asking import fields
from served.asking.body import read_sampling
from served.asking.prompts import read_chat
from served.asking.showing import check_model, read_request
from served.mistakes import Refused
from support.paths import ROOT
from support.serving.http_server import IMAGE, POISON

import jkv

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]

GREEDY = {"model": "pydoc", "temperature": 0}
CHAT = [{"role": "user", "content": "The with"}]


# Served only for completions, or only for chats.
IN_ONE = {"echo", "best_of", "tools", "tool_choice", "parallel_tool_calls"}
IN_ONE |= {"top_logprobs", "reasoning_effort", "chat_template_kwargs"}


@pytest.mark.parametrize(
    "params, names_served",
    [
        (of_texts.CompletionCreateParamsBase, fields.SERVED_OF_TEXTS),
        (of_chats.CompletionCreateParamsBase, fields.SERVED_OF_CHATS),
    ],
)
def test_the_table_has_every_field_of_the_openai_client(params, names_served):
    names = set(typing.get_type_hints(params)) | {"stream"}
    assert names <= names_served | set(fields.REFUSED)
    assert not (names_served & set(fields.REFUSED)) - IN_ONE


def test_the_page_lists_every_served_field():
    page = (ROOT / "docs" / "how-to" / "openai-server.md").read_text()
    for name in fields.SERVED_OF_TEXTS | fields.SERVED_OF_CHATS:
        assert f"`{name}`" in page, name


def test_unsupported_fields_are_refused_by_name(post, served):
    given = {
        "tools": [{"type": "function"}],
        "top_logprobs": 2,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "suffix": "end",
    }
    for name in fields.REFUSED.keys() - {"echo", "best_of"}:
        value = given.get(name, "something")
        status, reply = post(json.dumps({"prompt": "a", name: value}).encode())
        error = reply["error"]
        assert status == 400 and error["param"] == name, reply
        assert error["message"].startswith(name) and "omit it" in error["message"]
    status, reply = post(b'{"prompt": "a", "frobnicate": 1}')
    assert status == 400 and reply["error"]["param"] == "frobnicate"
    # Some need server options that reserve memory for them.
    bare = served._replace(has_rules=False, has_languages=False)
    for name, value, flag in (
        ("logit_bias", {"5": 1}, "--rules"),
        ("min_tokens", 2, "--rules"),
        ("bad_words", ["a"], "--rules"),
        ("allowed_token_ids", [5], "--rules"),
        ("presence_penalty", 0.5, "--rules"),
        ("guided_regex", "a", "--grammars"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "--grammars"),
    ):
        body = json.dumps({"messages": CHAT, name: value}).encode()
        with pytest.raises(Refused, match=f"^{name} is not enabled.*{flag}"):
            read_request(bare, body, is_chat=True)
    # Values without an effect are accepted.
    neutral = {n: r.neutral[0] for n, r in fields.REFUSED.items() if r.neutral}
    nothing = dict.fromkeys(fields.REFUSED.keys() - neutral.keys())
    body = {"messages": CHAT, "max_tokens": 1, **neutral, **nothing}
    assert post(json.dumps(body).encode(), "/v1/chat/completions")[0] == 200


@pytest.mark.parametrize(
    "body, param, words",
    [
        ({"prompt": "a", "logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "from 1 to"),
        ({"prompt": "a", "max_tokens": 97}, "max_tokens", "which leaves 96"),
        ({"prompt": "a", "metadata": []}, "metadata", "an object"),
        ({"prompt": "a", "store": 1}, "store", "true or false"),
        ({"prompt": "a", "echo": 1}, "echo", "true or false"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of", "at least n, 2"),
        (
            {"prompt": "a", "best_of": 2, "stream": True},
            "best_of",
            "must equal n with stream",
        ),
        (
            {"prompt": "a", "stream_options": {"include_usage": True}},
            "stream_options",
            "requires stream",
        ),
        (
            {"prompt": "a", "stream": True, "stream_options": {"include_x": 1}},
            "stream_options.include_x",
            "not supported",
        ),
        (
            {"prompt": "a", "stop_token_ids": [-1]},
            "stop_token_ids",
            "from 0 to 2147483647",
        ),
        ({"prompt": "a", "stop_token_ids": [1] * 9}, "stop_token_ids", "at most 8"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt", "1 to 256"),
        ({"prompt": "a", "cache_keep": 1}, "cache_keep", "from 0 to 0"),
        ({"prompt": "a", "cache_keep_seconds": 0}, "cache_keep_seconds", "from 0.001"),
        ({"prompt": "a", "priority": 2**31}, "priority", "from -"),
        ({"prompt": "a", "user": 0}, "user", "must be a string"),
        ({"prompt": "a", "user": "a" * 257}, "user", "at most 256"),
        ({"prompt": "a", "stop": False}, "stop", "must be a string"),
        ({"prompt": "a", "top_k": -2}, "top_k", "from -1"),
        (
            {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2},
            "max_completion_tokens",
            "send one of them",
        ),
        ({"prompt": [1.5]}, "prompt", "lists of integer token ids"),
        ({"prompt": ["a", [5]]}, "prompt", "only lists of integer token ids"),
        ({"prompt": "a \ud800"}, "prompt", "surrogate"),
        ({"prompt": "a", "stop": "\udfff"}, "stop", "surrogate"),
        ({"prompt": "a", "\ud800": 1}, "?", "surrogate"),
        (
            {"messages": [{**CHAT[0], "content": "\udc00"}]},
            "messages",
            "surrogate",
        ),
        ({"messages": [{**CHAT[0], "audio": [1]}]}, "messages", "audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "of type text",
        ),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs", "requires logprobs"),
        (
            {"messages": CHAT, "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs",
            "must not set tools",
        ),
    ],
)
def test_an_invalid_value_names_its_field(post, body, param, words):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, reply = post(json.dumps(body).encode(), path)
    assert status == 400 and reply["error"]["param"] == param, reply
    assert words in reply["error"]["message"]


def test_logprobs_equal_the_engine(client, continued):
    expected = continued("The with", max_new_tokens=8)
    whole = client.completions.create(
        prompt="The with", logprobs=0, max_tokens=8, **GREEDY
    )
    found = whole.choices[0].logprobs
    assert found.token_logprobs == expected.logprobs
    assert "".join(found.tokens) == expected.text and len(found.tokens) == 8
    assert [
        expected.text[i:].startswith(t)
        for i, t in zip(found.text_offset, found.tokens, strict=True)
    ] == [True] * 8
    pieces = client.chat.completions.create(
        messages=CHAT, logprobs=True, max_tokens=8, stream=True, **GREEDY
    )
    parts = [part for p in pieces for part in p.choices[0].logprobs.content]
    assert [part.logprob for part in parts] == expected.logprobs
    assert bytes(b for p in parts for b in p.bytes).decode() == expected.text
    assert "".join(p.token for p in parts) == expected.text
    plain = client.completions.create(prompt="The", max_tokens=1, **GREEDY)
    assert plain.choices[0].logprobs is None


def test_echo_returns_the_prompt_unchanged(client, continued, served):
    expected = [continued(p, max_new_tokens=4).text for p in ("The with", "Every")]
    options = dict(max_tokens=4, echo=True, **GREEDY)
    whole = client.completions.create(prompt=["The with", "Every"], **options)
    texts = [choice.text for choice in whole.choices]
    assert texts == ["The with" + expected[0], "Every" + expected[1]]
    ids = served.tokenizer.encode("The with").ids
    pieces = client.completions.create(prompt=ids, stream=True, **options)
    assert "".join(p.choices[0].text for p in pieces) == texts[0]


def test_best_of_returns_the_most_likely(client):
    options = dict(model="pydoc", prompt="The", temperature=1.3, seed=3, max_tokens=5)
    each = client.completions.create(n=6, logprobs=0, **options)
    means = [math.fsum(c.logprobs.token_logprobs) / 5 for c in each.choices]
    order = sorted(range(6), key=means.__getitem__, reverse=True)
    best = client.completions.create(n=2, best_of=6, **options)
    assert [c.text for c in best.choices] == [each.choices[i].text for i in order[:2]]
    assert [c.index for c in best.choices] == [0, 1]
    assert best.usage.completion_tokens == each.usage.completion_tokens


def test_cached_tokens_are_reported(client):
    """Whole and streamed, over all prompts; a block has 16 tokens."""
    request = dict(prompt=[[7] * 20, [8] * 20], max_tokens=2, **GREEDY)
    salt = {"cache_salt": "a salt of this test"}
    counts = []
    for _ in range(2):
        found = client.completions.create(extra_body=salt, **request)
        counts.append(found.usage.prompt_tokens_details.cached_tokens)
    stream = dict(stream=True, stream_options={"include_usage": True})
    *_, last = client.completions.create(extra_body=salt, **stream, **request)
    counts.append(last.usage.prompt_tokens_details.cached_tokens)
    assert counts[0] == 0 and counts[1] == counts[2] >= 2 * 16


def test_stop_token_ids(client, continued):
    expected = continued("The with", max_new_tokens=8)
    third = expected.tokens[2]
    request = dict(prompt="The with", max_tokens=8, **GREEDY)
    found = client.completions.create(extra_body={"stop_token_ids": [third]}, **request)
    assert found.choices[0].finish_reason == "stop"
    first = expected.tokens.index(third) + 1
    assert found.usage.completion_tokens == first
    both = {"stop_token_ids": [third], "ignore_eos": True}
    found = client.completions.create(extra_body=both, **request)
    assert found.usage.completion_tokens == first


def test_omitted_options_default_to_the_checkpoint(served):
    reply = dict(temperature=0.6, top_k=20, top_p=1.0)
    served = served._replace(sampling=reply)
    found = read_sampling(served, {"top_k": None, "top_p": 0.5})
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.5)
    found = read_sampling(served._replace(sampling={}), {"seed": 3})
    assert (found.temperature, found.top_k, found.seeds) == (1.0, 0, 3)


def test_options_reach_the_engine(post, served, monkeypatch):
    reported, submit = [], served.engine.submit

    def note(ask):
        reported.append(vars(ask))
        return submit(ask)

    monkeypatch.setattr(served.engine, "submit", note)
    body = {
        "prompt": [5, 6],
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.01,
        "repetition_penalty": 1.5,
        "seed": 7,
        "priority": -3,
        "stop_token_ids": [9],
        "stop": "x",
        "timeout": 250.0,
        "cache_keep_seconds": 9,
        "user": "me",
    }
    for changes in ({}, {"ignore_eos": True, "cache_salt": "a"}, {"cache_salt": "b"}):
        assert post(json.dumps(body | changes).encode())[0] == 200
    request = {**reported[0]}
    sampling = request.pop("sampling")
    # Time spent in the server counts.
    assert 249.0 < request.pop("timeout") < 250.0
    assert request == dict(
        tokens=[5, 6],
        spans=None,
        n=1,
        max_new_tokens=2,
        stop_strings=["x"],
        stop_tokens=[0, 9],
        stop_sequences=(),
        priority=-3,
        client="me",
        salt=0,
        variant=-1,
        keep=0,
        keep_seconds=9.0,
    )
    assert reported[1]["stop_tokens"] == [9]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.01, 1.5)
    assert sampling.seeds == 7
    salts = [each["salt"] for each in reported]
    assert len(set(salts)) == 3
    assert post(json.dumps(body | {"cache_salt": "a"}).encode())[0] == 200
    assert reported[3]["salt"] == salts[1]


def test_nan_logits_are_reported_as_an_error(client):
    with pytest.raises(openai.InternalServerError, match="NaN logits") as caught:
        client.completions.create(prompt=[[5, 6], [POISON]], max_tokens=4, **GREEDY)
    assert caught.value.code == "nan_logits"
    pieces = client.completions.create(
        prompt=[POISON], max_tokens=4, stream=True, **GREEDY
    )
    with pytest.raises(openai.APIError, match="NaN logits"):
        list(pieces)
    # Other prompts are not affected.
    found = client.completions.create(prompt=[5, POISON], max_tokens=4, **GREEDY)
    assert found.choices[0].finish_reason == "length"


def test_health_models_and_metrics_endpoints(client, post, served):
    assert post(None, "/health", "GET") == (200, {"status": "ok"})
    (model,) = client.models.list().data
    assert model.created > 1_700_000_000
    assert client.models.retrieve("pydoc") == model
    with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        client.models.retrieve("a/b")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist"):
        client.completions.create(model="gpt", prompt="a")
    for status, method, path in [
        (404, "POST", "/v1/completions/"),  # no redirect
        (404, "GET", "/v1/nothing"),
        (405, "GET", "/v1/completions"),
        (405, "POST", "/health"),
    ]:
        found, reply = post(b"{}" if method == "POST" else None, path, method)
        assert found == status and path in reply["error"]["message"]
        assert reply["error"].keys() == {"message", "type", "param", "code"}
    request = dict(prompt="a", max_tokens=1, **GREEDY)
    names = [client.completions.create(**request).id for _ in range(3)]
    assert len(set(names)) == 3 and all(len(name) > 30 for name in names)
    with pytest.raises(openai.NotFoundError, match="continues text"):
        client.embeddings.create(model="pydoc", input="a")
    assert post(None, "/version", "GET") == (200, {"version": jkv.__version__})
    named = served._replace(known_as="mine")
    check_model(named, "mine")
    with pytest.raises(Refused, match="has 'mine'"):
        check_model(named, "pydoc")


def test_tokenize_and_detokenize(post, served):
    ids = served.tokenizer.encode("The with é").ids
    status, reply = post(json.dumps({"prompt": "The with é"}).encode(), "/tokenize")
    reported = {
        "count": len(ids),
        "max_model_len": 96,
        "tokens": ids,
        "token_strs": None,
    }
    assert (status, reply) == (200, reported)
    body = {"messages": CHAT, "return_token_strs": True}
    status, reply = post(json.dumps(body).encode(), "/tokenize")
    assert reply["tokens"] == served.tokenizer.encode("The with").ids
    assert reply["token_strs"] == served.tokenizer.encode("The with").tokens
    for tokens, text in ((ids, "The with é"), ([], "")):
        body = json.dumps({"model": "pydoc", "tokens": tokens}).encode()
        assert post(body, "/detokenize") == (200, {"prompt": text})
    for path, body, words in [
        ("/tokenize", {}, "prompt must be a string"),
        ("/tokenize", {"prompt": "a", "x": 1}, "'x' is not a field"),
        ("/tokenize", {"messages": []}, "a list of at least one message"),
        ("/detokenize", {"tokens": [99999]}, "not a token id"),
        ("/detokenize", {"tokens": "a"}, "a list of token ids"),
    ]:
        status, reply = post(json.dumps(body).encode(), path)
        assert status == 400 and words in reply["error"]["message"]


def test_a_request_may_fill_the_context(client):
    """The default is not a limit; the context is, and its error says so."""
    request = dict(prompt=[5] * 20, extra_body={"ignore_eos": True}, **GREEDY)
    found = client.completions.create(max_tokens=77, **request)
    assert found.usage.completion_tokens == 77
    assert found.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="max_tokens is 78.*leaves 77"):
        client.completions.create(max_tokens=78, **request)
    # The test server's --max-new-tokens.
    assert client.completions.create(**request).usage.completion_tokens == 64


def test_an_empty_prompt_starts_a_completion(client, served, continued):
    begin = served.engine.results(
        served.engine.submit([*served.begin_tokens], max_new_tokens=4)
    )[0]
    for prompt in ("", [], [""], [[]]):
        found = client.completions.create(prompt=prompt, max_tokens=4, **GREEDY)
        assert found.choices[0].text == begin.text
    two = client.completions.create(prompt=["", "The with"], max_tokens=4, **GREEDY)
    expected = [begin.text, continued("The with", max_new_tokens=4).text]
    assert [each.text for each in two.choices] == expected


def test_fields_without_effect_are_accepted(client):
    stops = [f"never {i}" for i in range(20)]
    found = client.chat.completions.create(
        messages=CHAT,
        max_tokens=2,
        metadata={"run": "1"},
        store=True,
        service_tier="auto",
        user="me",
        stop=stops,
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        **GREEDY,
    )
    assert found.usage.completion_tokens == 2


NEUTRAL_OF_ALL = [
    {"best_of": 1},
    {"n": 1.0, "seed": 1.0, "top_k": 40.0, "min_tokens": 0.0},
    {"tools": []},
    {"tools": [], "tool_choice": "auto"},
    {"tool_choice": "none", "parallel_tool_calls": True},
    {"function_call": "auto", "functions": []},
    {"verbosity": "medium"},
    {"max_tokens": 3, "max_completion_tokens": 3.0},
    {"cache_control": {"type": "ephemeral"}},
    {"stream_options": {}},
    {"length_penalty": 1, "use_beam_search": False},
    {"prompt_cache_retention": "in_memory", "prompt_cache_options": {}},
    {"logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0},
    {"stop": [], "stop_token_ids": [], "bad_words": []},
    {"response_format": {"type": "text"}, "metadata": {}},
]


@pytest.mark.parametrize("fields", NEUTRAL_OF_ALL, ids=str)
def test_neutral_values_are_accepted(post, fields):
    for body, path in (
        ({"prompt": "a"}, "/v1/completions"),
        ({"messages": CHAT}, "/v1/chat/completions"),
    ):
        status, reply = post(
            json.dumps({"max_tokens": 3, **body, **fields}).encode(), path
        )
        assert status == 200, reply
        assert reply["usage"]["completion_tokens"] <= 3


def test_parts_of_a_message_are_joined_by_newlines(served):
    parts = [{"type": "text", "text": text} for text in ("The with", "statement")]
    found = [
        read_chat(served, {"messages": [{"role": "user", "content": content}]})
        for content in (parts, "The with\nstatement")
    ]
    assert found[0] == found[1]


def test_a_tool_result_may_be_empty(post):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    body = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ]
    body = json.dumps({"messages": body, "max_tokens": 1}).encode()
    assert post(body, "/v1/chat/completions")[0] == 200
    body = json.dumps({"messages": [{"role": "user", "content": None}]}).encode()
    status, reply = post(body, "/v1/chat/completions")
    assert status == 400 and "content must be a string" in reply["error"]["message"]


def test_a_prompt_too_long_in_characters_or_tokens_gets_the_same_error(post):
    for prompt in ("a " * 500, "a" * 200_000, [5] * 200):
        for body, path in (
            ({"prompt": prompt}, "/v1/completions"),
            (
                {"messages": [{"role": "user", "content": prompt}]},
                "/v1/chat/completions",
            ),
        ):
            if "messages" in body and isinstance(prompt, list):
                continue
            status, reply = post(json.dumps(body).encode(), path)
            assert status == 400, reply
            assert reply["error"]["code"] == "context_length_exceeded", reply


def test_a_token_unknown_to_the_model_is_refused(post, served):
    """This server's tokenizer has one token more than the model."""
    assert served.tokenizer.token_to_id(IMAGE) == served.vocabulary_size
    for body, path in (
        ({"prompt": f"The {IMAGE}"}, "/v1/completions"),
        (
            {"messages": [{"role": "user", "content": f"The {IMAGE}"}]},
            "/v1/chat/completions",
        ),
    ):
        status, reply = post(json.dumps(body).encode(), path)
        assert status == 400 and "token" in reply["error"]["message"], reply


def test_echoed_special_tokens_keep_their_spelling(client, served):
    end = served.tokenizer.id_to_token(0)
    ids = [*served.tokenizer.encode("The").ids, 0, *served.tokenizer.encode(" a").ids]
    options = dict(max_tokens=1, echo=True, logprobs=1, **GREEDY)
    for prompt in (ids, f"The{end} a"):
        (choice,) = client.completions.create(prompt=prompt, **options).choices
        reported = choice.logprobs
        assert choice.text.startswith(f"The{end} a") and end in reported.tokens
        for text, offset in zip(reported.tokens, reported.text_offset, strict=True):
            assert choice.text[offset:].startswith(text)
        assert "".join(reported.tokens) == choice.text


def test_stream_usage_follows_stream_options(client):
    def ask(n=1, **options):
        pieces = client.completions.create(
            prompt="The with",
            max_tokens=12,
            n=n,
            stream=True,
            stream_options=options,
            **GREEDY,
        )
        return [piece.model_dump() for piece in pieces]

    *pieces, last = ask(include_usage=True)
    assert all(piece["usage"] is None and "usage" in piece for piece in pieces)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    *pieces, last = ask(include_usage=True, continuous_usage_stats=True)
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts) and counts[-1] == 12
    assert last["usage"]["completion_tokens"] == 12
    # Usage per choice.
    *pieces, last = ask(n=2, include_usage=True, continuous_usage_stats=True)
    assert max(piece["usage"]["completion_tokens"] for piece in pieces) == 12
    assert last["usage"]["completion_tokens"] == 24
    # Usage is reported only on request.
    assert not any(piece["usage"] for piece in ask(continuous_usage_stats=True))


def test_the_role_is_in_the_first_piece(client):
    pieces = client.chat.completions.create(
        messages=CHAT, max_tokens=80, n=2, stream=True, **GREEDY
    )
    roles = {0: [], 1: []}
    for piece in pieces:
        for choice in piece.choices:
            roles[choice.index].append(choice.delta.role)
    for each in roles.values():
        assert each[0] == "assistant" and len(each) > 1 and not any(each[1:])
    reply = {"guided_choice": ["yes and " * 8]}
    with client.chat.completions.stream(
        messages=CHAT, max_tokens=60, extra_body=reply, **GREEDY
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", *reply["guided_choice"])


def test_tool_calls_of_a_history_are_accepted_in_any_form(post):
    function = {"name": "f", "arguments": ""}
    call = {"id": "1", "type": "function", "function": function}
    for message in (
        {"content": None, "tool_calls": [call]},
        {"content": "a", "tool_calls": [{**call, "index": 0}], "refusal": None},
        {"tool_calls": [{**call, "function": {**function, "arguments": "{"}}]},
        {"content": "", "tool_calls": [], "reasoning_content": "hm"},
        {"content": None, "refusal": "no", "annotations": []},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": None, "reasoning": "hm", "function_call": None, "audio": None},
    ):
        answered = {"role": "assistant", **message}
        request = {"role": "user", "content": [{"type": "text", "text": "So?"}]}
        request["content"][0]["cache_control"] = {"type": "ephemeral"}
        body = {"messages": [*CHAT, answered, request], "max_tokens": 1}
        status, reply = post(json.dumps(body).encode(), "/v1/chat/completions")
        assert status == 200, reply
