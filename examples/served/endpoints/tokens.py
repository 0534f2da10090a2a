"""Endpoints of the tokenizer: `/tokenize` and `/detokenize`."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..asking.fields import refuse_unserved
from ..asking.prompts import read_chat, read_prompts
from ..asking.showing import check_model, read_json
from ..asking.tools import read_tools
from ..loading import Served
from ..mistakes import Refused
from ..values import is_tokens, read_flag
from .connections import Bounds
from .gate import read_bytes, respond

# Field names as in vLLM, the origin of these endpoints.
OF_TEXTS = {"model", "prompt", "add_special_tokens", "return_token_strs"}
OF_CHATS = {"model", "messages", "tools", "add_special_tokens", "return_token_strs"}
OF_CHATS |= {"chat_template_kwargs", "add_generation_prompt"}
OF_TOKENS = {"model", "tokens"}


def list_token_routes(served: Served, bounds: Bounds) -> list[Route]:
    """Return the routes of the tokenizer."""

    def route(path: str, find: Callable[[Served, Mapping[str, Any]], Any]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                body = await read_bytes(request, bounds)
                found = await asyncio.to_thread(lambda: find(served, read_json(body)))
                return JSONResponse(found)
            except Refused as error:
                return respond(error)
            except (ValueError, RecursionError) as error:
                return respond(Refused(str(error)))
            except ClientDisconnect:
                return Response(status_code=400)

        return Route(path, endpoint, methods=["POST"])

    return [route("/tokenize", tokenize), route("/detokenize", detokenize)]


def tokenize(served: Served, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of a prompt, or of messages in the checkpoint's template."""
    is_chat = "messages" in body
    _check(served, body, OF_CHATS if is_chat else OF_TEXTS)
    if is_chat:
        if not read_flag(body, "add_generation_prompt", True):
            raise Refused(
                "the template always adds a generation prompt; omit it",
                "add_generation_prompt",
            )
        tools = read_tools(body, served.tool_tags)
        (tokens,) = read_chat(served, body, [] if tools is None else tools.listed)
    else:
        if not isinstance(body.get("prompt"), str):
            raise Refused("prompt must be a string", "prompt")
        (tokens,) = read_prompts(served, body)
    texts = None
    if read_flag(body, "return_token_strs", False):
        texts = [served.tokenizer.id_to_token(token) for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": served.context,
        "tokens": tokens,
        "token_strs": texts,
    }


def detokenize(served: Served, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text of token ids."""
    _check(served, body, OF_TOKENS)
    tokens = body.get("tokens")
    if tokens != [] and not is_tokens(tokens):
        raise Refused("tokens must be a list of token ids", "tokens")
    for token in tokens:
        if not 0 <= token < served.vocabulary_size:
            raise Refused(f"tokens: {str(token)[:60]} is not a token id", "tokens")
    return {"prompt": served.tokenizer.decode(tokens, skip_special_tokens=False)}


def _check(served: Served, body: Mapping[str, Any], known: set[str]) -> None:
    refuse_unserved(body, known, {})
    check_model(served, body.get("model"))
