"""The public surface: pinned by name, each documented, with an example that runs."""

import doctest
import importlib
import inspect
import pkgutil
import sys

import jkv

PUBLIC = """
    NO_SEQUENCE Allocation Batch BatchFull BlockInfo Cache CacheConfig CacheError
    ContextFull Fork InvalidArgument InvalidSequence InvariantError Metadata OutOfBlocks
    OutOfSequences Ring Slots Status allocate append attend block_ids block_info
    can_allocate check commit fork free init num_free_blocks paged_attention
    raise_for_status read read_slot reorder slots tokens truncate write
    FinishReason Generation Model Sampling generate
    MemoryProfile Stats memory_profile stats
    Fragmentation compact fragmentation resize should_compact
    Swapped SwapIn swap_in swap_out FileError save load
    PrefixIndex clear_prefixes evict_cached invalidate match
    clock evict evict_older_than least_recently_used touch
""".split()


def test_the_public_names_are_these() -> None:
    assert sorted(jkv.__all__) == sorted(PUBLIC)
    assert set(jkv.__all__) <= set(dir(jkv))


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
    """A name in an `__init__` that is also a file's would take its place."""
    for found in pkgutil.walk_packages(jkv.__path__, "jkv."):
        module = importlib.import_module(found.name)
        parent, _, name = found.name.rpartition(".")
        assert getattr(sys.modules[parent], name) is module, found.name
