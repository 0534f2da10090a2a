"""500 random bodies: each is answered, none crashes the server."""

import http.client
import json
import random
import threading

import pytest
from support.serving.http_server import POISON

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]

# Parts of a random body: valid and invalid values for each field.
PROMPTS = ["The with", "", "a\ud800", "\0\u200d", ["a", "b"], [5, 6, 7], [[5], [6, 7]]]
PROMPTS += [[], [99999], [-1], None, 5, {}, [None], ["a", 5], "a " * 90, [0], [[]]]
CONTENTS = [
    "The",
    "",
    None,
    5,
    [{"type": "text", "text": "a"}],
    [{"type": "image_url"}],
]
NUMBERS = [0, 1, 2, -1, 0.5, 1e308, -0.0, True, "1", None, 10**30, [], {}, 2**31, 2**63]
NUMBERS += [float("nan"), float("inf")]
OTHERS = [None, True, False, 0, 1, "", "a", "\udfff", [], [1], ["a"], {}, {"a": None}]
NAMES = ["n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs"]
NAMES += ["repetition_penalty", "priority", "max_completion_tokens", "top_logprobs"]
NAMES += ["presence_penalty", "min_tokens"]
ODD = [
    "stop",
    "stream",
    "stream_options",
    "echo",
    "cache_salt",
    "cache_keep",
    "cache_keep_seconds",
    "stop_token_ids",
    "user",
]
ODD += [
    "ignore_eos",
    "add_special_tokens",
    "model",
    "logit_bias",
    "tools",
    "\ud800",
    "",
]


def make_body(chance):
    """Create a body with mostly valid fields."""
    body = {"max_tokens": 2, "seed": 1}
    if chance.random() < 0.7:
        body["prompt"] = pick(PROMPTS, chance)
    else:
        role = pick(["user", "a", 5], chance)
        message = {"role": role, "content": pick(CONTENTS, chance)}
        body["messages"] = [message] * pick([1, 2, 0], chance)
    for name in chance.sample(NAMES, chance.choice([0, 1, 2])):
        body[name] = chance.choice(NUMBERS[: chance.choice([3, len(NUMBERS)])])
    for name in chance.sample(ODD, chance.choice([0, 0, 1])):
        body[name] = chance.choice(OTHERS)
    return body


def pick(values, chance):
    """Return the first value in three of four cases, else any."""
    return values[0] if chance.random() < 0.75 else chance.choice(values)


def damage(text, chance):
    """Change a few bytes of one body in five."""
    data = bytearray(text.encode())
    for _ in range(chance.choice([0, 0, 0, 0, 3])):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def test_500_random_bodies_are_answered(address):
    """The response is a result or an API error; no body crashes the server."""
    chance = random.Random(7)
    bodies = [make_body(chance) for _ in range(500)]
    sent = [
        ("/v1/chat/completions" if "messages" in body else "/v1/completions", text)
        for body in bodies
        for text in [damage(json.dumps(body), chance)]
    ]
    assert not any(body.get("prompt") == [POISON] for body in bodies)
    host, port = address.removeprefix("http://").split(":")
    statuses = []

    def ask(part):
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        for path, text in part:
            connection.request("POST", path, text)
            reply = connection.getresponse()
            found = reply.read()
            statuses.append((reply.status, text, found))
        connection.close()

    threads = [threading.Thread(target=ask, args=[sent[i::8]]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 500
    for status, text, found in statuses:
        assert status in (200, 400, 404), (status, text, found)
        if status == 200:
            assert not found.startswith(b'{"error"'), (text, found)
        else:
            assert json.loads(found)["error"]["message"], text
    served = sum(status == 200 for status, *_ in statuses)
    assert 100 < served < 400, served
