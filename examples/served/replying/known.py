"""Results of requests that need no engine."""

from collections.abc import Sequence

from jkv import FinishReason
from jkv.serving import Event, TextStream

from ..asking.showing import ParsedBody
from ..loading import Served
from .scoring import Scored


def answer_known(
    served: Served, parsed: ParsedBody, scored: Sequence[Scored]
) -> list[tuple[int, Event]] | None:
    """Return results without the engine; None if it is needed.

    This applies to requests with zero new tokens, and to a single greedy token if the
    prompt is scored.
    """
    request = parsed.request
    if request.max_new_tokens == 0:
        end = FinishReason.LENGTH
        events = [Event(-1, 0, [], [], "", end)] * (len(parsed.prompts) * request.n)
        return list(enumerate(events))
    sampling = request.sampling
    is_greedy = sampling.temperature == 0 and sampling.repetition_penalty == 1
    is_free = (
        parsed.language is None and parsed.rules is None and not request.stop_strings
    )
    if not scored or request.max_new_tokens != 1 or not is_greedy or not is_free:
        return None
    events = []
    for prompt, scores in zip(parsed.prompts, scored, strict=True):
        ((token, logprob),) = scores.list_top(len(prompt), 1)
        stream = TextStream(served.tokenizer.decode, prompt, ())
        stream.advance([token], has_ended=True)
        is_end = token in tuple(request.stop_tokens or ())
        reason = FinishReason.STOP if is_end else FinishReason.LENGTH
        event = Event(-1, 0, [token], [logprob], stream.text, reason)
        events += [event] * request.n
    return list(enumerate(events))
