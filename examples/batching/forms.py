"""The two forms of a line: a body with an "id", and OpenAI's with a "custom_id".

    {"id": 7, "prompt": "The with statement"}
    {"custom_id": "7", "method": "POST", "url": "/v1/completions", "body": {...}}

A result has the form of its line.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from served.mistakes import Refused
from served.replying.kinds import KINDS, Kind
from served.replying.replies import check_reason

from jkv.serving import Completion

from .lines import digest, name_of, read_line

OF_BATCHES = {"custom_id", "method", "url", "body"}


class Form(NamedTuple):
    """A line's request, and the form of its result."""

    kind: Kind
    body: Mapping[str, Any]
    name: str | None = None  # the custom_id of OpenAI's form

    @property
    def fields(self) -> Mapping[str, Any]:
        """The body in the words of completions and chats."""
        return self.kind.read(self.body)


def read_form(line: str) -> Form:
    """Return the request of a line.

    Raises:
        ValueError: for a line that is no object, or has fields not served of batches.
    """
    body = read_line(line)
    if not OF_BATCHES - {"method"} & body.keys():
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        fields = {name: value for name, value in body.items() if name != "id"}
        return Form(KINDS[path], fields)
    name, url, fields = body.get("custom_id"), body.get("url"), body.get("body")
    if not isinstance(name, str) or not isinstance(fields, Mapping):
        raise Refused("a line has a custom_id, a text, and a body, an object")
    if body.get("method", "POST") != "POST" or url not in KINDS:
        raise Refused(
            f"a line has the method POST and one of the urls {', '.join(KINDS)}", "url"
        )
    if unknown := body.keys() - OF_BATCHES:
        raise Refused(f"{min(unknown)[:60]!r} is no field of a line; leave it out")
    return Form(KINDS[url], fields, name)


def write_error(line: str, error: Exception) -> dict[str, Any]:
    """Return the result of a line that is not answered."""
    words = str(error) or repr(error)
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not given.keys() & OF_BATCHES:
        return name_of(line) | {"error": words}
    refused = error if isinstance(error, Refused) else Refused(words)
    told = {"code": refused.code or refused.body["error"]["type"], "message": words}
    answer = {"status_code": refused.status, "request_id": digest(line)}
    body = KINDS.get(str(given.get("url")), KINDS["/v1/completions"])
    answer["body"] = body.write_error(body.rename(refused))
    return _frame(line, given.get("custom_id"), answer, told)


def write_answer(
    line: str, form: Form, found: list[Completion], whole: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the result of a line.

    Args:
        line: as it is in the file.
        form: of the line.
        found: the completion of each choice.
        whole: the reply, as a client would have it.

    Raises:
        Refused: for a text that neither its model nor its limit ended.
    """
    if form.name is not None:
        for each in found:
            check_reason(each.reason)
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
    for choice, told in zip(choices, whole.get("choices", ()), strict=False):
        choice["text"] = told.get("text", choice["text"])  # behind the echo
        if told["logprobs"] is not None:
            choice["logprobs"] = told["logprobs"]
    return name_of(line) | {"choices": choices}


def _frame(line: str, name: Any, answer: Any, error: Any) -> dict[str, Any]:
    return {
        "id": f"batch_req_{digest(line)}",
        "custom_id": name,
        "response": answer,
        "error": error,
    }
