"""The fields of the API's bodies: the served ones, and the reasons against others.

No field is ignored: one that is not served is refused by its name, unless its value has
no effect (null, or a value listed behind the reason here).
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ..mistakes import Refused
from ..values import read_flag


class Refusal(NamedTuple):
    """Why a field is not served."""

    reason: str
    neutral: tuple[Any, ...] = ()  # values that ask for nothing


# `user` and the two beside it name a client for the API's owner. No text depends on
# them, and the first two name the client for fair turns (`Engine.submit(client=)`).
# Nothing is stored, with `metadata` or without, and there is one `service_tier`.
LABELS = ("user", "safety_identifier", "prompt_cache_key", "service_tier")
# Prompts are cached in any case.
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

_OF_CHATS = "is not served of texts; of chats it is"
_OLD = "is not served: it is the old name of tools and tool_choice"
_TEXT_ONLY = "is not served: the model reads and writes text"
_OF_THE_TEMPLATE = "is not served: the checkpoint's own template is used as it is"
_AS_IT_IS = "is not served: tokens are told as texts"

_KEPT = "is not served: prompts are kept while they may"
OF_CACHED_PROMPTS = {
    "prompt_cache_retention": Refusal(_KEPT, ("in_memory", "in-memory")),
    "prompt_cache_options": Refusal(_KEPT, ({},)),
}

REFUSED = {
    "logits_processors": Refusal("is not served: no code of clients runs here", ([],)),
    "guided_grammar": Refusal("is not served; guided_json and guided_regex are"),
    "guided_decoding_backend": Refusal("is not served: there is one"),
    "guided_whitespace_pattern": Refusal("is not served: white space is as told"),
    "tools": Refusal(_OF_CHATS, ([],)),
    "tool_choice": Refusal(_OF_CHATS, ("none", "auto")),
    "parallel_tool_calls": Refusal(_OF_CHATS, (True, False)),
    "functions": Refusal(_OLD, ([],)),
    "function_call": Refusal(_OLD, ("none", "auto")),
    # Not supported by the model or the loop.
    "top_logprobs": Refusal("is of chats; of texts logprobs is a number", (0,)),
    "prompt_logprobs": Refusal("is not served; echo with logprobs is"),
    "suffix": Refusal("is not served: texts are continued, not filled in", ("",)),
    "use_beam_search": Refusal("is not served; best_of is", (False,)),
    "length_penalty": Refusal("is not served: it is of beam search", (1, 1.0)),
    "early_stopping": Refusal("is not served: it is of beam search", (False,)),
    "truncate_prompt_tokens": Refusal("is not served: cut the prompt before"),
    "prompt_embeds": Refusal("is not served: give the prompt as text or token ids"),
    "modalities": Refusal(_TEXT_ONLY, (["text"],)),
    "audio": Refusal(_TEXT_ONLY),
    "mm_processor_kwargs": Refusal(_TEXT_ONLY),
    "prediction": Refusal("is not served: the engine drafts by itself or not at all"),
    "reasoning_effort": Refusal(_OF_CHATS),
    "include_reasoning": Refusal("is not served: a text is told whole", (True,)),
    "verbosity": Refusal("is not served: ask for it in the messages", ("medium",)),
    "web_search_options": Refusal("is not served: nothing is searched"),
    "moderation": Refusal("is not served: nothing is moderated"),
    # How a prompt is made of messages.
    "chat_template": Refusal(_OF_THE_TEMPLATE),
    "chat_template_kwargs": Refusal(_OF_CHATS, ({},)),
    "documents": Refusal(_OF_THE_TEMPLATE, ([],)),
    "add_generation_prompt": Refusal(_OF_THE_TEMPLATE, (True,)),
    "continue_final_message": Refusal(_OF_THE_TEMPLATE, (False,)),
    "echo": Refusal("is not served of chats", (False,)),
    "best_of": Refusal("is not served of chats; n is", (1,)),
    # How a text is shown.
    "skip_special_tokens": Refusal(_AS_IT_IS, (True,)),
    "spaces_between_special_tokens": Refusal(_AS_IT_IS, (True,)),
    "return_tokens_as_token_ids": Refusal(_AS_IT_IS, (False,)),
    "return_token_ids": Refusal(_AS_IT_IS, (False,)),
    "include_stop_str_in_output": Refusal(
        "is not served: a text ends before its stop", (False,)
    ),
    # Fields around a reply.
    **OF_CACHED_PROMPTS,
    "request_id": Refusal("is not served: ids are made here"),
    "kv_transfer_params": Refusal("is not served: there is one engine"),
    "vllm_xargs": Refusal("is not served"),
}


def check_fields(body: Mapping[str, Any], *, is_chat: bool) -> None:
    """Refuse fields that are not served.

    Raises:
        Refused: with the field's name, and why.
    """
    served = SERVED_OF_CHATS if is_chat else SERVED_OF_TEXTS
    refuse_unserved(body, served, REFUSED)
    for name in LABELS:
        if not isinstance(body.get(name), str | None):
            raise Refused(f"{name} must be a text", name)
    for name in OBJECTS:
        if not isinstance(body.get(name), Mapping | None):
            raise Refused(f"{name} must be an object", name)
    read_flag(body, "store", False)


def refuse_unserved(
    body: Mapping[str, Any],
    served: Collection[str],
    refused: Mapping[str, Refusal],
) -> None:
    """Refuse fields that are not served, unless they are null or ask for nothing.

    Raises:
        Refused: with the field's name, and why.
    """
    for name, value in body.items():
        if value is None or name in served:
            continue
        refusal = refused.get(name)
        if refusal is None:
            raise Refused(
                f"{name[:60]!r} is no field of this endpoint; leave it out",
                name[:60],
                code="unknown_parameter",
            )
        if not _is_one_of(value, refusal.neutral):
            raise Refused(
                f"{name} {refusal.reason}; leave it out",
                name,
                code="unsupported_parameter",
            )


def check_texts(body: Mapping[str, Any]) -> None:
    """Refuse halves of surrogate pairs: they are no text, though JSON can write them.

    Raises:
        Refused: with the field's name.
    """
    for name, value in body.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Refused(
                f"{name[:60]} has half of a surrogate pair, which is no text", name[:60]
            ) from error


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """True if a value is one of these: 1.0 is 1, and 0 is not False."""
    return any(
        isinstance(value, bool) == isinstance(each, bool) and value == each
        for each in values
    )
