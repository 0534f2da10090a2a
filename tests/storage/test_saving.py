"""Saving and loading: bit-identical, atomic, and safe against invalid files."""

import hashlib
import json
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from support.small_caches import (
    allocate,
    append,
    copied,
    fork,
    free,
    grow,
    match,
    opened,
    refusal_counts,
    small_cache,
    small_config,
    stored_tokens,
    table,
    truncate,
    with_free_blocks,
    with_metadata,
    with_storage_filled,
    write_tokens,
)

import jkv
from jkv.blocks import contents
from jkv.storage import files
from jkv.storage.leaves import list_leaves

pytestmark = pytest.mark.one_end

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


def assert_same(found, expected):
    """Assert bit-identical leaves, and equal static fields, dtypes and shapes."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def busy(**changes):
    """Return a cache with forks, holes, refusals, and two layers of NaN and numbers."""
    cache = opened(9, 5, 3, num_layers=2, max_sequences=7, num_blocks=15, **changes)
    cache, _ = fork(cache, [0])
    cache, _ = free(cache, [1])
    cache, _ = allocate(cache, [99, 6])
    return grow(cache, 3, [42])


class TestAWholeCache:
    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
    def test_is_restored_bit_identical(self, path, dtype):
        cache = busy(dtype=dtype, value_head_dim=3)
        jkv.save(path, cache)
        loaded = jkv.load(path)
        jkv.check(loaded)
        assert_same(loaded, cache)
        assert loaded.dtype == np.dtype(dtype)
        assert repr(loaded) == repr(cache)
        assert stored_tokens(loaded, 3) == [*range(9), 42]

    @pytest.mark.parametrize(
        "changes", [dict(record_tokens=True), dict(prefix_caching=True)]
    )
    def test_with_tokens_and_prefix_index(self, path, changes):
        cache = small_cache(**changes)
        cache, _ = allocate(cache, [0])
        cache, _ = append(cache, 0, 6, tokens=range(40, 46))
        jkv.save(path, cache)
        loaded = jkv.load(path)
        assert_same(loaded, cache)
        assert jkv.tokens(loaded, 0).tolist()[:6] == [40, 41, 42, 43, 44, 45]

    def test_the_prefix_index_continues(self, path):
        """Open and cached blocks of two salts fill the index."""
        cache = small_cache(prefix_caching=True)
        fresh = jax.tree.leaves(cache.metadata.index)
        prompt = list(range(40, 50))
        for salt in (3, 4):
            cache, _ = allocate(cache, 0, tokens=[prompt], salts=salt)
            cache, step = append(cache, salt - 3, 10, tokens=prompt)
            cache = write_tokens(cache, step, prompt)
        cache, _ = truncate(cache, 1, 9)
        cache, _ = free(cache, 0)
        for new, old in zip(jax.tree.leaves(cache.metadata.index), fresh, strict=True):
            assert not np.array_equal(new, old)
        jkv.save(path, cache)
        loaded = jkv.load(path)
        assert_same(loaded, cache)
        assert match(loaded, [prompt] * 3, [3, 4, 5]) == [8, 8, 0]
        again, opened = allocate(loaded, 0, tokens=[prompt], salts=3)
        jkv.check(again)
        assert stored_tokens(again, int(opened.seq_ids[0])) == list(range(40, 48))

    def test_without_storage(self, path):
        cache, _ = allocate(jkv.init(small_config(), storage=False), [5])
        jkv.save(path, cache)
        assert_same(jkv.load(path), cache)

    def test_a_loaded_cache_runs_the_compiled_programs(self, path):
        cache = opened(5)
        jkv.save(path, cache)
        step = jax.jit(lambda cache: jkv.append(cache, [0])[0])
        expected = step(cache)
        assert_same(step(jkv.load(path)), expected)
        assert step._cache_size() == 1

    def test_is_on_a_device_and_independent_of_the_file(self, path):
        cache = opened(5)
        jkv.save(path, cache)
        device = jax.devices()[0]
        loaded = jkv.load(path, device=device)
        with open(path, "r+b") as file:  # a mapped file would change the cache
            file.write(b"\xff" * path.stat().st_size)
        assert loaded.devices == {device}
        assert loaded.storage[0].key_pool.committed
        assert_same(loaded, cache)

    def test_all_sequences_into_another_cache(self, path):
        cache = busy()
        jkv.save(path, cache)
        other, back = jkv.load(
            path, opened(2, num_layers=2, num_blocks=15, max_sequences=7)
        )
        jkv.check(other)
        assert back.status.tolist() == [0] * 4
        zero, two, three, four = back.seq_ids.tolist()
        assert stored_tokens(other, zero) == list(range(9))
        assert stored_tokens(other, two) == [200, 201, 202]
        assert stored_tokens(other, three) == [*range(9), 42]
        assert len(table(other, four)) == 2  # reserved
        assert table(other, zero)[:2] == table(other, three)[:2]
        assert stored_tokens(other, 0) == [0, 1]


class TestSequences:
    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
    def test_sharing_is_kept(self, path, dtype):
        cache = busy(dtype=dtype)
        before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)]
        jkv.save(path, cache, [3, -1, 0])
        after = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)]
        assert before == after
        other, back = jkv.load(path, small_cache(num_layers=2, dtype=dtype))
        jkv.check(other)
        first, second = back.seq_ids.tolist()
        assert stored_tokens(other, first) == [*range(9), 42]
        assert stored_tokens(other, second) == list(range(9))
        assert table(other, first)[:2] == table(other, second)[:2]
        assert int(jkv.num_free_blocks(other)) == 8 - 4

    def test_into_their_former_cache_beside_open_ones(self, path):
        cache = opened(9)
        jkv.save(path, cache, 0)
        cache = copied(grow(cache, 0, [99]))
        cache, back = jkv.load(path, cache, donate=True)
        jkv.check(cache)
        assert stored_tokens(cache, 0) == [*range(9), 99]
        assert stored_tokens(cache, int(back.seq_ids[0])) == list(range(9))

    def test_from_pinned_memory(self, path, monkeypatch):
        """The path of an accelerator, with the CPU's pinned memory."""
        monkeypatch.setattr(contents, "_has_pinned_memory", lambda _: True)
        jkv.save(path, opened(9, 14, num_layers=2), [1])
        other, back = jkv.load(path, small_cache(num_layers=2))
        assert stored_tokens(other, int(back.seq_ids[0])) == list(range(100, 114))

    def test_refused_like_swap_in(self, path):
        jkv.save(path, opened(9, 5), [0, 1])
        full = with_free_blocks(small_cache(), 4)
        after, back = jkv.load(path, full)
        assert back.status.tolist() == [jkv.Status.OUT_OF_BLOCKS] * 2
        assert back.seq_ids.tolist() == [-1, -1]
        assert refusal_counts(after)[jkv.Status.OUT_OF_BLOCKS] == 2
        assert int(jkv.num_free_blocks(after)) == 4

    def test_none_and_reserved_only(self, path):
        cache, _ = allocate(small_cache(), [9])
        jkv.save(path, cache, [-1])
        after, back = jkv.load(path, cache)
        assert back.seq_ids.shape == (0,)
        assert_same(after, cache)
        jkv.save(path, cache, [0])
        after, back = jkv.load(path, cache)
        assert len(table(after, int(back.seq_ids[0]))) == 3

    def test_with_tokens_and_salt(self, path):
        cache = small_cache(prefix_caching=True)
        cache, _ = allocate(cache, [0])
        cache, _ = append(cache, 0, 6, tokens=range(40, 46))
        jkv.save(path, cache, 0)
        other, back = jkv.load(path, small_cache(record_tokens=True))
        assert jkv.tokens(other, back.seq_ids[0]).tolist()[:6] == [*range(40, 46)]

    def test_need_a_cache_of_the_same_kind(self, path):
        jkv.save(path, opened(9), 0)
        with pytest.raises(ValueError, match="got 1 sequences"):
            jkv.load(path)
        with pytest.raises(ValueError, match="dtype is float32, in this cache float16"):
            jkv.load(path, small_cache(dtype=jnp.float16))

    def test_a_closed_id_writes_nothing(self, path):
        with pytest.raises(jkv.InvalidSequence):
            jkv.save(path, opened(9), [0, 1])
        assert not path.exists() and os.listdir(path.parent) == []


class TestTheFile:
    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
    def test_files_are_readable_as_safetensors(self, path, dtype):
        cache = busy(dtype=dtype)
        jkv.save(path, cache)
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata()
            assert metadata["format"] == "jkv" and metadata["version"] == "3"
            assert metadata["holds"] == "cache"
            constants = json.loads(metadata["fields"])
            assert constants["storage.0.dtype"] == np.dtype(dtype).name
            assert constants["layer_groups"] == [[0], [0]]
            keys = file.get_tensor("storage.0.key_pool")
            assert keys.dtype == np.dtype(dtype)
            pool = np.asarray(cache.storage[0].key_pool)
            assert keys.tobytes() == pool.tobytes()
            tables = file.get_tensor("metadata.groups.0.block_tables")
            expected = cache.metadata.groups[0].block_tables
            np.testing.assert_array_equal(tables, expected)

    def test_arrays_are_aligned(self, path):
        jkv.save(path, busy(dtype=jnp.bfloat16, record_tokens=True))
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        assert (8 + length) % 64 == 0
        header = json.loads(raw[8 : 8 + length])
        del header["__metadata__"]
        for entry in header.values():
            itemsize = files.DTYPES[entry["dtype"]].itemsize
            assert entry["data_offsets"][0] % itemsize == 0

    def test_replaces_the_old_file_or_keeps_it(self, path, monkeypatch):
        jkv.save(path, opened(5))
        old = path.read_bytes()

        def full_disk(_):
            raise OSError("no space left on device")

        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="no space"):
            jkv.save(path, opened(9))
        monkeypatch.undo()
        assert path.read_bytes() == old
        assert os.listdir(path.parent) == [path.name]
        jkv.save(path, opened(9))
        assert path.read_bytes() != old
        assert os.listdir(path.parent) == [path.name]

    def test_does_not_exist_before_it_is_complete(self, path, monkeypatch):
        """Interrupted after the last byte, before the rename."""

        def interrupted(source, target):
            assert os.path.dirname(source) == os.path.dirname(target)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jkv.save(path, opened(5))
        assert os.listdir(path.parent) == []

    def test_has_usual_permissions_and_follows_links(self, tmp_path):
        jkv.save(tmp_path / "a", opened(5))
        (tmp_path / "b").write_bytes(b"")
        assert os.stat(tmp_path / "a").st_mode == os.stat(tmp_path / "b").st_mode
        (tmp_path / "link").symlink_to(tmp_path / "b")
        jkv.save(str(tmp_path / "link"), opened(5))
        assert (tmp_path / "link").is_symlink()
        assert_same(jkv.load(tmp_path / "b"), jkv.load(tmp_path / "a"))

    @pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
    def test_keeps_the_permissions_of_a_replaced_file(self, path, mode):
        path.write_bytes(b"")
        path.chmod(mode)
        jkv.save(path, opened(5))
        assert os.stat(path).st_mode & 0o777 == mode
        assert_same(jkv.load(path), opened(5))

    def test_progress_is_logged(self, path, monkeypatch, caplog):
        monkeypatch.setattr(files, "PROGRESS_SECONDS", 0.0)
        with caplog.at_level(logging.INFO, logger="jkv"):
            jkv.save(path, opened(5))
            jkv.load(path)
        text = caplog.text
        assert f"saved to {path}" in text and f"verified of {path}" in text
        assert " of 0 MB " in text and "all 0 MB" in text

    def test_a_large_cache_is_never_copied_to_the_host_whole(self, path, monkeypatch):
        """The file is written layer by layer and array by array."""
        cache = small_cache(num_layers=6, num_blocks=256, head_dim=16)
        sizes = []
        chunks = files._chunks

        def measured(parts):
            for part in parts:
                sizes.append(part.nbytes)
                yield from chunks([part])

        monkeypatch.setattr(files, "_chunks", measured)
        jkv.save(path, cache)
        assert max(sizes) == cache.storage[0].key_pool.nbytes // 6
        assert sum(sizes) == cache.nbytes


def resealed(raw, change):
    """Change the header of a file and recompute its checksum."""
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    change(header)
    header["__metadata__"]["checksum"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    digest = hashlib.sha256(text + data).hexdigest()
    text = text.replace(b'"checksum":"' + b"0" * 64, b'"checksum":"' + digest.encode())
    return len(text).to_bytes(8, "little") + text + data


class TestRefusedFiles:
    """Each error names the fault; the given cache is unchanged, as it is a value."""

    def assert_refused(self, path, raw, fault):
        path.write_bytes(raw)
        with pytest.raises(jkv.FileError, match=fault) as caught:
            jkv.load(path)
        assert str(path) in str(caught.value)
        with pytest.raises(jkv.FileError, match=fault):
            jkv.load(path, small_cache())

    def saved(self, path, cache=None, seq_ids=None):
        jkv.save(path, opened(5) if cache is None else cache, seq_ids)
        return path.read_bytes()

    @pytest.mark.parametrize("seq_ids", [None, [0]])
    def test_damaged_in_any_byte(self, path, seq_ids):
        raw = self.saved(path, seq_ids=seq_ids)
        length = int.from_bytes(raw[:8], "little")
        rng = np.random.default_rng(0)
        places = [*range(8), *range(8, 8 + length, 7), 8 + length, len(raw) - 1]
        places += rng.integers(8 + length, len(raw), 40).tolist()
        for place in places:
            bad = bytearray(raw)
            bad[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(bad)
            with pytest.raises(jkv.FileError):
                jkv.load(path)
        self.assert_refused(path, raw[:-1] + b"\x01", "damaged")
        path.write_bytes(raw)  # the unchanged file loads
        jkv.load(path, small_cache(num_blocks=9))

    def test_truncated_anywhere(self, path):
        raw = self.saved(path)
        for length in [0, 1, 7, 8, 9, 30, 100, len(raw) // 2, len(raw) - 1]:
            self.assert_refused(path, raw[:length], "truncated")

    def test_trailing_bytes(self, path):
        self.assert_refused(path, self.saved(path) + b"\0", "damaged")

    def test_other_file_formats(self, path):
        for raw in (
            b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4,
            b"just some text, longer than eight bytes\n" * 9,
            bytes(1000),
            (20).to_bytes(8, "little") + b"[1, 2, 3]" + b" " * 400,
        ):
            self.assert_refused(path, raw, "foreign: not a safetensors file")
        for metadata in (None, {"format": "pt"}):
            safetensors.numpy.save_file(
                {"keys": np.zeros((2, 3))}, path, metadata=metadata
            )
            raw = path.read_bytes()
            self.assert_refused(
                path, raw, "foreign: a safetensors file that jkv did not"
            )

    def test_of_a_newer_version(self, path):
        raw = self.saved(path)

        def newer(header):
            header["__metadata__"]["version"] = "4"

        self.assert_refused(path, resealed(raw, newer), "version 4 .* reads 3")

    def test_valid_checksum_of_an_invalid_cache(self, path):
        raw = self.saved(path)

        def renamed(header):
            header["metadata.is_shut"] = header.pop("metadata.sequences.rows")

        def added(header):
            header["more"] = dict(dtype="U8", shape=[0], data_offsets=[0, 0])

        def misplaced(header):
            header["storage.0.key_pool"]["data_offsets"][1] += 4

        def unknown_dtype(header):
            header["storage.0.key_pool"]["dtype"] = "F7"

        def other_kind(header):
            header["__metadata__"]["holds"] = "bread"

        def other_shape(header):
            header["metadata.sequences.rows"]["shape"] = [10, 2]

        for change, fault in [
            (lambda _: None, None),
            (renamed, "lacks 'metadata.sequences.rows'"),
            (added, "'more'"),
            (misplaced, "header is invalid"),
            (unknown_dtype, "header is invalid"),
            (other_kind, "bread"),
            (other_shape, "shapes: .*rows"),
        ]:
            if fault is None:
                path.write_bytes(resealed(raw, change))
                jkv.load(path)
            else:
                self.assert_refused(path, resealed(raw, change), f"damaged: .*{fault}")

    def test_of_a_cache_that_was_invalid_when_saved(self, path):
        cache = opened(5)
        counts = np.array(cache.metadata.groups[0].reference_counts)
        counts[0] += 1
        raw = self.saved(path, with_metadata(cache, reference_counts=counts))
        self.assert_refused(path, raw, "damaged: reference_counts")

    def test_missing_file(self, path):
        with pytest.raises(FileNotFoundError):
            jkv.load(path)


def test_the_comparison_can_fail(path):
    """`assert_same` and `stored_tokens` detect a wrong file."""
    cache = busy()
    jkv.save(path, cache)
    zeros = with_storage_filled(jkv.load(path), 0.0)
    with pytest.raises(AssertionError):
        assert_same(zeros, cache)
    lengths = np.array(jkv.load(path).metadata.context_lengths)
    lengths[0] += 1
    with pytest.raises(AssertionError):
        assert_same(with_metadata(cache, context_lengths=lengths), cache)
    tables = np.array(cache.metadata.groups[0].block_tables)[:, ::-1]
    with pytest.raises(AssertionError):
        assert_same(with_metadata(cache, block_tables=tables), cache)


def test_a_new_field_of_the_state_is_saved():
    """Leaves are traversed, not listed."""
    cache = opened(5, record_tokens=True)
    names = [name for name, _ in list_leaves(cache)]
    group, storage = "metadata.groups.0", "storage.0"
    assert f"{group}.free_blocks.ids" in names and f"{storage}.dtype" in names
    assert {f"{storage}.key_pool", f"{storage}.value_pool"} <= set(names)
    arrays = [leaf for _, leaf in list_leaves(cache) if isinstance(leaf, jax.Array)]
    assert len(arrays) == len(jax.tree.leaves(cache))
