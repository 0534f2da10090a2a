"""Request bodies of other projects' clients, recorded in autumn 2026.

Each client ran its first example against this server; texts and schemas are shortened,
and no field is left out. Coding agents: codex 0.147, qwen-code, Claude Code
(`/v1/messages`); libraries: openai-node, Vercel's AI SDK, haystack, mem0, deepeval,
ragas, crewAI; benchmarks: guidellm.
"""

import collections
import copy
import functools
import json
import random

import pytest

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "The with"}]
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
ZONES = {
    "$schema": DRAFT_7,
    "type": "object",
    "properties": {"zone": {"type": "string", "enum": ["a", "b"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
ANSWER = {
    "$schema": DRAFT_7,
    "type": "object",
    "properties": {"a": {"type": "string", "enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
CLOCK = {"name": "clock", "description": "time", "parameters": ZONES}
COMMAND = {
    "type": "object",
    "properties": {
        "cmd": {"type": "string", "description": "Command."},
        "login": {"type": "boolean"},
        "max_output_tokens": {"type": "number"},
        "sandbox_permissions": {"type": "string", "enum": ["use_default", "escalated"]},
        "prefix_rule": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["cmd"],
    "additionalProperties": False,
}


def input_text(role, *texts, **fields):
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", **fields, "role": role, "content": content}


CODEX = {
    "stream": True,
    "input": [
        input_text("developer", "Be brief.", id="msg_1"),
        input_text("developer", "a", "b", id="msg_2"),
        input_text("user", "The with", id="msg_3"),
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": COMMAND,
        },
        {
            "type": "function",
            "name": "get_goal",
            "description": "a",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {},
                "required": [],
                "additionalProperties": False,
            },
        },
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Agents.",
            "tools": [
                {
                    "type": "function",
                    "name": "close_agent",
                    "description": "Closes one.",
                    "strict": False,
                    "parameters": {
                        "type": "object",
                        "properties": {"target": {"type": "string"}},
                        "required": ["target"],
                        "additionalProperties": False,
                    },
                }
            ],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a21ee5-6d61-78e1-bb09-6ca47d4d456f",
    "client_metadata": {"session_id": "01a2", "x-codex-turn-metadata": "{}"},
}
CODEX_GOES_ON = CODEX | {
    "input": [
        *CODEX["input"],
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {
            "type": "function_call",
            "id": "fc_1",
            "name": "exec_command",
            "arguments": '{"cmd": "ls"}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "a"},
        {
            "type": "function_call",
            "name": "close_agent",
            "namespace": "multi_agent_v1",
            "arguments": "{}",
            "call_id": "call_2",
        },
        {"type": "function_call_output", "call_id": "call_2", "output": "b"},
        {
            "type": "web_search_call",
            "status": "completed",
            "action": {"type": "search"},
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "c"}],
            "phase": "commentary",
        },
        input_text("user", "d"),
    ],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "service_tier": "priority",
}

CLAUDE_CODE = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>a</system-reminder>"},
                {
                    "type": "text",
                    "text": "The with",
                    "cache_control": {"type": "ephemeral"},
                },
            ],
        },
        {"role": "system", "content": "Types"},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "\nso", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {
                "$schema": DRAFT_2020,
                "type": "object",
                "properties": {
                    "command": {"description": "It", "type": "string"},
                    "timeout": {"type": "number"},
                },
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {
            "name": "CronList",
            "description": "Lists.",
            "input_schema": {
                "$schema": DRAFT_2020,
                "type": "object",
                "properties": {},
                "additionalProperties": False,
            },
        },
    ],
    "metadata": {"user_id": '{"device_id":"c1b1","account_uuid":"","session_id":"3e"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {
        "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
    },
    "output_config": {"effort": "high"},
    "stream": True,
}

QWEN_CODE = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "The with"}]},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "grep_search",
                "description": "Searches.",
                "parameters": {
                    "properties": {
                        "pattern": {"description": "It", "type": "string"},
                        "limit": {"type": "number"},
                    },
                    "required": ["pattern"],
                    "type": "object",
                },
            },
        },
        {
            "type": "function",
            "function": {
                "name": "todo_write",
                "description": "Notes.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "todos": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "properties": {
                                    "content": {"type": "string", "minLength": 1},
                                    "status": {"type": "string", "enum": ["a", "b"]},
                                },
                                "required": ["content", "status"],
                                "additionalProperties": False,
                            },
                        }
                    },
                    "required": ["todos"],
                    "$schema": DRAFT_7,
                },
            },
        },
    ],
    "max_tokens": 8,
}

IN_PARTS = [{"role": "user", "content": [{"type": "input_text", "text": "The with"}]}]
OF_SDK = [{"role": "user", "content": [{"type": "text", "text": "The with"}]}]
BODIES = {
    "codex": (RESPONSES, CODEX),
    "codex, a later turn": (RESPONSES, CODEX_GOES_ON),
    "claude code": (MESSAGES, CLAUDE_CODE),
    "qwen-code": (CHATS, QWEN_CODE),
    "openai-node, chat": (
        CHATS,
        {
            "messages": [{"role": "developer", "content": "Be brief."}, *SAID],
            "max_completion_tokens": 8,
        },
    ),
    "openai-node, runTools": (
        CHATS,
        {
            "messages": SAID,
            "max_tokens": 8,
            "tools": [{"type": "function", "function": CLOCK}],
            "tool_choice": "auto",
            "stream": False,
        },
    ),
    "openai-node, responses": (
        RESPONSES,
        {"instructions": "Be brief", "input": "The with", "max_output_tokens": 8},
    ),
    "ai sdk, openai": (
        RESPONSES,
        {
            "input": [{"role": "system", "content": "Be brief."}, *IN_PARTS],
            "max_output_tokens": 60,
            "tools": [{"type": "function", **CLOCK}],
            "tool_choice": "required",
        },
    ),
    "ai sdk, openai, an object": (
        RESPONSES,
        {
            "input": IN_PARTS,
            "max_output_tokens": 40,
            "text": {
                "format": {
                    "type": "json_schema",
                    "strict": True,
                    "name": "response",
                    "schema": ANSWER,
                }
            },
        },
    ),
    "ai sdk, compatible": (
        CHATS,
        {
            "max_tokens": 40,
            "response_format": {"type": "json_object"},
            "messages": SAID,
        },
    ),
    "ai sdk, anthropic": (
        MESSAGES,
        {
            "max_tokens": 40,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": OF_SDK,
            "tools": [
                {"name": "json", "description": "Answers.", "input_schema": ANSWER}
            ],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
    "haystack": (
        CHATS,
        {
            "stream": False,
            "messages": SAID,
            "max_tokens": 60,
            "n": 1,
            "tool_choice": "required",
            "tools": [{"type": "function", "function": CLOCK}],
        },
    ),
    "mem0": (
        CHATS,
        {
            "messages": [{"role": "system", "content": "facts"}, *SAID],
            "max_tokens": 20,
            "response_format": {"type": "json_object"},
            "temperature": 0.1,
            "top_p": 0.1,
        },
    ),
    "deepeval": (CHATS, {"messages": SAID, "temperature": 0.0}),
    "ragas": (
        CHATS,
        {
            "messages": [{"role": "system", "content": "\n as json: {}\n"}, *SAID],
            "max_tokens": 30,
            "response_format": {"type": "json_object"},
            "temperature": 0.01,
            "top_p": 0.1,
        },
    ),
    "crewai": (
        CHATS,
        {
            "messages": [{"role": "system", "content": "You are R."}, *SAID],
            "max_tokens": 8,
        },
    ),
    "guidellm": (
        CHATS,
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 4,
            "ignore_eos": True,
            "messages": OF_SDK,
        },
    ),
}


@pytest.fixture
def send(address):
    """Function that posts a body and returns the status and the text."""
    import urllib.error
    import urllib.request

    def ask(path, body):
        data = json.dumps({"model": "pydoc", **body}).encode()
        try:
            with urllib.request.urlopen(f"{address}{path}", data=data) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return ask


LAST = {
    CHATS: "data: [DONE]",
    RESPONSES: "event: response.",
    MESSAGES: "event: message_",
}


@pytest.mark.parametrize("client", BODIES)
def test_a_recorded_request_is_answered(send, client):
    path, body = BODIES[client]
    status, reply = send(path, body)
    assert status == 200, reply
    if not body.get("stream"):
        assert json.loads(reply)["usage"]
        return
    *_, last = reply.strip().split("\n\n")
    assert last.startswith(LAST[path]), last
    assert "error" not in last.split("\n")[0] and "failed" not in last.split("\n")[0]


WRONG = [None, 3, -1, 1.5, "x", "", [], {}, [{}], [3], {"a": 1}, True, 10**40, [None]]
WRONG += [{"type": "function"}, {"type": 3}, [{"type": "text"}], [{"type": [1]}]]


def list_places(value, path=()):
    """Yield the paths of all values in a body."""
    if path:
        yield path
    keys = value if isinstance(value, dict) else ()
    keys = range(len(value)) if isinstance(value, list) else keys
    for key in keys:
        yield from list_places(value[key], (*path, key))


def test_mutated_bodies_are_answered_or_refused_with_a_message(send):
    """Values of another type, or none, at any path never crash the server."""
    chance = random.Random(5)
    found = collections.Counter()
    for _ in range(100):
        path, body = BODIES[chance.choice([*BODIES])]
        body = copy.deepcopy({**body, "stream": False})
        *place, last = chance.choice([*list_places(body)])
        holder = functools.reduce(lambda inner, key: inner[key], place, body)
        if chance.random() < 0.2:
            del holder[last]
        else:
            holder[last] = chance.choice(WRONG)
        if path != CHATS and chance.random() < 0.3:
            path += "/count_tokens" if path == MESSAGES else "/input_tokens"
        status, reply = send(path, body)
        found[status] += 1
        assert status in (200, 400, 404), (reply, path, body)
        assert status == 200 or json.loads(reply)["error"]["message"]
    assert found[200] > 20 and found[400] > 20
