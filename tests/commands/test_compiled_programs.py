"""The persistent compilation cache is in the user's cache folder, and only there."""

import os
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support.small_caches import small_config

import jkv
from jkv import xla_flags
from jkv.commands import compiled_programs
from jkv.commands.compiled_programs import keep_compiled_programs

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def own_settings(monkeypatch, tmp_path):
    """No configured folder and a temporary home; restored afterwards."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_compiled_programs_are_cached_on_disk(tmp_path):
    folder = keep_compiled_programs()
    assert folder == tmp_path / "xdg" / "jkv" / "programs"
    program = jax.jit(lambda x: jnp.cos(x) * 3)
    program(jnp.arange(3.0))
    entries = [path.name for path in folder.iterdir()]
    assert any("lambda" in name for name in entries), entries


@pytest.mark.one_end
def test_a_folder_is_given_as_a_string(tmp_path):
    """Also for eager verbs: each is a small program."""
    folder = jkv.keep_compiled_programs(str(tmp_path / "mine"))
    assert folder == tmp_path / "mine"
    jax.clear_caches()
    cache = jkv.init(small_config(num_blocks=9))
    cache, opened = jkv.allocate(cache, [3])
    jkv.free(cache, opened.seq_ids)
    names = {path.name for path in folder.iterdir()}
    assert any("allocate" in name for name in names), names
    assert any("free" in name for name in names)
    with pytest.raises(jkv.UsageError, match="folder must be"):
        jkv.keep_compiled_programs(3)


@pytest.mark.one_end
def test_a_configured_cache_folder_is_kept(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "chosen"))
    assert keep_compiled_programs() is None
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "chosen")
    assert not (tmp_path / "xdg").exists()


@pytest.mark.one_end
def test_nothing_is_cached_without_write_permission(tmp_path):
    (tmp_path / "file").write_text("")
    assert keep_compiled_programs(tmp_path / "file" / "below") is None
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.one_end
@pytest.mark.parametrize(
    "system, environment, expected",
    [
        ("linux", {"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "HOME/.cache"),
        ("linux", {"XDG_CACHE_HOME": ""}, "HOME/.cache"),
        ("darwin", {}, "HOME/Library/Caches"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local"),
    ],
)
def test_each_system_has_its_folder(
    monkeypatch, tmp_path, system, environment, expected
):
    monkeypatch.setattr(xla_flags.sys, "platform", system)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = xla_flags.find_user_cache()
    assert found == pathlib.Path(expected.replace("HOME", str(tmp_path)))


@pytest.mark.one_end
def test_the_folder_size_is_limited(tmp_path):
    for age in range(6):
        path = tmp_path / f"{age}"
        path.write_bytes(bytes(100))
        os.utime(path, (1000 - age, 1000 - age))
    compiled_programs.remove_oldest(tmp_path, 600)
    assert len(list(tmp_path.iterdir())) == 6
    compiled_programs.remove_oldest(tmp_path, 599)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
