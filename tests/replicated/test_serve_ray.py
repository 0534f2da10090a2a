"""`serve_ray.py`: lost replicas, weight updates, and prefix-aware routing."""

import asyncio
import json
import operator
import time

import pytest

pytest.importorskip("ray")

import httpx
from ray import serve

pytestmark = pytest.mark.usefixtures("replicas")

PROMPTS = [f"{topic} is described in the library." for topic in "list dict set".split()]


def write_requests(num_prompts, repeats):
    """Return prompts that share long prefixes, each with its own end."""
    beginnings = [
        f"{i} {topic}: this module of the standard library provides classes and "
        "functions for programs that need more than the built-in types, such as "
        "containers, and its documentation begins with a short example."
        for i, topic in enumerate(("collections", "asyncio", "json", "pathlib") * 2)
    ][:num_prompts]
    return [
        {"prompt": f"{beginning} Question {number}.", "max_tokens": 4, "temperature": 0}
        for number in range(repeats)
        for beginning in beginnings
    ]


def wait_for_replicas(find_processes):
    """Wait until Ray has replaced the dead replicas."""
    end = time.monotonic() + 120
    while len(find_processes()) < 3:
        assert time.monotonic() < end
        time.sleep(0.5)


def test_replica_answers_equal_a_single_engine(ask, alone):
    bodies = [{"prompt": p, "max_tokens": 12, "temperature": 0} for p in PROMPTS]
    for (status, found), body in zip(ask(bodies * 3), bodies * 3, strict=True):
        assert status == 200
        assert found["choices"] == alone(**body)["choices"]
    [(status, found)] = ask([{"prompt": 7}])
    assert status == 400 and found["error"]["param"] == "prompt"


def test_a_stream_arrives_in_parts(url, alone):
    body = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]" and len(lines) > 1
    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
    assert text == alone(**body)["choices"][0]["text"]


def test_prefix_hits_are_close_to_a_single_engines(ask, alone, read_numbers):
    """The hit rate of three replicas is at least 0.9 of a single engine's."""
    bodies = write_requests(num_prompts=8, repeats=6)

    def count(numbers):
        cached, computed = (
            sum(numbers[f"jkv_{name}_tokens_total"].values())
            for name in ("cached", "prompt")
        )
        return cached, computed

    before = count(read_numbers())
    for first in range(0, len(bodies), 8):
        assert {status for status, _ in ask(bodies[first : first + 8])} == {200}
    cached, computed = (
        new - old for new, old in zip(count(read_numbers()), before, strict=True)
    )
    old = alone.stats()
    for body in bodies:
        alone(**body)
    new = alone.stats()
    one = (new.cached_tokens - old.cached_tokens) / (
        new.cached_tokens - old.cached_tokens + new.prompt_tokens - old.prompt_tokens
    )
    assert one > 0.5
    assert cached / (cached + computed) >= 0.9 * one


def test_a_killed_replica_loses_no_request(ask, alone, kill, find_processes):
    bodies = [
        {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        for prompt in PROMPTS * 8
    ]
    expected = {body["prompt"]: alone(**body)["choices"] for body in bodies[:3]}
    assert {status for status, _ in ask(bodies, meanwhile=kill)} == {200}
    for (_, found), body in zip(ask(bodies[:6]), bodies[:6], strict=True):
        assert found["choices"] == expected[body["prompt"]]
    wait_for_replicas(find_processes)


def test_a_cut_stream_ends_with_an_error(url, kill, find_processes):
    """All replicas die after the first stream has started, so at least one is cut."""

    async def read(client, number, has_begun):
        body = dict(prompt=f"{number} is", max_tokens=480, stream=True, ignore_eos=True)
        lines = []
        async with client.stream("POST", url, json=body, timeout=300) as reply:
            async for line in reply.aiter_lines():
                if line:
                    lines.append(line)
                    has_begun.set()
        return lines[-1]

    async def kill_all(has_begun):
        await has_begun.wait()
        await asyncio.to_thread(kill, 3)

    async def read_all():
        has_begun = asyncio.Event()
        async with httpx.AsyncClient() as client:
            tasks = [read(client, number, has_begun) for number in range(12)]
            *lasts, _ = await asyncio.gather(*tasks, kill_all(has_begun))
        return lasts

    lasts = asyncio.run(read_all())
    is_cut = ["replica_died" in last for last in lasts]
    is_whole = [last == "data: [DONE]" for last in lasts]
    assert any(is_cut) and all(map(operator.ne, is_cut, is_whole))
    wait_for_replicas(find_processes)


def test_weights_are_updated_one_replica_at_a_time(
    ask, deploy, other_weights, read_numbers
):
    body = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    [(_, before)] = ask([body])
    bodies = [body | {"prompt": f"{i} {PROMPTS[i % 3]}"} for i in range(40)]
    answers = ask(bodies, meanwhile=lambda: deploy((3, 3), str(other_weights)))
    assert {status for status, _ in answers} == {200}
    end = time.monotonic() + 60
    while set(read_numbers()["jkv_weights_version"].values()) != {1.0}:
        assert time.monotonic() < end
        time.sleep(0.5)
    found = [answer["choices"][0]["text"] for _, answer in ask([body] * 6)]
    assert len(set(found)) == 1 and found[0] != before["choices"][0]["text"]


def test_replicas_scale_with_the_load(ask, deploy, find_processes):
    serve.delete("jkv")  # else surplus replicas would have to be idle for long
    deploy((1, 2))
    assert len(find_processes()) == 1
    body = {"prompt": "The", "max_tokens": 400, "ignore_eos": True, "n": 4}
    end = time.monotonic() + 120
    while len(find_processes()) < 2:
        assert time.monotonic() < end
        assert {status for status, _ in ask([body] * 8)} == {200}
