"""Compiled grammars stored in a folder."""

import os

import pytest

from jkv.grammar import (
    TooLarge,
    Vocabulary,
    from_choices,
    from_json_object,
    from_json_schema,
    from_regex,
    from_tools,
    kept_files,
)

pytestmark = pytest.mark.one_end

BYTES = [bytes([byte]) for byte in range(256)]
VOCABULARY = Vocabulary([*BYTES, None], end_tokens=[256])
SCHEMA = {"properties": {"a": {"type": "integer"}}}
MAKERS = {
    "choices": (from_choices, ["a", "b"], {}),
    "pattern": (from_regex, "a|b", {}),
    "schema": (from_json_schema, SCHEMA, {}),
    "spaces": (from_json_schema, SCHEMA, {"whitespace": ""}),
    "object": (from_json_object, None, {"depth": 0}),
    "deeper": (from_json_object, None, {"depth": 1}),
    "tools": (from_tools, [{"name": "f", "parameters": SCHEMA}], {}),
    "a call": (
        from_tools,
        [{"name": "f", "parameters": SCHEMA}],
        {"choice": "required"},
    ),
}


def make(name, folder, vocabulary=VOCABULARY):
    maker, argument, options = MAKERS[name]
    given = () if argument is None else (argument,)
    return maker(*given, vocabulary, folder=folder, **options)


def bytes_of(grammar):
    """Return the parts of a grammar for comparison."""
    return {
        name: getattr(value, "tobytes", lambda value=value: value)()
        for name, value in vars(grammar).items()
    }


def compiling_fails(monkeypatch):
    """Make compilation of a grammar that is not stored raise."""

    def fail(path, _):
        raise AssertionError(f"{path} is compiled")

    monkeypatch.setattr(kept_files, "_write", fail)


def test_each_stored_grammar_is_reused(tmp_path, monkeypatch):
    folder = tmp_path / "made" / "on demand"
    made = {name: bytes_of(make(name, folder)) for name in MAKERS}
    assert len([*folder.iterdir()]) == len(MAKERS)
    compiling_fails(monkeypatch)
    for name, expected in made.items():
        assert bytes_of(make(name, folder)) == expected
        assert bytes_of(make(name, None)) == expected


def test_another_vocabulary_has_its_own_files(tmp_path):
    one = Vocabulary([b"a", b"b", b"ab", None], end_tokens=[3])
    others = [
        Vocabulary([b"a", b"b", b"ba", None], end_tokens=[3]),
        # The same bytes in other tokens.
        Vocabulary([b"ab", b"a", b"b", None], end_tokens=[3]),
        Vocabulary([b"a", b"b", b"ab", None], end_tokens=[2]),
        Vocabulary([b"a", b"b", b"ab", None, None], end_tokens=[3]),
    ]
    for count, vocabulary in enumerate([one, *others], start=1):
        grammar = make("pattern", tmp_path, vocabulary)
        assert len([*tmp_path.iterdir()]) == count
        assert grammar.vocabulary_size == len(vocabulary.tokens)
    # The key is the content, not the object's identity.
    make("pattern", tmp_path, Vocabulary([b"a", b"b", b"ab", None], end_tokens=[3]))
    assert len([*tmp_path.iterdir()]) == count


def test_files_of_another_version_are_ignored(tmp_path, monkeypatch):
    make("pattern", tmp_path)
    monkeypatch.setattr(kept_files, "_VERSION", kept_files._VERSION + 1)
    make("pattern", tmp_path)
    assert len([*tmp_path.iterdir()]) == 2


def test_a_damaged_file_is_recompiled(tmp_path, monkeypatch):
    expected = bytes_of(make("choices", tmp_path))
    (path,) = tmp_path.iterdir()
    written = path.read_bytes()
    size = len(written)
    damaged = [written[:cut] for cut in (0, 1, 40, size // 2, size - 1)]
    for place in range(0, size, 97):
        changed = bytes([written[place] ^ 0x55])
        damaged.append(written[:place] + changed + written[place + 1 :])
    damaged += [written + b"\0", b"PK\x05\x06" + bytes(18)]
    for data in damaged:
        path.write_bytes(data)
        assert bytes_of(make("choices", tmp_path)) == expected
        assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == written
    # All damage was detected: none is read if compilation fails.
    compiling_fails(monkeypatch)
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(AssertionError, match="is compiled"):
            make("choices", tmp_path)


def test_an_incomplete_file_is_not_found(tmp_path, monkeypatch):
    """A process that ends while writing leaves no file under a grammar's name."""

    def end(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kept_files.os, "replace", end)
    with pytest.raises(KeyboardInterrupt):
        make("choices", tmp_path)
    assert not [*tmp_path.glob("*.grammar")]
    monkeypatch.undo()
    make("choices", tmp_path)
    assert len([*tmp_path.glob("*.grammar")]) == 1


def test_the_grammar_folder_evicts_least_recently_used(tmp_path, monkeypatch):
    paths = {}
    for age, name in enumerate(("choices", "pattern", "spaces")):
        before = {*tmp_path.iterdir()}
        make(name, tmp_path)
        (paths[name],) = {*tmp_path.iterdir()} - before
        os.utime(paths[name], (age, age))
    make("choices", tmp_path)  # a hit makes it the most recent
    room = sum(path.stat().st_size for path in paths.values())
    monkeypatch.setattr(kept_files, "MAX_FOLDER_BYTES", room)
    make("object", tmp_path)
    left = {name for name, path in paths.items() if path.exists()}
    assert "choices" in left and "pattern" not in left


def test_schemas_that_are_not_json_are_refused_with_a_folder(tmp_path):
    with pytest.raises(ValueError, match="not JSON"):
        from_json_schema({"enum": [{1}]}, VOCABULARY, folder=tmp_path)


def test_max_bytes_bounds_cached_grammars(tmp_path):
    """A process with a lower limit does not load a larger stored grammar."""
    from_regex("[ab]{60}", VOCABULARY, folder=tmp_path)
    with pytest.raises(TooLarge, match="max_bytes 1,000 exceeded: the cached"):
        from_regex("[ab]{60}", VOCABULARY, folder=tmp_path, max_bytes=1000)
    with pytest.raises(TooLarge, match="max_bytes 1,000 exceeded"):
        from_regex("[ab]{60}", VOCABULARY, max_bytes=1000)
