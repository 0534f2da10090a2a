"""Block stores in memory and in folders, with damaged or missing files."""

import errno
import functools
import os
import queue
import shutil
import subprocess
import sys
import textwrap
import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from support.small_caches import allocate, append, free, small_cache, write_tokens
from support.states.folding_model import make_config

import jkv
from jkv.tiers import copy_prefix
from jkv.tiers import folder as folders
from jkv.tiers import store as stores
from jkv.tiers.spilled import Held, SpilledBuilder

pytestmark = pytest.mark.one_end
T = 4


@functools.cache
def spilled_of(sequences, salt=0):
    """Return the spilled blocks of sequences; their contents are the tokens."""
    cache = small_cache(num_blocks=24, prefix_caching=True)
    for sequence in sequences:
        cache, opened = allocate(cache, 0, tokens=[list(sequence)], salts=salt)
        seq_id, start = int(opened.seq_ids[0]), int(opened.num_cached[0])
        rest = list(sequence[start:])
        cache, step = append(cache, seq_id, len(rest), tokens=rest)
        cache = write_tokens(cache, step, rest)
        cache, _ = free(cache, seq_id)
    return jkv.spill(cache, 24)[1]


def draw_sequences(rng):
    """Draw sequences over two tokens, which often share prefixes."""
    return tuple(
        tuple(rng.integers(2, size=rng.integers(1, 14)).tolist()) for _ in range(3)
    )


def columns_of(spilled):
    """Return the keys of each column present, by salt and tokens."""
    return {
        (int(spilled.salts[node]), tuple(spilled.tokens_of(node).tolist())): (
            held.arrays["block.0.key_pool"]
        )
        for node, held in spilled.held.items()
    }


def find_columns(store, prompt, salt):
    found = store.find(list(prompt), salt)
    return {} if found is None else columns_of(found)


def expect(model, prompt, salt):
    ends = range(T, len(prompt), T)
    sequences = [(salt, tuple(prompt[:end])) for end in ends]
    return {sequence: model[sequence] for sequence in sequences if sequence in model}


@pytest.mark.parametrize("where", ["memory", "folder", "both"])
def test_stored_blocks_are_found_bit_identical(where, tmp_path):
    """The reference is a dict by sequence; the folder holds all that memory lacks."""
    max_bytes = {"memory": 2**30, "folder": 0, "both": 2000}[where]
    in_folder = dict(folder=tmp_path, max_folder_bytes=2**30)
    store = jkv.BlockStore(max_bytes, **({} if where == "memory" else in_folder))
    rng, model, num_found = np.random.default_rng(7), {}, 0
    for trip in range(25):
        salt = int(rng.integers(2))
        spilled = spilled_of(draw_sequences(rng), salt)
        model = columns_of(spilled) | model
        store.put(spilled)
        assert store.nbytes <= max_bytes
        if trip % 5 == 4 and where != "memory":  # another process
            store.save()
            store = jkv.BlockStore(max_bytes, **in_folder)
        for prompt in draw_sequences(rng):
            expected = expect(model, prompt, salt)
            found = find_columns(store, prompt, salt)
            assert found.keys() == expected.keys()
            for sequence, key in found.items():
                np.testing.assert_array_equal(key, expected[sequence])
            held = [len(sequence) for _, sequence in expected]
            assert store.count(list(prompt), salt) == max(held, default=0)
            num_found += len(found)
    assert num_found > 20
    for salt in range(2, 9):  # salts without stored blocks
        assert store.find([1] * 9, salt) is None
    assert {salt for _, salt in store._roots} <= {0, 1}
    store.clear()
    assert store.nbytes == store.num_blocks == store.folder_bytes == 0


def test_least_recently_used_blocks_go_first_and_children_before_parents():
    first, second = (tuple([n] * 9) for n in (1, 2))
    store = jkv.BlockStore(2**20)
    store.put(spilled_of((first,)))
    store.put(spilled_of((second,)))
    size = store.nbytes // 4
    assert len(find_columns(store, first, 0)) == 2
    store.max_bytes = 3 * size  # drops the last column of the LRU sequence
    assert len(find_columns(store, first, 0)) == 2
    assert [len(t) for _, t in find_columns(store, second, 0)] == [4]
    store.max_bytes = size
    store.put(spilled_of((first,)))
    assert [len(t) for _, t in find_columns(store, first, 0)] == [4]
    assert repr(store).startswith("BlockStore(1 blocks, ")


@pytest.mark.parametrize("in_folder", [False, True])
def test_discard_removes_a_sequence_and_no_prefix_of_others(in_folder, tmp_path):
    folder = dict(folder=tmp_path, max_folder_bytes=2**20) if in_folder else {}
    store = jkv.BlockStore(2**20, **folder)
    short, long, other = (1,) * 9, (1,) * 13, (2,) * 13
    for sequence in (short, long, other):
        store.put(spilled_of((sequence,)))
    if in_folder:
        store.save()
    before = store.nbytes
    size = before // 6
    store.discard(short)  # a prefix of `long`
    store.discard((3,) * 9)  # unknown
    store.discard(other, salt=1)  # of another salt
    assert store.nbytes == before
    store.discard(long)
    assert store.nbytes == 3 * size
    store.discard((*other, 4, 4, 4, 4))  # its last column is not stored
    assert store.nbytes == 0 and not store._roots
    assert len(find_columns(store, other, 0)) == (3 if in_folder else 0)


def test_a_smaller_context_restores_only_reachable_blocks():
    sequence = tuple(range(13))
    spilled = spilled_of((sequence, (9,) * 5))
    for length, reached in ((12, 3), (11, 2), (4, 1)):
        cache = small_cache(max_context_length=length, prefix_caching=True)
        cache, num = jkv.restore(cache, spilled)
        assert num == reached + 1
        jkv.check(cache)
        found = jkv.spill(cache, 9)[1]
        ends = {tokens for _, tokens in columns_of(found)}
        assert ends == {sequence[: T * (n + 1)] for n in range(reached)} | {(9,) * T}
    cache = small_cache(max_context_length=3, prefix_caching=True)
    assert jkv.restore(cache, spilled)[1] == 0


def test_find_skips_the_cached_prefix():
    sequence = tuple(range(13))
    store = jkv.BlockStore(2**20)
    store.put(spilled_of((sequence,)))
    found = store.find(list(sequence), skip=8)
    assert found.num_blocks == 1 and len(found.parents) == 3


DAMAGES = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "flipped": lambda data: data[:-9] + bytes([data[-9] ^ 64]) + data[-8:],
    "foreign": lambda _: b"x" * 100,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_skipped_and_reported(damage, tmp_path):
    sequence = tuple(range(13))
    store = jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=2**20)
    store.put(spilled_of((sequence,)))
    store.flush()
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert len(paths) == 3
    sizes = {path: len(find_columns(store, sequence, 0)) for path in paths}
    assert {*sizes.values()} == {3}
    paths[0].write_bytes(DAMAGES[damage](paths[0].read_bytes()))
    store = jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=2**20)
    with pytest.warns(RuntimeWarning, match=f"skipped: .*{paths[0].name}"):
        assert len(find_columns(store, sequence, 0)) == 2
    assert len(find_columns(store, sequence, 0)) == 2  # logged once


def test_a_damaged_file_is_found_again_after_rewriting(tmp_path):
    """Any process may rewrite it: the damage was in the contents, not the name."""
    sequence, fields = tuple(range(5)), dict(folder=tmp_path, max_folder_bytes=2**20)
    store, other = (jkv.BlockStore(0, **fields) for _ in "12")
    for writer in (store, other):
        writer.put(spilled_of((sequence,)))
        writer.flush()
        (path,) = tmp_path.glob("*.safetensors")
        good = path.read_bytes()
        path.write_bytes(DAMAGES["flipped"](good))
        with pytest.warns(RuntimeWarning, match="skipped: "):
            assert store.find(sequence) is None
        assert store.find(sequence) is None and store.count(sequence) == 0
        with pytest.warns(RuntimeWarning) if writer is other else nullcontext():
            writer.put(spilled_of((sequence,)))
            writer.flush()
        assert store.count(sequence) == 4
        np.testing.assert_array_equal(
            find_columns(store, sequence, 0)[0, sequence[:4]],
            columns_of(spilled_of((sequence,)))[0, sequence[:4]],
        )


@pytest.mark.parametrize("cause", ["EMFILE", "EIO", "EACCES", "ESTALE"])
def test_a_temporarily_unreadable_file_is_read_later(cause, tmp_path, monkeypatch):
    sequence = tuple(range(5))
    store = jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=2**20)
    store.put(spilled_of((sequence,)))
    store.flush()
    before = [*tmp_path.glob("*.safetensors")][0].read_bytes()

    def fail(*_):
        raise OSError(getattr(errno, cause), os.strerror(getattr(errno, cause)))

    with monkeypatch.context() as patch:
        patch.setattr(folders, "read_file", fail)
        with pytest.warns(RuntimeWarning, match="could not read"):
            assert store.find(sequence) is None
        with pytest.warns(RuntimeWarning, match="could not write"):
            store.put(spilled_of((sequence,)))  # it could lack entries of the file
            store.flush()
    assert [*tmp_path.glob("*.safetensors")][0].read_bytes() == before
    assert len(find_columns(store, sequence, 0)) == 1


def test_lookup_compares_tokens_not_only_digests(tmp_path, monkeypatch):
    """A file of another sequence is never found, even under the same name."""
    monkeypatch.setattr(stores, "next_digest", lambda digest, _: digest)
    store = jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=2**20)
    store.put(spilled_of(((1, 1, 1, 1, 1),)))
    store.flush()
    with pytest.warns(RuntimeWarning, match="tokens of another sequence"):
        assert store.find([2, 2, 2, 2, 2]) is None


def test_a_full_disk_warns_and_shrinks_the_store(tmp_path, monkeypatch):
    store = jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=2**20)
    store.put(spilled_of(((1,) * 5,)))
    store.flush()
    before = store.folder_bytes

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(folders, "write_file", fail)
        with pytest.warns(RuntimeWarning, match="the disk of .* is full"):
            store.put(spilled_of(((2,) * 5,)))
            store.flush()
    assert store.find([1] * 5) is not None and store.find([2] * 5) is None
    store.put(spilled_of(((3,) * 5,)))  # replaces the first
    store.flush()
    assert 0 < store.folder_bytes <= before
    assert store.find([3] * 5) is not None


def columns_in(path):
    return len([*path.glob("*.safetensors")])


def usage_of(monkeypatch, path, size):
    """Simulate a disk of `size` bytes that no other process uses."""

    def tell(_):
        used = sum(each.stat().st_size for each in path.iterdir())
        return SimpleNamespace(free=max(size - used, 0))

    monkeypatch.setattr(folders.shutil, "disk_usage", tell)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_full_disk_replaces_the_oldest_by_the_newest(is_told, tmp_path, monkeypatch):
    """Blocks of any writer count; the store grows again if space is freed.

    Either the disk reports its free space, or a write fails, as with a quota.
    """
    fields = dict(folder=tmp_path, max_folder_bytes=2**20)
    first, write = jkv.BlockStore(0, **fields), folders.write_file
    second = jkv.BlockStore(0, **fields)
    for n in range(8):
        first.put(spilled_of(((n,) * 5,)))
    first.flush()
    most = sum(path.stat().st_size for path in tmp_path.iterdir()) + 50

    def write_if_it_fits(path, tensors, metadata):
        used = sum(each.stat().st_size for each in tmp_path.iterdir())
        if used + folders.measure_file(tensors, metadata) > most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, tensors, metadata)

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if is_told:
            usage_of(patch, tmp_path, most)
        patch.setattr(folders, "write_file", write_if_it_fits)
        for n in range(8, 14):
            second.put(spilled_of(((n,) * 5,)))
            second.flush()
        assert columns_in(tmp_path) >= 7
        found = [second.find([n] * 5) is not None for n in range(14)]
        assert sum(found[8:]) == 6 if is_told else sum(found[8:]) >= 3
    for n in range(14, 24):
        second.put(spilled_of(((n,) * 5,)))
    second.flush()
    assert columns_in(tmp_path) >= 16
    assert all(second.find([n] * 5) is not None for n in range(14, 24))


def test_a_disk_without_space_is_not_an_error(tmp_path, monkeypatch):
    """Not even the layout can be written; the store continues in memory."""
    spilled = spilled_of(((1,) * 5,))
    store = jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=2**20)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        for name in ("write_file", "replacing"):
            patch.setattr(folders, name, fail)
        with pytest.warns(RuntimeWarning) as caught:  # including the writer's warning
            store.put(spilled)
            store.flush()
    assert any("layout.json" in str(each.message) for each in caught)
    assert not [*tmp_path.iterdir()]
    store.put(spilled)
    store.flush()
    later = jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=2**20)
    assert later.find([1] * 5).num_blocks == 1
    for each in (store, later):  # either may have written the layout
        shutil.rmtree(tmp_path)  # as a user may, to free space
        each.put(spilled_of(((2,) * 5,)))
        each.flush()
        fresh = jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=2**20)
        assert fresh.find([2] * 5).num_blocks == 1 and fresh.find([1] * 5) is None


def test_an_undeletable_file_does_not_stop_eviction(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "SCAN_SECONDS", 0.0)
    store = jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=6000)
    store.put(spilled_of(((0,) * 5,)))
    store.flush()
    (stuck,) = tmp_path.glob("*.safetensors")
    (tmp_path / f"{'0' * 48}.safetensors").mkdir()
    unlink = os.unlink

    def refuse(path, **options):
        if os.fspath(path) == os.fspath(stuck):
            raise PermissionError(errno.EACCES, "stuck")
        unlink(path, **options)

    monkeypatch.setattr(folders.os, "unlink", refuse)
    for n in range(1, 12):
        store.put(spilled_of(((n,) * 5,)))
        store.flush()
        assert store.find([n] * 5) is not None
    assert store.find([1] * 5) is None and stuck.exists()
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6000


def test_a_store_reads_blocks_of_other_processes(tmp_path):
    """A read-only process picks up the layout as soon as it is written."""
    fields = dict(folder=tmp_path, max_folder_bytes=2**20)
    reader = jkv.BlockStore(2**20, **fields)
    assert reader.find([1] * 5) is None and reader.count([1] * 5) == 0
    writer = jkv.BlockStore(0, **fields)
    writer.put(spilled_of(((1,) * 5,)))
    writer.flush()
    assert reader.count([1] * 5) == 4
    assert reader.find([1] * 5).num_blocks == 1
    assert jkv.BlockStore(2**20, **fields).find([1] * 5).num_blocks == 1
    other = jkv.BlockStore(
        0, folder=tmp_path / "b", max_folder_bytes=2**20, version="b"
    )
    late = jkv.BlockStore(0, folder=tmp_path / "b", max_folder_bytes=2**20)
    other.put(spilled_of(((1,) * 5,)))
    with pytest.raises(ValueError, match="must have version '', got 'b'"):
        late.find([1] * 5)


def test_versions_share_a_store_but_no_block(tmp_path):
    sequence = [1] * 5
    store = jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=2**20)
    names = [stores.Names(name) for name in ("a", "b")]
    store.put(spilled_of((tuple(sequence),)), names=names[0])
    for where in ("waiting", "in the folder"):
        assert store.count(sequence, names=names[0]) == 4, where
        assert (
            store.find(sequence) is None
            and store.find(sequence, names=names[1]) is None
        )
        store.flush()
    store.max_bytes = 2**20
    assert store.find(sequence, names=names[0]).num_blocks == 1  # now in memory
    store.rename("a", "b")
    assert store.find(sequence, names=names[1]).num_blocks == 1
    store.save()  # also under the new name
    later = jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=2**20)
    assert all(later.find(sequence, names=each).num_blocks == 1 for each in names)
    store.forget("b")
    assert store.num_blocks == 0 and store.find(sequence, names=names[1]) is not None


def test_a_folder_does_not_exceed_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "SCAN_SECONDS", 0.0)
    one = jkv.BlockStore(0, folder=tmp_path / "one", max_folder_bytes=2**20)
    one.put(spilled_of(((0,) * 5,)))
    one.flush()
    size = one.folder_bytes
    store = jkv.BlockStore(0, folder=tmp_path / "all", max_folder_bytes=3 * size)
    other = jkv.BlockStore(0, folder=tmp_path / "all", max_folder_bytes=3 * size)
    for n in range(8):  # two processes write alternately
        each = (store, other)[n % 2]
        each.put(spilled_of(((n,) * 5,)))
        each.flush()
        files = [*(tmp_path / "all").iterdir()]
        assert sum(path.stat().st_size for path in files) <= 3 * size
    assert store.find([7] * 5) is not None and store.find([0] * 5) is None
    with pytest.raises(ValueError, match="max_folder_bytes must be > 0"):
        jkv.BlockStore(0, folder=tmp_path)


KILLED = """
import os, random, signal, sys, time
import numpy as np
from jkv.tiers.folder import Folder, next_digest
from jkv.tiers.spilled import Held
folder, seed = sys.argv[1], int(sys.argv[2])
random.seed(seed)
header = {"salt": 0, "version": "", "layout": [4]}
for trip in range(100):
    begun, tell = os.pipe()
    child = os.fork()
    if child == 0:
        files = Folder(folder, 2**30)
        for n in range(1000):
            text = np.array([trip, n, 0, 0], np.int32)
            block = {"block.0.key_pool": np.full((2, 64), n, np.float32)}
            os.write(tell, b".")
            held = Held(arrays=block)
            files._write(next_digest(b"", text).hex(), text, held, header)
        os._exit(0)
    for _ in range(random.randint(1, 3)):  # files before it are whole
        os.read(begun, 1)
    time.sleep(random.uniform(0, 0.002))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(begun), os.close(tell)
files, num = Folder(folder, 2**30), 0
for trip in range(100):
    for n in range(1000):
        text = np.array([trip, n, 0, 0], np.int32)
        held = files.find(next_digest(b"", text), text, header)
        if held is None:
            break
        assert (held.arrays["block.0.key_pool"] == n).all()
        num += 1
print(num, len(files._damaged))
"""


def test_a_killed_process_leaves_complete_files(tmp_path):
    """A hundred times, at any moment: every file is complete."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(KILLED), tmp_path, "1"],
        capture_output=True,
        text=True,
        check=True,
    )
    num_found, num_damaged = map(int, ran.stdout.split())
    names = [path.name for path in tmp_path.iterdir()]
    whole = [name for name in names if name.endswith(".safetensors")]
    assert num_found == len(whole) > 20 and num_damaged == 0
    left = len(names) - len(whole)
    assert left <= 100  # temporary files, never read
    for path in tmp_path.glob(".*.tmp"):
        os.utime(path, (0, 0))
    jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=2**30)
    assert not [*tmp_path.glob(".*.tmp")]


def test_unsigned_salts_name_the_blocks_of_their_bits():
    prompt, store = (1,) * 9, jkv.BlockStore(2**20)
    store.put(spilled_of((prompt,), -1))
    for salt in (-1, 2**32 - 1, np.uint32(2**32 - 1)):
        assert store.count(prompt, salt) == 8
        found = store.find(prompt, salt)
        assert found.num_blocks == 2 and found.salts.tolist() == [-1, -1]
    store.discard(prompt, 2**32 - 1)
    assert store.num_blocks == 0


WRONG_KEYS = [
    (dict(tokens=[1.0] * 9), "tokens must be one list of token ids"),
    (dict(tokens=[[1] * 9]), "tokens must be one list of token ids"),
    (dict(tokens=[[1], [1, 1]]), "tokens must be one list of token ids"),
    (dict(tokens=[2**40] * 9), "tokens must be one list of token ids"),
    (dict(tokens=[1, -1]), "tokens must be one list of token ids"),
    (dict(tokens="abc"), "tokens must be one list of token ids"),
    (dict(tokens=None), "tokens must be one list of token ids"),
    (dict(salt=0.7), "salt must be an int"),
    (dict(salt="a"), "salt must be an int"),
    (dict(salt=[0]), "salt must be an int"),
    (dict(salt=2**32), "salt must fit in 32 bits"),
    (dict(skip=-3), "skip must be >= 0, got -3"),
    (dict(skip=1.5), "skip must be an int, got 1.5"),
]


@pytest.mark.parametrize("fields, words", WRONG_KEYS)
def test_invalid_keys_are_refused_by_name(fields, words):
    store = jkv.BlockStore(2**20)
    store.put(spilled_of(((1,) * 9,)))
    names = ("find",) if "skip" in fields else ("find", "count", "discard")
    for name in names:
        with pytest.raises(ValueError, match=words):
            getattr(store, name)(**{"tokens": [1] * 9, **fields})
    assert store.find([]) is None and store.count(np.zeros(0)) == 0


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1.5, "4GB", None, True])
def test_invalid_sizes_are_refused_by_name(wrong, tmp_path):
    with pytest.raises(ValueError, match="^max_bytes must be an int"):
        jkv.BlockStore(wrong)
    with pytest.raises(ValueError, match="^max_folder_bytes must be an int"):
        jkv.BlockStore(0, folder=tmp_path / "f", max_folder_bytes=wrong)
    store = jkv.BlockStore(2**20)
    with pytest.raises(ValueError, match="^max_bytes must be an int"):
        store.max_bytes = wrong
    for use in (
        store.begin_version,
        lambda version: jkv.BlockStore(1, version=version),
    ):
        with pytest.raises(ValueError, match="^version must be a str"):
            use(wrong if wrong != "4GB" else 4)


def test_a_column_is_found_until_its_last_write(tmp_path, monkeypatch):
    """Of two writes in the queue, the first does not hide the second."""
    files, tokens = folders.Folder(str(tmp_path), 2**20), np.arange(T, dtype=np.int32)
    digest, header = folders.next_digest(b"", tokens), {"salt": 0, "version": ""}
    first, second = (
        Held(arrays={f"block.{n}.key_pool": np.ones(4, np.float32)}) for n in range(2)
    )
    begun, gate, write = queue.Queue(), threading.Semaphore(0), folders.write_file

    def write_later(*arguments):
        begun.put(None)
        gate.acquire(timeout=10)
        write(*arguments)

    monkeypatch.setattr(folders, "write_file", write_later)
    for held in (first, second):
        files.write(digest, tokens, held, header)
    both = {"block.0.key_pool", "block.1.key_pool"}
    for _ in range(2):
        begun.get(timeout=10)
        found = files.find(digest, tokens, header)
        gate.release()
        assert {*found.arrays} == both
    files.flush()
    assert {*files.find(digest, tokens, header).arrays} == both
    assert not files._waiting and not files._waiting_bytes


def test_copies_of_a_prefix_take_time_in_proportion_to_its_length(monkeypatch):
    cache, prompt = small_cache(num_blocks=24, prefix_caching=True), [1] * 13
    cache, opened = allocate(cache, 0, tokens=[prompt])
    seq_id = int(opened.seq_ids[0])
    cache, step = append(cache, seq_id, len(prompt), tokens=prompt)
    cache, _ = free(write_tokens(cache, step, prompt), seq_id)
    added, add = [], SpilledBuilder.add

    def count(*arguments):
        added.append(arguments)
        return add(*arguments)

    monkeypatch.setattr(SpilledBuilder, "add", count)
    found = copy_prefix(cache, np.array(prompt, np.int32), 0)
    assert found.num_blocks == len(added) == 3
    assert found.parents.tolist() == [*range(-1, 2)]


def test_mismatched_layouts_are_refused_by_name(tmp_path):
    spilled = spilled_of(((1,) * 9,))
    wider = small_cache(num_blocks=24, prefix_caching=True, head_dim=16)
    with pytest.raises(ValueError, match=r"block\.0\.key_pool is .*, in this cache"):
        jkv.restore(wider, spilled)
    states = jkv.init(make_config("keys+state"))
    with pytest.raises(ValueError, match="groups with a state is 0, in this cache 1"):
        jkv.restore(states, spilled)
    store = jkv.BlockStore(2**20, folder=tmp_path, max_folder_bytes=2**20)
    store.put(spilled)
    with pytest.raises(ValueError, match="store must have the layout"):
        store.put(jkv.spill(states, 1)[1])
    (tmp_path / "layout.json").write_text("{")
    with pytest.raises(ValueError, match=r"damaged .*layout\.json"):
        jkv.BlockStore(0, folder=tmp_path, max_folder_bytes=9)
    with pytest.raises(ValueError, match="max_bytes must be >= 0"):
        jkv.BlockStore(-1)
    with pytest.raises(ValueError, match="max_bytes must be >= 0"):
        store.max_bytes = -1
    with pytest.raises(ValueError, match="no prefix index"):
        jkv.spill(small_cache(), 1)
