"""Programs compiled at an engine's start: a few copies of the model, none later."""

import collections

import jax
import numpy as np
import pytest
from support.grammar.automata import make_automata
from support.models.windowed_model import EMBEDDING, SIZES, VOCABULARY, make_model

import jkv
from jkv.decoding import DraftModel, PromptLookup
from jkv.serving import Engine

pytestmark = pytest.mark.one_end

MOST_PROMPT_TOKENS = 8192
WINDOWS = {"one pool": [None], "three": [8, None, 32]}
# Decode steps, the step sizes with prompts, and the verification step sizes.
MOST_COPIES = 6


def make_config(windows, max_running):
    config = SIZES | dict(
        num_blocks=1024,
        block_size=16,
        max_context_length=MOST_PROMPT_TOKENS + 32,
        max_sequences=max_running,
    )
    groups = [
        jkv.CacheConfig(**config, **({} if w is None else {"sliding_window": w}))
        for w in windows
    ]
    layers = tuple(range(len(groups)))
    return jkv.GroupedConfig(groups=tuple(groups), layer_groups=layers)


class CountedModel:
    """A model that counts its traces by the rows of the step."""

    def __init__(self, windows):
        self.num_traces = collections.Counter()
        self._model = make_model(windows)

    def __call__(self, params, tokens, cache, batch, *, all_rows=False):
        self.num_traces[len(tokens)] += 1
        return self._model(params, tokens, cache, batch, all_rows=all_rows)


def make_engine(max_running=64, windows="one pool", **options):
    """Return an engine with default step sizes for long prompts, and its model."""
    model = CountedModel(WINDOWS[windows])
    config = make_config(WINDOWS[windows], max_running)
    if (draft := options.get("speculate")) is not None:
        config = jkv.with_drafter(config, draft)
    cache = jkv.init(config)
    engine = Engine(
        model,
        EMBEDDING,
        cache,
        max_running=max_running,
        max_new_tokens=16,
        max_prompt_tokens=MOST_PROMPT_TOKENS,
        **options,
    )
    return engine, model


def shape_beginning(engine):
    """Return the loop and the shapes of its first state."""
    loop = engine._scheduler.loop
    return loop, loop._begin.find_shapes(**loop._beginning)


@pytest.mark.parametrize("kind", ["plain", "windows", "grammar, lookup", "draft"])
def test_an_engine_compiles_few_copies_of_the_model(kind):
    """One per step size and verification size, for any prompt lengths."""
    draft, options = None, {}
    if kind == "draft":
        draft = CountedModel([None])
        options["speculate"] = DraftModel(
            model=draft, params=EMBEDDING, config=make_config([None], 64), num_tokens=3
        )
    if kind == "windows":
        options["windows"] = "three"
    if kind == "grammar, lookup":
        options["logits_processor"] = make_automata(0, 2, VOCABULARY)
        options["speculate"] = PromptLookup(num_tokens=3)
    engine, model = make_engine(**options)
    loop, (state, sampling) = shape_beginning(engine)
    model.num_traces.clear()
    if draft is not None:
        draft.num_traces.clear()
    loop._run_window.find_shapes(
        given=loop._given,
        cache=loop.cache,
        state=state,
        sampling=sampling,
        num_steps=np.int32(1),
    )
    rows = {64: 1, 128: 1, 256: 1, 512: 1}  # decode steps, and steps with prompt tokens
    checked = model.num_traces - collections.Counter(rows)
    assert model.num_traces & collections.Counter(rows) == rows
    assert (not checked) == ("speculate" not in options) and checked.total() <= 2
    assert model.num_traces.total() <= MOST_COPIES
    if draft is not None:
        assert 1 <= draft.num_traces.total() <= MOST_COPIES + 2


def test_compiling_the_first_state_folds_no_constants():
    """No constant has the size of the prompts: XLA took half a minute to fold them."""
    engine, _ = make_engine(max_running=4)
    loop, _ = shape_beginning(engine)
    begin = loop._begin
    lowered = begin._program.lower(**begin._static, **loop._beginning)
    (line,) = [x for x in lowered.as_text().splitlines() if "optimization_barrier" in x]
    assert f"tensor<8x{MOST_PROMPT_TOKENS}xi32>" in line


@pytest.mark.further
def test_prompts_of_any_length_compile_nothing():
    """After `warm_up`, neither the engine nor JAX nor the model compiles a program."""
    engine, model = make_engine(max_running=4)
    engine.warm_up()
    compiled = []

    def listen(event, _, **details):
        if event.endswith("backend_compile_duration"):
            compiled.append(details)

    model.num_traces.clear()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        random = np.random.default_rng(0)
        lengths = [1, 2, 15, 16, 17, 100, 511, 512, 513, 1000, 4097, 8192, 33, 5]
        for length in lengths:
            prompt = random.integers(0, VOCABULARY, length).tolist()
            engine.submit(prompt, max_new_tokens=int(random.integers(1, 8)))
            engine.step()
        while engine.step():
            pass
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert engine.stats().finished == len(lengths)
    assert not compiled and not model.num_traces
