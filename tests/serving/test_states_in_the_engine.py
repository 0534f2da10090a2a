"""The engine over a model of which some layers keep a state."""

import pytest
from support.folding_model import continue_text, make_config, model

import jkv
from jkv.decoding import PromptLookup
from jkv.serving import Engine

pytestmark = [pytest.mark.one_end, pytest.mark.further]

SHARED = [3, 1, 4, 1, 0, 2, 2, 1, 4, 3, 0, 3]


@pytest.mark.parametrize("kind", ["full", "alone"])
def test_requests_come_and_go(kind):
    """Samples, priorities, a cancelled request, guesses and hits: texts are the fold's.

    A prompt that begins like an earlier one goes on from a snapshot.
    """
    options = dict(
        max_running=3,
        max_new_tokens=9,
        max_prompt_tokens=24,
        max_samples=2,
        num_steps=3,
        row_counts=(16,),
        checks=True,
        speculate=PromptLookup(num_tokens=3, cost=1.0),
    )
    cache = jkv.init(make_config(kind, pending=3))
    prompts = [[*SHARED, n, 4 - n, n] for n in range(4)] + [[2, 1]]
    with Engine(model, None, cache, **options) as engine:
        wanted = continue_text(prompts[0], 9)
        for sample in engine.results(engine.submit(prompts[0], n=2)):
            assert sample.tokens == wanted
        numbers = [
            engine.submit(prompt, priority=-i) for i, prompt in enumerate(prompts)
        ]
        engine.cancel(engine.submit(prompts[1]))
        for number, prompt in zip(numbers, prompts, strict=True):
            (sample,) = engine.results(number)
            assert sample.tokens == continue_text(prompt, 9)
        stats = engine.stats()
    assert stats.cached_tokens > 0 and stats.accepted_tokens > 0
