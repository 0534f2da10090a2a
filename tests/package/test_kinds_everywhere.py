"""Every public class, method and function reports values of a wrong type.

`test_wrong_kinds.py` covers the functions of `jkv` itself. A name missing from the
tables here fails: a new one needs a valid call.
"""

import functools
import importlib
import inspect
import typing

import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import with_further
from support.serving.small_engines import make_engine, pool
from support.small_caches import copied, opened, small_cache, small_config
from test_wrong_kinds import EXPECTED, WRONG, count_on

import jkv
from jkv.arguments import fits

pytestmark = pytest.mark.one_end
PACKAGES = (
    "jkv",
    "decoding",
    "serving",
    "grammar",
    "logits_processors",
    "trees",
    "recurrence",
)
# Returned values, protocols and exceptions, which users do not create or call.
RETURNED = {
    *(
        "Drafter",
        "DraftStep",
        "Step",
        "Allocation",
        "Batch",
        "BeamSearch",
        "BeamStatistics",
        "BlockGroup",
        "BlockInfo",
    ),
    *("BlockStorage", "Cache", "Completion", "EngineStats", "Event", "ExactDifference"),
    *("ExactReport", "FinishReason", "Fork", "FormatAccuracy", "Fragmentation"),
    *("Generation", "GenerationState", "Grammar", "GroupStats", "MemoryProfile"),
    *("Metadata", "Model", "Pending", "PrefixIndex", "RequestStatus", "Ring", "Rows"),
    *("Sequences", "Slots", "Spilled", "StateStorage", "States", "Statistics"),
    *("Stats", "Status", "LogitsProcessor", "SwapIn", "Swapped", "Times", "TreeParts"),
    *("TreeRecord",),
}
# Functions that run long, or take results of a run; `jkv` has its own test.
ELSEWHERE = {
    *("beam_search", "check_exact", "extend", "generate", "measure_formats", "score"),
    *("note_allocate", "note_extend", "note_fed", "note_fork", "note_generate"),
    *("note_given", "replay", "read_ahead", "fold_rows", "fold_alike", "trace_output"),
}
# Their fields are not validated; `append` validates masks.
NAMED_TUPLES = {"GroupLayer", "GroupedConfig", "PageTable"}
NAMED_TUPLES |= {"CausalMask", "MixedMask", "SpanMask", "TreeMask"}
# Methods of a mesh of processes, of event loops, or of a run's results.
METHODS_ELSEWHERE = {
    *("Engine.aevents", "Engine.astream", "Engine.follow", "Engine.resume"),
    *(
        "Engine.replace_logits_processor",
        "BlockStore.belong",
        "Catalog.add",
        "Catalog.remove",
    ),
}


@functools.cache
def made():
    """Return values that valid calls need."""
    cache = small_cache()
    empty = np.full((2, 3), -1, np.int32)
    state = jkv.decoding.begin(count_on, None, cache, empty, max_new_tokens=2)
    tokens = [bytes([byte]) for byte in b'ab{}[]":,0'] + [None]
    vocabulary = jkv.grammar.Vocabulary(tokens, [10])
    bias = jkv.logits_processors.TokenBias(np.array([1]), np.array([1.0], np.float32))
    return dict(
        cache=cache,
        state=state,
        vocabulary=vocabulary,
        grammar=jkv.grammar.from_choices(["a"], vocabulary),
        bias=bias,
        tree=jkv.TrajectoryTree.of([[1, 2], [3]]),
        store=jkv.BlockStore(2**10),
    )


@functools.cache
def engine_and_request():
    engine = make_engine(cache=copied(pool()))
    number = engine.submit([5, 3], max_new_tokens=1)
    engine.results(number)
    return engine, number


def of_engine(name, *args, **options):
    return lambda: (getattr(engine_and_request()[0], name), args, options)


def of_request(name):
    return lambda: (
        getattr(engine_and_request()[0], name),
        engine_and_request()[1:],
        {},
    )


def of_store(name, *args):
    return lambda: (getattr(made()["store"], name), args, {})


def call(function, *args, **options):
    return lambda: (function, args, options)


def late(function, *names, **options):
    """Return a call with values of `made`, or with the given values."""

    def make():
        args = [made()[n] if isinstance(n, str) and n in made() else n for n in names]
        return function, args, options

    return make


def spilled():
    return jkv.spill(opened(3, prefix_caching=True), 1)[1]


def generation():
    """Return the result of one prompt."""
    cache, prompts = made()["cache"], [[1, 2]]
    return jkv.generate(count_on, None, cache, prompts, max_new_tokens=2)[1]


class Spelling:
    """A tokenizer of two tokens."""

    def get_vocab(self, with_added_tokens=True):
        del with_added_tokens
        return {"a": 0, "b": 1}

    def to_str(self):
        return '{"decoder": {"type": "ByteLevel"}, "added_tokens": []}'


GRAMMAR, DECODING, PROCESSORS = jkv.grammar, jkv.decoding, jkv.logits_processors
SCHEMA = {"type": "object"}
TOOL = {"name": "f", "parameters": SCHEMA}
GOOD = {
    "BlockStore": call(jkv.BlockStore, 100),
    "BlockStore.put": lambda: (
        made()["store"].put,
        [jkv.spill(opened(3, prefix_caching=True), 1)[1]],
        {},
    ),
    "BlockStore.find": of_store("find", [1, 2]),
    "BlockStore.count": of_store("count", [1, 2]),
    "BlockStore.discard": of_store("discard", [1, 2]),
    "BlockStore.clear": of_store("clear"),
    "BlockStore.begin_version": of_store("begin_version", "1"),
    "BlockStore.forget": of_store("forget", "2"),
    "BlockStore.rename": of_store("rename", "2", "3"),
    "CacheConfig": call(
        jkv.CacheConfig,
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        num_blocks=2,
        max_sequences=1,
        max_context_length=4,
    ),
    "StateConfig": call(
        jkv.StateConfig,
        num_layers=1,
        arrays={"h": ((2,), jnp.float32)},
        max_sequences=2,
        max_context_length=8,
    ),
    "Sampling": call(jkv.Sampling),
    "Roll": call(jkv.Roll, 4, 4),
    "PromptLookup": call(jkv.PromptLookup, num_tokens=2),
    "DraftModel": lambda: (
        jkv.DraftModel,
        [],
        dict(model=count_on, params=None, config=small_config(), num_tokens=2),
    ),
    "TrajectoryTree.of": call(jkv.TrajectoryTree.of, [[1], [2]]),
    "Prompts.of": call(DECODING.Prompts.of, [[1], [2]]),
    "GenerationConfig": call(DECODING.GenerationConfig, 3),
    "DecodingOptions": call(DECODING.DecodingOptions),
    "add_prompts": late(DECODING.add_prompts, "cache", "state", [1], [[1, 2, -1]]),
    "begin": late(DECODING.begin, count_on, None, "cache", [[1]], max_new_tokens=2),
    "prefill": late(DECODING.prefill, count_on, None, "cache", [[1]], max_new_tokens=2),
    "decode": late(DECODING.decode, count_on, None, "cache", "state"),
    "cancel": late(DECODING.cancel, "cache", "state", np.array([True, False])),
    "preempt": late(DECODING.preempt, "cache", "state"),
    "filter_logits": call(DECODING.filter_logits, jnp.ones((1, 4)), jkv.Sampling()),
    "sample": call(DECODING.sample, jnp.ones((1, 4)), jkv.Sampling()),
    "spread_row_counts": call(DECODING.spread_row_counts, 4, 16),
    "spread_seeds": call(DECODING.spread_seeds, 3, 2),
    "Engine": lambda: (
        jkv.serving.Engine,
        [count_on, None, small_cache(prefix_caching=True)],
        dict(max_running=1, max_new_tokens=2),
    ),
    "Engine.submit": of_engine("submit", [5, 3], max_new_tokens=1),
    "Engine.generate": of_engine("generate", [[5, 3]], limits=1),
    "Engine.results": of_request("results"),
    "Engine.state": of_request("state"),
    "Engine.events": of_request("events"),
    "Engine.stream": of_request("stream"),
    "Engine.cancel": of_request("cancel"),
    "Engine.park": of_request("park"),
    "Engine.unpark": of_request("unpark"),
    "Engine.update_params": of_engine("update_params", np.uint32(0)),
    "Engine.warm_up": of_engine("warm_up"),
    "Request": call(jkv.serving.Request, [1]),
    "StopSizes": call(jkv.serving.StopSizes),
    "TextStream": call(jkv.serving.TextStream, str, [1], ()),
    "KeptPrograms": call(jkv.serving.KeptPrograms, "folder", "name"),
    "Vocabulary": call(GRAMMAR.Vocabulary, [b"a", None], [1]),
    "vocabulary_of": call(GRAMMAR.vocabulary_of, Spelling(), [1]),
    "from_choices": late(GRAMMAR.from_choices, ["a"], "vocabulary"),
    "from_regex": late(GRAMMAR.from_regex, "a+", "vocabulary"),
    "from_gbnf": late(GRAMMAR.from_gbnf, 'root ::= "a"', "vocabulary"),
    "from_json_object": late(GRAMMAR.from_json_object, "vocabulary"),
    "from_json_schema": late(GRAMMAR.from_json_schema, SCHEMA, "vocabulary"),
    "from_tools": late(GRAMMAR.from_tools, [TOOL], "vocabulary", begin="a", end="b"),
    "find_refused_tools": call(GRAMMAR.find_refused_tools, [TOOL]),
    "concatenate": late(GRAMMAR.concatenate, [GRAMMAR.Pattern("a")], "vocabulary"),
    "join": lambda: (GRAMMAR.join, [[made()["grammar"]]], {}),
    "wait_for": late(GRAMMAR.wait_for, [1], "grammar", "vocabulary"),
    "with_one_spelling": late(GRAMMAR.with_one_spelling, "grammar", "vocabulary"),
    "Catalog": late(GRAMMAR.Catalog, "vocabulary", max_grammars=2),
    "Choices": call(GRAMMAR.Choices, ["a"]),
    "Either": call(GRAMMAR.Either, [GRAMMAR.Pattern("a")]),
    "Pattern": call(GRAMMAR.Pattern, "a"),
    "Rules": call(GRAMMAR.Rules, 'root ::= "a"'),
    "Schema": call(GRAMMAR.Schema, SCHEMA),
    "Until": call(GRAMMAR.Until, "a"),
    "AllowedTokens": call(PROCESSORS.AllowedTokens, np.array([1])),
    "BannedSequences": call(PROCESSORS.BannedSequences, np.array([[1, 2]])),
    "MinimumLength": call(PROCESSORS.MinimumLength, np.array([1]), min_new_tokens=1),
    "NoRepeatedNgrams": call(PROCESSORS.NoRepeatedNgrams, 2, 8),
    "ThinkingBudget": call(
        PROCESSORS.ThinkingBudget, np.array([1]), np.array([2]), budget=2
    ),
    "TokenBias": call(PROCESSORS.TokenBias, np.array([1]), np.array([1.0], np.float32)),
    "chain": lambda: (PROCESSORS.chain, [made()["bias"]], {}),
    "renumber": late(PROCESSORS.renumber, "bias", jnp.array([-1, 0])),
    "select_best": lambda: (DECODING.select_best, [generation(), 1], {}),
    "grow": late(jkv.trees.grow, "tree", [[4]], 0),
    "pad": late(jkv.trees.pad, "tree", num_rows=8, num_segments=4),
    "split": late(jkv.trees.split, "tree", 8),
    "read_sequence": late(jkv.trees.read_sequence, "tree", 1),
}


def list_public():
    """Return the names of public functions, classes, and user-facing methods."""
    found = {}
    for package in PACKAGES:
        name = "jkv" if package == "jkv" else f"jkv.{package}"
        module = importlib.import_module(name)
        for each in module.__all__:
            value = getattr(module, each)
            if inspect.isroutine(value) and package != "jkv":
                found[each] = value
            if inspect.isclass(value) and not issubclass(value, Exception):
                found[each] = value
    return found


def find_hints(function):
    """Return the annotations of a call's arguments, and of a TypedDict's fields."""
    target = function.__init__ if inspect.isclass(function) else function
    target = inspect.unwrap(target)
    hints = dict(typing.get_type_hints(target))
    for name in ("fields", "limits"):
        if typing.get_origin(hints.get(name)) is typing.Unpack:
            hints |= typing.get_type_hints(typing.get_args(hints.pop(name))[0])
    hints.pop("return", None)
    return hints


# Arguments that messages name differently.
OTHER_WORDS = {
    "tokens": "the prompt",
    "sequences": "prompts",
    "stop_sequences": "a stop sequence",
    "end_tokens": "end tokens",
    "generation_config": "a GenerationConfig",
    "options": "a DecodingOptions",
    "grammars": "grammar",
    "answer": "schema",
    "processors": "each of a chain",
    "num_steps": "an integer",
}
# A class instead of an instance, besides other wrong types.
VALUES = (*WRONG, jkv.Sampling, jkv.BlockStore, int)
# For functions that compile a grammar each time.
FEW = ("5", None, float("nan"), jkv.Sampling)
COMPILING = ("from_tools", "from_json_schema", "from_json_object")


def run(function, good):
    """Call a function; exhaust a returned iterator."""
    bound = inspect.signature(function).bind_partial()
    kinds = inspect.signature(function).parameters
    for name, value in good.items():
        kind = kinds[name].kind if name in kinds else None
        if kind == inspect.Parameter.VAR_POSITIONAL:
            bound.arguments[name] = (value,)
        elif kind is None:
            keywords = [k for k, p in kinds.items() if p.kind == p.VAR_KEYWORD]
            bound.arguments.setdefault(keywords[0], {})[name] = value
        else:
            bound.arguments[name] = value
    found = function(*bound.args, **bound.kwargs)
    return list(found) if inspect.isgenerator(found) else found


# These compile loops.
LOOPS = [name for name in GOOD if name.startswith(("prefill", "Engine."))]


@pytest.mark.parametrize("name", with_further(GOOD, *LOOPS))
def test_values_of_wrong_types_are_reported(name):
    function, args, options = GOOD[name]()
    good = dict(zip(inspect.signature(function).parameters, args, strict=False))
    good |= options
    run(function, good)
    for argument, hint in find_hints(function).items():
        for value in FEW if name in COMPILING else VALUES:
            # An array of strings is as valid as a list.
            is_list = isinstance(value, np.ndarray) and argument in ("texts", "parts")
            if fits(value, hint) or is_list:
                continue
            try:
                run(function, good | {argument: value})
            except KeyError:
                assert argument == "request_id"  # an unknown request
            except EXPECTED as error:
                words = argument, OTHER_WORDS.get(argument, argument)
                assert any(word in str(error) for word in words), (argument, value)


def test_every_public_name_has_a_valid_call():
    known = {name.partition(".")[0] for name in GOOD} | RETURNED | ELSEWHERE
    assert {*list_public()} <= known | NAMED_TUPLES


@pytest.mark.parametrize("cls", ["BlockStore", "Engine", "Catalog"])
def test_every_public_method_has_a_valid_call(cls):
    value = list_public()[cls]
    methods = [
        name
        for name, method in inspect.getmembers(value, inspect.isfunction)
        if not name.startswith("_") and len(inspect.signature(method).parameters) > 1
    ]
    assert {f"{cls}.{name}" for name in methods} <= {*GOOD} | METHODS_ELSEWHERE


def test_invalid_seconds_and_times():
    engine, cache = engine_and_request()[0], opened(3, prefix_caching=True)
    for options in (
        dict(timeout=float("nan")),
        dict(timeout=True),
        dict(timeout=-1.0),
        dict(keep_seconds=float("nan")),
        dict(keep_seconds=False),
        dict(n=True),
        dict(priority=True),
    ):
        (name,) = options
        with pytest.raises(jkv.serving.RequestRefused, match=name):
            engine.submit([5], **options)
    for wrong in (-1, [-1], np.array([-5]), 2**32):
        with pytest.raises(ValueError, match="keep_until must be"):
            jkv.free(cache, 0, keep=0, keep_until=wrong)
    with pytest.raises(ValueError, match="value_dtype"):
        small_config(value_dtype=object())
    with pytest.raises(ValueError, match="shares"):
        make_engine(shares={"a": "much"})
