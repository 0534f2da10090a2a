"""What a line of a batch or a client of the API asks for, in the API's words.

Unknown words are left alone, as servers of this API do; known ones are checked.
"""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import pretrained

import jkv

from .loading import Served

MOST_SAMPLES = 16
MOST_STOPS = 4  # as in the API


class Asked(NamedTuple):
    """Requests that one body makes, one for each prompt."""

    prompts: list[list[int]]  # token ids
    options: dict[str, Any]  # of `Engine.submit`
    n: int


def read_body(served: Served, body: Any, *, is_chat: bool) -> Asked:
    """Understand what is asked.

    Args:
        served: the model.
        body: the JSON.
        is_chat: whether "messages" are continued, not a "prompt".

    Raises:
        ValueError: for what cannot be, in words for the client.
    """
    if not isinstance(body, Mapping):
        raise ValueError("the body must be an object")
    prompts = _read_chat(served, body) if is_chat else _read_prompts(served, body)
    n = _read_number(body, "n", 1, int, 1, MOST_SAMPLES)
    name = "max_completion_tokens"
    name = name if body.get(name) is not None else "max_tokens"
    room = served.context - max(map(len, prompts)) + 1
    if room < 1:
        raise ValueError(
            f"the prompt has {max(map(len, prompts))} tokens, the context is "
            f"{served.context}"
        )
    most = min(served.max_new_tokens, room)
    seed = body.get("seed")
    if seed is None:
        seed = random.getrandbits(31)
    # The API's numbers are 64 bits wide, a seed of ours 32.
    seed = _read_number({"seed": seed}, "seed", 0, int, -(2**63), 2**64)
    seed = (seed + 2**31) % 2**32 - 2**31
    sampling = jkv.Sampling(
        temperature=_read_number(body, "temperature", 1.0, float, 0, 100),
        top_p=_read_number(body, "top_p", 1.0, float, 0, 1),
        top_k=_read_number(body, "top_k", 0, int, 0, 2**31 - 1),
        min_p=_read_number(body, "min_p", 0.0, float, 0, 1),
        repetition_penalty=_read_number(
            body, "repetition_penalty", 1.0, float, 1e-6, 100
        ),
        seeds=seed,
    )
    options = dict(
        n=n,
        max_new_tokens=_read_number(body, name, most, int, 1, served.max_new_tokens),
        sampling=sampling,
        stop_strings=_read_stops(body),
    )
    return Asked(prompts, options, n)


def _read_prompts(served: Served, body: Mapping[str, Any]) -> list[list[int]]:
    """Return the prompts: a text, tokens, or several of one kind."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or _is_tokens(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("prompt must be a text, a list of token ids, or several")
    if all(map(_is_tokens, prompt)):
        return prompt
    if not all(isinstance(text, str) and text for text in prompt):
        raise ValueError("every prompt must be a text that is not empty")
    return [encoding.ids for encoding in served.tokenizer.encode_batch(prompt)]


def _read_chat(served: Served, body: Mapping[str, Any]) -> list[list[int]]:
    """Return what was said as the checkpoint's own template has it."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("a message is an object with role and content")
    messages = [{**m, "content": _read_content(m.get("content"))} for m in messages]
    text = pretrained.render_chat(served.folder, messages)
    return [served.tokenizer.encode(text, add_special_tokens=False).ids]


def _read_content(content: Any) -> str:
    """Return the text of a message, which may come in parts."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(parts) == len(content) and all(isinstance(p, str) for p in parts):
            return "".join(parts)
    if not isinstance(content, str):
        raise ValueError("content must be a text, or parts of type text")
    return content


def _read_stops(body: Mapping[str, Any]) -> list[str]:
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise ValueError("stop must be a text or a list of texts")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"stop takes {MOST_STOPS} texts, got {len(stops)}")
    return stops


def _read_number(
    body: Mapping[str, Any],
    name: str,
    default: float,
    kind: type,
    low: float,
    high: float,
) -> Any:
    value = body.get(name)
    value = default if value is None else value
    kinds = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{name} must be a number of type {kind.__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {value}")
    return kind(value)


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(token, int) and not isinstance(token, bool) for token in value
        )
    )
