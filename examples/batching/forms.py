"""The two formats of a line: a body with an "id", and that of OpenAI's Batch API.

    {"id": 7, "prompt": "The with statement"}
    {"custom_id": "7", "method": "POST", "url": "/v1/completions", "body": {...}}

A result has the format of its line.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from served.mistakes import Refused
from served.replying.kinds import KINDS, Kind

from jkv.serving import Completion

from .lines import digest, name_of, read_line

OF_BATCHES = {"custom_id", "method", "url", "body"}


class Form(NamedTuple):
    """A line's request and the format of its result."""

    kind: Kind
    body: Mapping[str, Any]
    name: str | None = None  # custom_id in OpenAI's format

    @property
    def fields(self) -> Mapping[str, Any]:
        """The body as fields of a completion or chat."""
        return self.kind.read(self.body)


def read_form(line: str) -> Form:
    """Parse the request of a line.

    Raises:
        ValueError: if the line is not an object or has unsupported fields.
    """
    body = read_line(line)
    if not OF_BATCHES - {"method"} & body.keys():
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        fields = {name: value for name, value in body.items() if name != "id"}
        return Form(KINDS[path], fields)
    name, url, fields = body.get("custom_id"), body.get("url"), body.get("body")
    if not isinstance(name, str) or not isinstance(fields, Mapping):
        raise Refused("a line must have a custom_id, a string, and a body, an object")
    is_known = isinstance(url, str) and url in KINDS
    if body.get("method", "POST") != "POST" or not is_known:
        raise Refused(
            f"a line must have the method POST and one of the urls {', '.join(KINDS)}",
            "url",
        )
    if unknown := body.keys() - OF_BATCHES:
        raise Refused(f"{min(unknown)[:60]!r} is not a field of a line; omit it")
    return Form(KINDS[url], fields, name)


def write_error(line: str, error: Exception) -> dict[str, Any]:
    """Return the result of a failed line."""
    words = str(error) or repr(error)
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not given.keys() & OF_BATCHES:
        return name_of(line) | {"error": words}
    refused = error if isinstance(error, Refused) else Refused(words)
    described = {
        "code": refused.code or refused.body["error"]["type"],
        "message": words,
    }
    answer = {"status_code": refused.status, "request_id": digest(line)}
    body = KINDS.get(str(given.get("url")), KINDS["/v1/completions"])
    answer["body"] = body.write_error(body.rename(refused))
    return _frame(line, given.get("custom_id"), answer, described)


def write_answer(
    line: str, form: Form, found: list[Completion], whole: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the result of a line.

    Args:
        line: the line as it is in the file.
        form: its parsed form.
        found: the completion of each choice.
        whole: the reply in the API's format.
    """
    if form.name is not None:
        answer = {"status_code": 200, "request_id": digest(line), "body": whole}
        return _frame(line, form.name, answer, None)
    choices = [
        {
            "index": index,
            "text": each.text,
            "num_tokens": len(each.tokens),
            "logprob": round(sum(each.logprobs), 4),
            "finish_reason": each.reason.name.lower(),
        }
        for index, each in enumerate(found)
    ]
    for choice, reported in zip(choices, whole.get("choices", ()), strict=False):
        choice["text"] = reported.get("text", choice["text"])  # after the echo
        if reported["logprobs"] is not None:
            choice["logprobs"] = reported["logprobs"]
    return name_of(line) | {"choices": choices}


def _frame(line: str, name: Any, answer: Any, error: Any) -> dict[str, Any]:
    return {
        "id": f"batch_req_{digest(line)}",
        "custom_id": name,
        "response": answer,
        "error": error,
    }
