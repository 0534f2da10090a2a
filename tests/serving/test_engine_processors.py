"""Logits processors of an engine: variants by request, and replaced arrays."""

import jax
import numpy as np
import pytest
from support.decoding.plain_queue import VOCABULARY
from support.grammar.automata import make_automata
from support.serving.small_engines import (
    assert_alone,
    assert_released,
    come_and_go,
    draw_request,
    make_engine,
)

from jkv.decoding import FinishReason, PromptLookup
from jkv.serving import EngineError, RequestRefused
from jkv.serving.device.programs import exchange, run_window

pytestmark = pytest.mark.one_end


@pytest.mark.further
def test_processed_requests_equal_their_solo_runs():
    """Requests use prompt lookup, cancellation, refills, and replaced processors."""
    rng = np.random.default_rng(6)
    automata, reasons = make_automata(0, 3, VOCABULARY), set()
    lookup = PromptLookup(num_tokens=2, min_ngram=1, cost=1.0)
    engine = make_engine(nan_every=17, logits_processor=automata, speculate=lookup)
    num_traces = None
    for seed in range(3):
        automata = make_automata(seed, 3, VOCABULARY)
        engine.replace_logits_processor(automata)
        left = [
            draw_request(rng, variant=int(rng.integers(-1, 3)), timeout=None)
            for _ in range(15)
        ]
        requests, _, _ = come_and_go(engine, rng, left)
        for number, request in requests.items():
            found = engine.results(number)
            assert_alone(found, request, nan_every=17, automata=automata)
            reasons |= {each.reason for each in found}
        # The programs of the first arrays are reused.
        traces = exchange._cache_size(), run_window._cache_size()
        assert num_traces in (None, traces)
        num_traces = traces
    # NaN logits and fully masked logits have different finish reasons.
    expected = "STOP", "NOTHING_ALLOWED", "NAN_LOGITS"
    assert {FinishReason[name] for name in expected} <= reasons
    assert_released(engine)


def test_invalid_variants_and_processors_are_refused():
    engine = make_engine(logits_processor=make_automata(0, 3, VOCABULARY))
    for variant in (3, -2):
        with pytest.raises(RequestRefused, match=r"-1 \(none\) or below 3"):
            engine.submit([1], variant=variant)
    with pytest.raises(RequestRefused, match="must be an int"):
        engine.submit([1], variant=0.5)
    with pytest.raises(RequestRefused, match=r"-1 \(none\) or below 0"):
        make_engine().submit([1], variant=0)
    with pytest.raises(EngineError, match="must have the engine's type, shapes"):
        engine.replace_logits_processor(make_automata(0, 2, VOCABULARY))
    with pytest.raises(ValueError, match="must be a jkv.LogitsProcessor"):
        make_engine(logits_processor=jax.numpy.zeros(3))
