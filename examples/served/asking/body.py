"""Engine arguments of a request body: prompts, sampling, stop conditions and limits.

Display options are in `showing.py`.
"""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import pretrained

import jkv
from jkv.serving import Request

from ..loading import MOST_STOP_TOKENS, Served
from ..mistakes import Refused
from ..processors.rule_table import Rules
from ..values import is_tokens, read_flag, read_number
from .languages import Language
from .prompts import read_chat, read_prompts
from .tools import Tools, read_tools

MOST_SAMPLES = 16
MOST_STOPS = 32
TOKENS_OF_COMPLETIONS = 256  # the default; a chat may use the context
MOST_SALT = MOST_NAME = 256  # characters
MOST_SECONDS = 24 * 3600
I32 = 2**31


class ParsedBody(NamedTuple):
    """The requests of one body: one per prompt."""

    prompts: list[list[int]]  # token ids
    request: Request  # shared options, without tokens and variant
    n: int
    tools: Tools | None = None  # of a chat
    language: Language | None = None  # for constrained decoding
    rules: Rules | None = None  # biases, penalties and bans
    warnings: tuple[str, ...] = ()  # for the client, about the language

    @property
    def has_calls(self) -> bool:
        """True if completions may call tools."""
        return self.tools is not None and self.tools.language is not None

    @property
    def has_answer(self) -> bool:
        """True if a completion without a call follows a schema."""
        return self.has_calls and self.language != self.tools.language

    def warn(self, served: Served) -> dict[str, list[str]]:
        """Return the reply's field of warnings, or an empty dictionary."""
        warnings = [*self.warnings]
        if self.has_calls and not pretrained.can_show_tools(served.folder):
            warnings.append(
                f"the chat template of {served.name} does not show tools: the model "
                "knows of them only what messages say, though its calls follow their "
                "schemas"
            )
        return {"warnings": warnings} if warnings else {}


def read_body(served: Served, body: Any, *, is_chat: bool) -> ParsedBody:
    """Parse the engine's arguments.

    Args:
        served: the model.
        body: the parsed JSON.
        is_chat: whether the body has "messages" instead of a "prompt".

    Raises:
        ValueError: for invalid options, with a message for the client.
    """
    if not isinstance(body, Mapping):
        raise Refused("the body must be an object")
    tools = read_tools(body, served.tool_tags) if is_chat else None
    if is_chat:
        prompts = read_chat(served, body, [] if tools is None else tools.listed)
    else:
        prompts = read_prompts(served, body)
    n = read_number(body, "n", 1, int, 1, MOST_SAMPLES)
    longest = max(map(len, prompts))
    if longest > served.context:
        raise Refused(
            f"the prompt has {longest} tokens, the context is {served.context}",
            "messages" if is_chat else "prompt",
            code="context_length_exceeded",
        )
    request = Request(
        (),
        n=n,
        max_new_tokens=_read_most_tokens(served, body, longest, is_chat=is_chat),
        sampling=read_sampling(served, body),
        stop_strings=_read_stops(body),
        stop_tokens=_read_stop_tokens(served, body),
        priority=read_number(body, "priority", 0, int, 1 - I32, I32 - 2),
        client=_read_client(body),
        salt=_read_salt(body),
        timeout=_read_seconds(body, "timeout"),
        keep=read_number(body, "cache_keep", 0, int, 0, served.keep_classes - 1),
        keep_seconds=_read_seconds(body, "cache_keep_seconds"),
    )
    return ParsedBody(prompts, request, n, tools)


def _read_most_tokens(
    served: Served, body: Mapping[str, Any], longest: int, *, is_chat: bool
) -> int:
    """Return `max_new_tokens`: requested, or the default, within the context."""
    names = [
        name
        for name in ("max_completion_tokens", "max_tokens")
        if body.get(name) is not None
    ]
    if len(names) > 1 and body[names[0]] != body[names[1]]:
        raise Refused(
            "max_tokens and max_completion_tokens differ; send one of them", names[0]
        )
    # The last token needs no slot.
    room = served.context - longest + 1
    if not names:
        usual = served.max_new_tokens or (room if is_chat else TOKENS_OF_COMPLETIONS)
        return min(usual, room)
    # With echo, zero new tokens are allowed.
    least = 0 if not is_chat and body.get("echo") is True else 1
    most: int = read_number(body, names[0], room, int, least, I32 - 1)
    if most > room:
        raise Refused(
            f"the prompt has {longest} tokens and {names[0]} is {most}; the context "
            f"is {served.context} tokens, which leaves {room}",
            names[0],
            code="context_length_exceeded",
        )
    return most


def read_sampling(served: Served, body: Mapping[str, Any]) -> jkv.Sampling:
    """Return the sampling parameters; the checkpoint has the defaults."""
    seed = body.get("seed")
    if seed is None:
        seed = random.getrandbits(31)
    # The API's seeds have 64 bits, ours 32.
    seed = read_number({"seed": seed}, "seed", 0, int, -(2**63), 2**64)
    body = {**served.sampling} | {n: v for n, v in body.items() if v is not None}
    number = read_number
    return jkv.Sampling(
        temperature=number(body, "temperature", 1.0, float, 0, 100),
        top_p=number(body, "top_p", 1.0, float, 0, 1),
        # Disabled: 0 in Hugging Face, -1 in vLLM.
        top_k=max(0, number(body, "top_k", 0, int, -1, I32 - 1)),
        min_p=number(body, "min_p", 0.0, float, 0, 1),
        repetition_penalty=number(body, "repetition_penalty", 1.0, float, 1e-6, 100),
        seeds=(seed + I32) % 2**32 - I32,
    )


def _read_stops(body: Mapping[str, Any]) -> list[str]:
    stops = body.get("stop")
    if stops is None or stops == "":
        return []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise Refused("stop must be a string or a list of non-empty strings", "stop")
    if len(stops) > MOST_STOPS:
        raise Refused(
            f"stop must have at most {MOST_STOPS} strings, got {len(stops)}", "stop"
        )
    return stops


def _read_stop_tokens(served: Served, body: Mapping[str, Any]) -> list[int]:
    """Return the stop tokens: the model's own and the request's."""
    given = body.get("stop_token_ids")
    given = [] if given is None else given
    if given != [] and not is_tokens(given):
        raise Refused("stop_token_ids must be a list of token ids", "stop_token_ids")
    if len(given) > MOST_STOP_TOKENS or not all(0 <= token < I32 for token in given):
        raise Refused(
            f"stop_token_ids must have at most {MOST_STOP_TOKENS} ids, each from 0 to "
            f"{I32 - 1}",
            "stop_token_ids",
        )
    own = () if read_flag(body, "ignore_eos", False) else served.stop_tokens
    return [*own, *given]


def _read_client(body: Mapping[str, Any]) -> str | None:
    """Return the client's name from `user` or its successor `safety_identifier`."""
    names = []
    for field in ("user", "safety_identifier"):
        name = body.get(field)
        if not isinstance(name, str | None) or len(name or "") > MOST_NAME:
            raise Refused(
                f"{field} must be a string of at most {MOST_NAME} characters", field
            )
        names.append(name)
    return names[0] or names[1] or None


def _read_salt(body: Mapping[str, Any]) -> int | str:
    salt = body.get("cache_salt")
    if salt is None:
        return 0
    if not isinstance(salt, str) or not 0 < len(salt) <= MOST_SALT:
        raise Refused(
            f"cache_salt must be a string of 1 to {MOST_SALT} characters", "cache_salt"
        )
    return salt


def _read_seconds(body: Mapping[str, Any], name: str) -> float | None:
    """Return a number of seconds; None for no limit."""
    if body.get(name) is None:
        return None
    seconds: float = read_number(body, name, 0.0, float, 0.001, MOST_SECONDS)
    return seconds
