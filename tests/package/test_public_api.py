"""The public API: pinned names, each documented, with a runnable example."""

import dataclasses
import doctest
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import jkv
from jkv import decoding, grammar, logits_processors, serving, trees

pytestmark = pytest.mark.one_end

PUBLIC = """
    NO_SEQUENCE Allocation Batch BatchFull BlockInfo Cache CacheConfig CacheError
    ContextFull Fork InvalidArgument InvalidSequence InvariantError Metadata OutOfBlocks
    OutOfSequences Ring Slots Status allocate append attend block_ids block_info
    can_allocate check commit fork free init num_free_blocks paged_attention
    raise_for_status read read_slot reorder slots tokens truncate write
    FinishReason Generation Model Sampling extend generate score
    MemoryProfile Stats GroupStats memory_profile stats
    Fragmentation compact fragmentation resize should_compact
    Swapped SwapIn swap_in swap_out FileError save load
    Spilled BlockStore spill restore
    PrefixIndex clear_prefixes demote evict_cached invalidate match
    clock evict evict_older_than least_recently_used touch
    context_lengths kept_from debug DebugError over_pools split_pools
    next_positions observe overwrite prune press read_queries Roll scrub top_tokens
    GroupedConfig GroupLayer Sequences BlockGroup BlockStorage
    partition_specs BeamSearch beam_search
    StateConfig StateStorage States fold_state read_pending read_state
    snapshots write_state LogitsProcessor TrajectoryTree
    ExactDifference ExactReport check_exact FormatAccuracy measure_formats
    PageTable page_table
    CausalMask MixedMask SpanMask TreeMask keep_rows peek with_mask
    Step model_of
    DraftModel Drafter PromptLookup record with_drafter UsageError jitted
    keep_compiled_programs
""".split()


def test_the_public_names_are_these() -> None:
    assert sorted(jkv.__all__) == sorted(PUBLIC)
    assert set(dir(jkv)) == {*jkv.__all__, "__version__"}


def test_every_public_name_is_documented() -> None:
    for name in jkv.__all__:
        value = getattr(jkv, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_every_public_function_has_an_example() -> None:
    finder = doctest.DocTestFinder(recurse=False)
    for name in jkv.__all__:
        value = getattr(jkv, name)
        if inspect.isfunction(value):
            assert any(t.examples for t in finder.find(value, name)), name


def test_every_public_function_is_annotated() -> None:
    for name in jkv.__all__:
        value = getattr(jkv, name)
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            parameters = signature.parameters.values()
            missing = [p.name for p in parameters if p.annotation is p.empty]
            assert not missing, (name, missing)
            assert signature.return_annotation is not signature.empty, name


def test_no_module_is_hidden_by_a_function() -> None:
    """A name in an `__init__` would hide the module of the same name."""
    for found in pkgutil.walk_packages(jkv.__path__, "jkv."):
        if found.name.startswith("jkv.integrations."):
            continue  # needs packages that are not installed here
        module = importlib.import_module(found.name)
        parent, _, name = found.name.rpartition(".")
        assert getattr(sys.modules[parent], name) is module, found.name


@pytest.mark.skipif(importlib.util.find_spec("tunix") is not None, reason="is there")
def test_a_missing_integration_suggests_its_extra() -> None:
    with pytest.raises(ImportError, match=r"pip install '\.\[tunix\]'"):
        importlib.import_module("jkv.integrations.tunix")


# Every argument of theirs is valid.
RAISE_NOTHING = {
    "clock",
    "compact",
    "context_lengths",
    "fragmentation",
    "memory_profile",
    "next_positions",
    "num_free_blocks",
    "preempt",
    "snapshots",
    "stats",
}


def public_functions() -> dict[str, Callable[..., object]]:
    """Return all public functions of jkv and its packages, by name."""
    names = {name: getattr(jkv, name) for name in jkv.__all__}
    for room in (decoding, logits_processors, trees):
        names |= {name: getattr(room, name) for name in room.__all__}
    return {n: value for n, value in names.items() if inspect.isfunction(value)}


def section(text: str, title: str) -> str:
    """Return the indented lines under a title such as "Args:", or an empty string."""
    found = re.search(rf"^{title}:\n((?: +.*\n|\n)*)", f"{text}\n", re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("name", sorted(public_functions()))
def test_docstrings_list_arguments_results_and_errors(name: str) -> None:
    function = public_functions()[name]
    text = inspect.getdoc(function) or ""
    # Fields of other values are documented there.
    signature = inspect.signature(inspect.unwrap(function))
    arguments = section(text, "Args")
    for parameter in signature.parameters:
        assert re.search(rf"\b{parameter}\b", arguments), parameter
    if signature.return_annotation not in (None, "None"):
        assert section(text, "Returns")
    assert bool(section(text, "Raises")) != (name in RAISE_NOTHING)


def public_records() -> dict[str, type]:
    """Return all public dataclasses and named tuples by name."""
    names = {name: getattr(jkv, name) for name in jkv.__all__}
    for room in (decoding, serving, logits_processors, trees):
        names |= {name: getattr(room, name) for name in room.__all__}
    return {
        name: value
        for name, value in names.items()
        if dataclasses.is_dataclass(value) or hasattr(value, "_fields")
    }


@pytest.mark.parametrize("name", sorted(public_records()))
def test_public_classes_document_their_fields(name: str) -> None:
    """A comment at the field, or a line of the docstring; arrays with their shape."""
    record = public_records()[name]
    lines, text = inspect.getsource(record).splitlines(), inspect.getdoc(record) or ""
    described = section(text, "Args") + section(text, "Attributes")
    for field, hint in inspect.get_annotations(record).items():
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"    {field}:")]
        words = [lines[at].partition("#")[2]]
        while at and lines[at - 1].strip().startswith("#"):
            at -= 1
            words.append(lines[at])
        words += re.findall(rf"^ +{field}: (.*(?:\n    .*)*)", described, re.MULTILINE)
        description = " ".join(words).strip()
        assert description, f"{name}.{field} is not described"
        if "Array" in str(hint):
            assert "[" in description, f"{name}.{field} is described without its shape"


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (jkv.generate, {"max_running": None, "exact": False, "salts": 0}),
        (jkv.jitted.generate, {"num_samples": 1, "stop_tokens": None}),
        (decoding.beam_search, {"length_penalty": 1.0, "num_return": 1}),
        (decoding.extend, {"processor_state": None, "chunk_size": 512}),
        (decoding.prefill, {"variants": None, "logits_processor": None}),
        (serving.Engine.submit, {"n": 1, "keep": 0, "timeout": None}),
        (serving.Engine.generate, {"limits": None, "priority": 0}),
        (grammar.from_regex, {"timeout": None, "folder": None}),
    ],
)
def test_a_signature_lists_all_arguments(
    function: Callable[..., object], defaults: dict[str, object]
) -> None:
    parameters = inspect.signature(function).parameters
    kinds = {each.kind for each in parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert {name: parameters[name].default for name in defaults} == defaults


@pytest.mark.parametrize("name", sorted(public_functions()))
def test_a_signature_is_short(name: str) -> None:
    """Unions of array types have a name."""
    signature = inspect.signature(public_functions()[name])
    for parameter in signature.parameters.values():
        text = str(parameter)
        assert "jaxlib" not in text and "integer" not in text, parameter
        assert text.count("|") < 5, parameter


def test_jit_finds_static_arguments_by_name() -> None:
    jitted = jax.jit(
        jkv.generate, static_argnames=("model", "max_new_tokens", "max_running")
    )
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=8,
        block_size=4,
        max_sequences=2,
        max_context_length=16,
    )

    def model(_params, tokens, cache, batch):  # type: ignore[no-untyped-def]
        return jax.nn.one_hot(tokens + 1, 50)[batch.last_rows], cache

    run = functools.partial(jitted, model, None)
    prompts = jnp.array([[1, 2]])
    _, result = jax.eval_shape(
        functools.partial(run, max_new_tokens=3), jkv.init(config), prompts
    )
    assert result.tokens.shape == (1, 3)
