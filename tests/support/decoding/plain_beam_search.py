"""Beam search in plain Python over whole sequences, after transformers' documentation.

One prompt at a time, lists and sorts; `next_logprobs(tokens)` is the model.
"""

import math


def search(
    next_logprobs,
    prompt,
    *,
    num_beams,
    max_new_tokens,
    stop_tokens=(),
    length_penalty=1.0,
    early_stopping=False,
    has_ended=None,
    num_end_tokens=0,
):
    """Return the best finished beams, [(score, new tokens)], best first.

    Beams also finish if `has_ended(new tokens)` returns True, by one of
    `num_end_tokens` tokens. A beam with a log-probability of -inf is dropped.
    """
    running, ended = [(0.0, [])], []
    num_candidates = max(2, 1 + len(stop_tokens) + num_end_tokens) * num_beams

    def is_over(tokens):
        return tokens[-1] in stop_tokens or (has_ended and has_ended(tokens))

    for length in range(1, max_new_tokens + 1):
        grown = [
            (total + float(logprob), [*tokens, token])
            for total, tokens in running
            for token, logprob in enumerate(next_logprobs([*prompt, *tokens]))
            if logprob > -math.inf
        ]
        grown = sorted(grown, key=lambda one: -one[0])[:num_candidates]
        is_last = length == max_new_tokens
        ended += [
            (total / length**length_penalty, tokens)
            for total, tokens in grown[:num_beams]
            if is_last or is_over(tokens)
        ]
        ended = sorted(ended, key=lambda one: -one[0])[:num_beams]
        running = [one for one in grown if not is_over(one[1])][:num_beams]
        is_full = len(ended) == num_beams
        if is_full and early_stopping is True:
            break
        longest = max_new_tokens if length_penalty > 0 else length
        hoped = longest if early_stopping == "never" else length
        worst = ended[-1][0] if is_full else -math.inf
        if is_last or not running or running[0][0] / hoped**length_penalty <= worst:
            break
    return ended
