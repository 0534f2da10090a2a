"""Supported and unsupported fields of request bodies.

No field is ignored silently: an unsupported field is refused by name, unless its value
has no effect (null, or a neutral value listed here).
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ..mistakes import Refused
from ..values import read_flag


class Refusal(NamedTuple):
    """The reason why a field is not supported."""

    reason: str
    neutral: tuple[Any, ...] = ()  # values without an effect


# Labels do not change the result. The first two name the client for fair scheduling
# (`Engine.submit(client=)`). Nothing is stored, and there is one `service_tier`.
LABELS = ("user", "safety_identifier", "prompt_cache_key", "service_tier")
# Prompts are always cached.
OBJECTS = ("metadata", "cache_control")

SERVED = {
    *("model", "max_tokens", "max_completion_tokens", "n", "seed", "stop", "logprobs"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("stop_token_ids", "ignore_eos", "priority", "timeout"),
    *("cache_salt", "cache_keep", "cache_keep_seconds"),
    *("add_special_tokens", "stream", "stream_options", *LABELS),
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice"),
    *("logit_bias", "min_tokens", "bad_words", "allowed_token_ids"),
    *("presence_penalty", "frequency_penalty", "store", *OBJECTS),
}
SERVED_OF_TEXTS = SERVED | {"prompt", "best_of", "echo"}
_OF_CALLS = ("tools", "tool_choice", "parallel_tool_calls")
SERVED_OF_CHATS = SERVED | {"messages", "top_logprobs", *_OF_CALLS}
SERVED_OF_CHATS |= {"chat_template_kwargs", "reasoning_effort"}

_OF_CHATS = "is supported for chat completions only"
_OLD = "is not supported: it is the deprecated form of tools and tool_choice"
_TEXT_ONLY = "is not supported: the model reads and writes text only"
_OF_THE_TEMPLATE = (
    "is not supported: the checkpoint's own chat template is used unchanged"
)
_AS_IT_IS = "is not supported: tokens are returned as strings"

_KEPT = "is not supported: the server decides how long prompts stay cached"
OF_CACHED_PROMPTS = {
    "prompt_cache_retention": Refusal(_KEPT, ("in_memory", "in-memory")),
    "prompt_cache_options": Refusal(_KEPT, ({},)),
}

REFUSED = {
    "logits_processors": Refusal(
        "is not supported: the server runs no client code", ([],)
    ),
    "guided_grammar": Refusal("is not supported; use guided_json or guided_regex"),
    "guided_decoding_backend": Refusal("is not supported: there is only one"),
    "guided_whitespace_pattern": Refusal(
        "is not supported: white space is set by the server"
    ),
    "tools": Refusal(_OF_CHATS, ([],)),
    "tool_choice": Refusal(_OF_CHATS, ("none", "auto")),
    "parallel_tool_calls": Refusal(_OF_CHATS, (True, False)),
    "functions": Refusal(_OLD, ([],)),
    "function_call": Refusal(_OLD, ("none", "auto")),
    # Not supported by the model or the decoding loop.
    "top_logprobs": Refusal(
        "is supported for chat completions only; here logprobs is a number", (0,)
    ),
    "prompt_logprobs": Refusal("is not supported; use echo with logprobs"),
    "suffix": Refusal("is not supported: prompts are continued, not infilled", ("",)),
    "use_beam_search": Refusal("is not supported; use best_of", (False,)),
    "length_penalty": Refusal("is not supported: it belongs to beam search", (1, 1.0)),
    "early_stopping": Refusal("is not supported: it belongs to beam search", (False,)),
    "truncate_prompt_tokens": Refusal(
        "is not supported: truncate the prompt before sending it"
    ),
    "prompt_embeds": Refusal("is not supported: send the prompt as text or token ids"),
    "modalities": Refusal(_TEXT_ONLY, (["text"],)),
    "audio": Refusal(_TEXT_ONLY),
    "mm_processor_kwargs": Refusal(_TEXT_ONLY),
    "prediction": Refusal(
        "is not supported: draft tokens come from the engine's own drafter"
    ),
    "reasoning_effort": Refusal(_OF_CHATS),
    "include_reasoning": Refusal(
        "is not supported: reasoning is always returned", (True,)
    ),
    "verbosity": Refusal("is not supported: ask for it in the messages", ("medium",)),
    "web_search_options": Refusal(
        "is not supported: the server does not search the web"
    ),
    "moderation": Refusal("is not supported: the server does not moderate"),
    # Rendering of messages.
    "chat_template": Refusal(_OF_THE_TEMPLATE),
    "chat_template_kwargs": Refusal(_OF_CHATS, ({},)),
    "documents": Refusal(_OF_THE_TEMPLATE, ([],)),
    "add_generation_prompt": Refusal(_OF_THE_TEMPLATE, (True,)),
    "continue_final_message": Refusal(_OF_THE_TEMPLATE, (False,)),
    "echo": Refusal("is not supported for chat completions", (False,)),
    "best_of": Refusal("is not supported for chat completions; use n", (1,)),
    # Format of the completion.
    "skip_special_tokens": Refusal(_AS_IT_IS, (True,)),
    "spaces_between_special_tokens": Refusal(_AS_IT_IS, (True,)),
    "return_tokens_as_token_ids": Refusal(_AS_IT_IS, (False,)),
    "return_token_ids": Refusal(_AS_IT_IS, (False,)),
    "include_stop_str_in_output": Refusal(
        "is not supported: stop strings are never returned", (False,)
    ),
    # Fields around a reply.
    **OF_CACHED_PROMPTS,
    "request_id": Refusal("is not supported: the server generates ids"),
    "kv_transfer_params": Refusal("is not supported: the server has one engine"),
    "vllm_xargs": Refusal("is not supported"),
}


def check_fields(body: Mapping[str, Any], *, is_chat: bool) -> None:
    """Refuse unsupported fields.

    Raises:
        Refused: for an unsupported field, with the reason.
    """
    served = SERVED_OF_CHATS if is_chat else SERVED_OF_TEXTS
    refuse_unserved(body, served, REFUSED)
    for name in LABELS:
        if not isinstance(body.get(name), str | None):
            raise Refused(f"{name} must be a string", name)
    for name in OBJECTS:
        if not isinstance(body.get(name), Mapping | None):
            raise Refused(f"{name} must be an object", name)
    read_flag(body, "store", False)


def refuse_unserved(
    body: Mapping[str, Any],
    served: Collection[str],
    refused: Mapping[str, Refusal],
) -> None:
    """Refuse unsupported fields, unless they are null or have a neutral value.

    Raises:
        Refused: for an unsupported field, with the reason.
    """
    for name, value in body.items():
        if value is None or name in served:
            continue
        refusal = refused.get(name)
        if refusal is None:
            raise Refused(
                f"{name[:60]!r} is not a field of this endpoint; omit it",
                name[:60],
                code="unknown_parameter",
            )
        if not _is_one_of(value, refusal.neutral):
            raise Refused(
                f"{name} {refusal.reason}; omit it",
                name,
                code="unsupported_parameter",
            )


def check_texts(body: Mapping[str, Any]) -> None:
    """Refuse lone surrogates, which JSON can express but are not valid text.

    Raises:
        Refused: for a field with a lone surrogate.
    """
    for name, value in body.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Refused(
                f"{name[:60]} has half of a surrogate pair, which is not valid text",
                name[:60],
            ) from error


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """True if `value` is one of `values`: 1.0 equals 1, but 0 does not equal False."""
    return any(
        isinstance(value, bool) == isinstance(each, bool) and value == each
        for each in values
    )
