"""Executables stored in a folder are reused only for equal inputs."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.decoding import DraftModel
from jkv.serving import Engine, KeptPrograms
from jkv.serving.device.loop import BoundProgram

NUM_TRACES = []


@functools.partial(jax.jit, static_argnames=("model", "size"), donate_argnames="state")
def advance(model, state, step, *, size):
    """A program of several fusions, which XLA compiles as separate functions."""
    NUM_TRACES.append(size)
    doubled = state["x"] * 2
    total = jnp.cumsum(jnp.where(doubled > 0, doubled, 0))
    return {"x": model(doubled[::-1] + step)}, total @ total[:, None]


def double(x):
    return x * 2


def run(kept, static=(), size=3, **changed):
    """Return the program's result, and the number of traces in a new process."""
    static = {"model": double, "size": size, **dict(static)}
    dynamic = {
        "state": {"x": jnp.arange(float(size)) - 1},
        "step": np.float32(1),
    } | changed
    jax.clear_caches()
    before = len(NUM_TRACES)
    program = BoundProgram(advance, kept, static)
    shapes = program.find_shapes(**dynamic)
    state, total = program(**dynamic)
    assert shapes[0]["x"].shape == state["x"].shape
    assert dynamic["state"]["x"].is_deleted()
    return (state["x"].tolist(), total.tolist()), len(NUM_TRACES) - before


@pytest.fixture
def kept(tmp_path):
    return KeptPrograms("double", folder=tmp_path / "kept")


def test_a_program_is_traced_once_for_all_runs(kept):
    expected, _ = run(None)
    assert run(kept) == (expected, 1)
    assert run(kept) == (expected, 0)


@pytest.mark.one_end
def test_a_program_is_reused_only_for_equal_inputs(kept, tmp_path):
    """Another version, code, size, shape, dtype or setting needs a new program."""
    file = tmp_path / "model.py"
    file.write_text("SCALE = 2")
    spec = importlib.util.spec_from_file_location("model", file)
    source = importlib.util.module_from_spec(spec)

    def with_source():
        return KeptPrograms("double", kept.folder, sources=(source,))

    for one in (
        lambda: run(kept),
        lambda: run(KeptPrograms("twice", kept.folder)),
        lambda: run(with_source()),
        lambda: file.write_text("SCALE = 3") and run(with_source()),
        lambda: run(kept, size=4),
        lambda: run(kept, step=1.0),
        lambda: run(kept, step=jnp.ones((1,))),
    ):
        assert one()[1] == 1
        assert one()[1] == 0
    with jax.default_matmul_precision("highest"):
        assert run(kept)[1] == 1


@pytest.mark.one_end
def test_unreadable_programs_are_recompiled(kept, caplog):
    expected, _ = run(kept)
    (path,) = pathlib.Path(kept.folder).iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert run(kept) == (expected, 1)
    assert "compiling it again" in caplog.text
    assert run(kept) == (expected, 0)


@pytest.mark.one_end
def test_unwritable_programs_are_not_stored(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert run(KeptPrograms("double", folder=tmp_path / "file" / "below"))[1] == 1
    assert "could not save" in caplog.text


def test_programs_from_the_jax_cache_are_stored_completely(kept):
    """If XLA read and rewrote an executable, its functions would be missing."""
    expected, _ = run(None)
    run(None)  # from the tests' compilation cache, if any
    was_enabled = jax.config.jax_enable_compilation_cache
    run(kept)
    assert jax.config.jax_enable_compilation_cache == was_enabled
    assert run(kept) == (expected, 0)


@pytest.mark.one_end
def test_an_engine_starts_without_tracing_its_model(kept):
    num_calls = []

    def count_on(_, tokens, cache, batch, *, all_rows=False):
        num_calls.append(1)
        logits = jax.nn.one_hot(tokens + 1, 10)
        return (logits if all_rows else logits[batch.last_rows]), cache

    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=2,
        block_size=4,
        max_sequences=1,
        max_context_length=8,
    )

    def answer():
        draft = DraftModel(
            # A new object in each run, as in each process.
            model=lambda *args, **options: count_on(*args, **options),
            params=None,
            config=config,
            num_tokens=2,
            cost=1.0,
        )
        engine = Engine(
            count_on,
            None,
            jkv.init(jkv.with_drafter(config, draft)),
            max_running=1,
            num_ahead=0,
            max_new_tokens=4,
            max_prompt_tokens=2,
            num_steps=2,
            row_counts=(3,),
            speculate=draft,
            kept_programs=kept,
        )
        assert engine.warm_up() == 3
        (found,) = engine.generate([[3, 4]], max_new_tokens=4)
        assert engine.stats().accepted_tokens == 2
        return found.tokens

    assert answer() == [5, 6, 7, 8]
    assert num_calls and len(list(pathlib.Path(kept.folder).iterdir())) == 3
    num_calls.clear()
    jax.clear_caches()
    assert answer() == [5, 6, 7, 8]
    assert not num_calls
