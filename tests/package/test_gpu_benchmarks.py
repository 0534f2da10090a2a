"""GPU benchmarks: resumable parts, chained calls, a whole model."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # benchmarks are not a package
import gpu_brief  # noqa: E402
import gpu_profile  # noqa: E402
import launches  # noqa: E402
from gpu_calls import Operands, Workload, find_workloads, make_program  # noqa: E402
from gpu_parts import BATCHES, Part, list_parts, run_parts  # noqa: E402
from llama import Llama, count_step_bytes  # noqa: E402

pytestmark = pytest.mark.one_end


def write(path, text):
    return ("-c", f"open({str(path)!r}, 'a').write({text!r})")


@pytest.mark.further
def test_parts_resume_where_they_were_stopped(tmp_path):
    notes, trace = tmp_path / "notes.json", tmp_path / "trace"
    parts = [
        Part("well", write(trace, "a")),
        Part("fails", ("-c", "raise SystemExit(3)")),
        Part("too long", ("-c", "import time; time.sleep(60)")),
        Part("behind them", write(trace, "b")),
    ]
    assert run_parts(parts, notes, limit=5) == 2
    ended = {name: one["status"] for name, one in json.loads(notes.read_text()).items()}
    assert ended == {"well": 0, "fails": 3, "too long": -1, "behind them": 0}
    # Only the failed part is tried again, and may succeed.
    parts[1] = Part("fails", write(trace, "c"))
    assert run_parts([*parts[:2], parts[3]], notes, limit=5) == 0
    assert trace.read_text() == "abc"


def test_every_part_is_listed():
    parts = list_parts()
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        files = [each for each in part.arguments if each.endswith(".py")]
        assert all((ROOT / each).exists() for each in files) and part.arguments
    assert sum(part.name.startswith("model, ") for part in parts) == 2 * len(BATCHES)


@pytest.mark.parametrize("width", [4, 3])
def test_benchmark_calls_are_chained(width):
    workload = Workload((8,), calls=3)
    layers = []

    def attend(queries, operands, layer):
        del operands
        layers.append(layer)
        return queries[..., :width] + 10**layer

    queries = jnp.zeros((1, 1, 4))
    lengths = jnp.array([8])
    operands = Operands(queries, {}, jnp.zeros((1, 1), jnp.int32), lengths)
    found = make_program(workload, attend)(operands)
    assert layers == [0, 1, 2]
    np.testing.assert_array_equal(found[0, 0], [111] * width + [0] * (4 - width))


def test_benchmark_reads_exceed_the_last_level_cache():
    for workload in find_workloads(80e9):
        if not workload.is_prefill:
            assert workload.num_bytes * workload.num_layers > 256 * 10**6, workload


def test_the_model_has_the_size_of_llama_3_8b():
    model = Llama()
    params = jax.eval_shape(model.draw_params)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 8_030_261_248
    small = Llama(2, 4, 2, 16, 128, 256).draw_params("int8")
    layer = 2 * (64 * 64 + 64 * 32) + 3 * 64 * 128
    # One-byte elements, a two-byte scale for each column, and norms.
    columns = 2 * (64 + 32) + 2 * 128 + 64
    expected = 2 * (layer + 2 * columns + 4 * 64) + 64 * 256 + 2 * 256 + 2 * 64
    assert count_step_bytes(small) == expected


@pytest.mark.further
def test_a_tiny_model_is_timed(tmp_path):
    out = tmp_path / "model.json"
    script = str(ROOT / "benchmarks" / "gpu_model.py")
    options = "--tiny", "--weights", "int8", "--only", "4x24", "--rounds", "1"
    command = [sys.executable, script, *options, "--json", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    (run,) = json.loads(out.read_text())["runs"]
    rows = {row["contender"]: row for row in run["rows"]}
    assert rows["generate"]["tokens/s"] and rows["engine"]["tokens/s"]
    assert "torch" in rows["torch, CUDA graph"].get("refused", "torch")


# A loop in XLA's GPU text form, shortened: kernels in a separate computation, as in a
# command buffer, and a loop without any.
MODULE = """HloModule jit_decode, is_scheduled=true

%fused_add (p: s32[]) -> s32[] {
  ROOT %add = s32[] add(%p, %p)
}

%command_buffer (p: s32[]) -> (u16[4,8]) {
  %store = (u16[4,8]{1,0}) custom-call(%p), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %pieces = (f32[4]{0}) custom-call(%store), custom_call_target="triton"
}

%layers.clone (arg.1: (s32[], u16[4,8])) -> (s32[], u16[4,8]) {
  %arg.1 = (s32[], u16[4,8]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%arg.1), index=0
  %loop_add_fusion = s32[] fusion(%count), kind=kLoop, calls=%fused_add
  %call = (u16[4,8]{1,0}) call(%count), to_apply=%command_buffer
  ROOT %tuple = (s32[], u16[4,8]{1,0}) tuple(%loop_add_fusion, %call)
}

%other (arg.2: (s32[])) -> (s32[]) {
  %one = s32[] fusion(%arg.2), kind=kLoop, calls=%fused_add
  %two = s32[] fusion(%one), kind=kLoop, calls=%fused_add
}

ENTRY %main (cache: u16[4,8]) -> u16[4,8] {
  %while.1 = (s32[]) while(%start), condition=%less, body=%other
  %while.2 = (s32[], u16[4,8]{1,0}) while(%init), condition=%less, body=%layers.clone
}
"""


def test_launches_of_a_decode_step_are_counted(monkeypatch):
    compiled = launches.compile_step()
    assert [*launches.find_faults(compiled)] == ["no loop over layers has kernels"]
    more = "".join(f"  %copy.{i} = s32[] copy(%count)\n" for i in range(2))
    at = "  %call = (u16"
    for text, faults in (
        (MODULE, []),
        (MODULE.replace(at, more + at), ["5 launches for each layer, 4 for MI300X"]),
    ):
        monkeypatch.setattr(compiled, "as_text", lambda text=text: text, raising=False)
        assert [*launches.find_faults(compiled)] == faults


def brief_part(name, seconds=20.0, *, is_timed=True, script=""):
    """Return a part that waits for its turn, runs a line of Python and saves a row."""
    lines = (
        f"import sys, time; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})",
        "import os, pathlib, json",
        "turn = os.environ['JKV_TURN']",
        "pathlib.Path(turn + '.ready').touch()",
        "while not pathlib.Path(turn + '.go').exists(): time.sleep(0.01)",
        f"began = time.monotonic(); {script or 'pass'}",
        "row = {'what': turn, 'median': began, 'p90': time.monotonic()}",
        "pathlib.Path(sys.argv[1]).write_text(json.dumps([row]))",
    )
    return gpu_brief.Part(name, ("-c", "\n".join(lines)), seconds, is_timed)


def test_brief_passes_the_device_from_part_to_part(tmp_path, capsys):
    parts = [
        brief_part("first", script="time.sleep(0.2)"),
        brief_part("second", script="time.sleep(0.2)"),
        brief_part("fails", script="raise SystemExit(3)"),
        brief_part("too long", seconds=0.3, script="time.sleep(60)"),
        brief_part("free", is_timed=False),
    ]
    failed = gpu_brief.run_brief(True, tmp_path / "results.json", parts)
    assert failed == 2
    shown = capsys.readouterr().out
    assert "fails: failed with 3" in shown and "too long: out of time" in shown
    rows = {
        part.name: json.loads(
            (tmp_path / "brief" / f"{part.file_name}.json").read_text()
        )
        for part in parts
        if part.name in ("first", "second", "free")
    }
    assert rows["first"][0]["p90"] <= rows["second"][0]["median"]


def test_profile_subtracts_the_shorter_run():
    events = [("jkv_decode", 0, 2000), ("fusion.1", 3000, 1000)]
    few = gpu_profile.read_events(events)
    later = [(name, start + 5000, took) for name, start, took in events]
    many = gpu_profile.read_events([*events, *later, ("gemm_x", 10_000, 4000)])
    rows = {row["kernel"]: row for row in gpu_profile.subtract(many, few, steps=2)}
    assert rows["jkv_decode"]["launches"] == 0.5
    assert rows["jkv_decode"]["us"] == pytest.approx(1.0)
    assert rows["gemm_x"]["group"] == "products"
    # The runs span 14 and 4 us; 3.5 of the 5 us of a step are busy.
    assert rows["idle"]["us"] == pytest.approx(1.5)
    groups = {row["group"]: row for row in gpu_profile.sum_groups(rows.values())}
    assert groups["attention"]["us"] == pytest.approx(1.0)


@pytest.mark.further
def test_brief_runs_on_a_cpu(tmp_path):
    parts = gpu_brief.list_parts(quick=True)
    assert gpu_brief.run_brief(True, tmp_path / "results.json", parts) == 0
    for part in parts:
        rows = json.loads((tmp_path / "brief" / f"{part.file_name}.json").read_text())
        assert rows, part.name
