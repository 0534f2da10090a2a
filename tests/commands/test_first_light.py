"""python -m jkv.doctor --first-light reports crashes, hangs and wrong results."""

import json
import os
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import xla_flags
from jkv.commands import first_light, probes
from jkv.commands.children import ask
from jkv.commands.diagnosis import main
from jkv.commands.first_light import WITHOUT_BUFFERS
from jkv.commands.report import clean
from jkv.xla_flags import NO_COMMAND_BUFFERS

pytestmark = pytest.mark.one_end

# A machine whose loops crash in command buffers, with other faults. It replaces the
# plugin and starts no JAX. A process that it leaves behind would write into a file
# later.
MACHINE = """
import json, os, signal, subprocess, sys, time
facts = {
    "versions": {"jaxlib": "0.11.0", "jax-rocm10-plugin": "0.11.0"}, "environment": {},
    "drivers": {}, "platform": "rocm", "log": "/home/someone/jkv/run.log",
}
for name in sys.argv[1:]:
    line = {"verdict": "ok", "detail": "", "facts": {}}
    if name == "machine":
        line["facts"] = facts
    if name == "drawn numbers":
        line |= {"verdict": "FAILED", "detail": "No FFI handler registered for it"}
    if name.startswith("loops") and "buffer" not in os.environ["XLA_FLAGS"]:
        print("in /home/someone/driver.so", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if name.startswith("scatters"):
        later = "import sys, time; time.sleep(4); open(sys.argv[1], 'w')"
        subprocess.Popen([sys.executable, "-c", later, os.environ["LEFT_BEHIND"]])
        time.sleep(60)
    if name == "a tall product":
        line |= {"verdict": "FAILED", "detail": "75712 of 600000 rows differ"}
    if name.startswith("kernel: rows stored"):
        line |= {"verdict": "FAILED", "detail": "ValueError: key_pool differs"}
    if name.startswith("kernel: derivative"):
        line |= {"verdict": "not checked", "detail": "no tile"}
    if name == "generate":
        line["detail"] = os.environ["XLA_FLAGS"]
    print(json.dumps(line), flush=True)
"""


@pytest.fixture
def broken_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_xnnpack=false")
    monkeypatch.setenv("LEFT_BEHIND", str(tmp_path / "left_behind"))
    monkeypatch.setattr(first_light, "COMMAND", (sys.executable, "-c", MACHINE))
    monkeypatch.setattr(first_light, "EACH", 1.5)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.further
def test_each_fault_is_reported_with_its_fix(broken_machine, capsys):
    """The command finishes in time, with a report, and leaves no process."""
    assert main(["--first-light"]) == 1
    output = capsys.readouterr().out
    table = output[output.index("check  ") :]
    rows = {
        line.split("  ")[0]: line.split(None, 1)[1]
        for line in table.splitlines()
        if line
    }
    for name, kind, cure in (
        ("drawn numbers", "no handler", "extra rocm7"),
        (probes.LOOPS, "crash", NO_COMMAND_BUFFERS),
        (WITHOUT_BUFFERS, "ok", ""),
        ("scatters of a step", "hang", "newer plugin"),
        ("a tall product", "wrong", "2^19"),
        ("kernel: rows stored, int8", "wrong", "JKV_WRITE_KERNEL=0"),
        ("kernel: decode, bfloat16", "ok", ""),
        ("kernel: derivative, float32, sinks", "not checked", ""),
    ):
        assert f" {kind}" in rows[name] and cure in rows[name], name
    assert f"XLA_FLAGS='--xla_cpu_use_xnnpack=false {NO_COMMAND_BUFFERS}'" in output

    path = broken_machine / "jkv-first-light.json"
    report = json.loads(path.read_text())
    assert path.stat().st_size < 200_000 and "someone" not in path.read_text()
    found = {each["what"]: each for each in report["findings"]}
    assert found[probes.LOOPS]["detail"].startswith("crashed: SIGSEGV | in <path>")
    assert "cure" in found[probes.LOOPS] and "cure" not in found[WITHOUT_BUFFERS]
    # Steps after the loops ran with the required flag.
    assert NO_COMMAND_BUFFERS in found["generate"]["detail"]
    assert any("39634" in each["what"] for each in report["findings"])
    time.sleep(3.5)
    assert not (broken_machine / "left_behind").exists()


@pytest.mark.further
@pytest.mark.usefixtures("broken_machine")
def test_required_flags_are_set_or_warned_about_next_time(monkeypatch):
    assert xla_flags.read_missing_flags() == []
    main(["--first-light"])
    with pytest.warns(RuntimeWarning, match=NO_COMMAND_BUFFERS):
        xla_flags.warn_of_missing_flags()
    # Another plugin may not need it.
    with monkeypatch.context() as patched:
        patched.setattr(xla_flags, "find_plugins", lambda: {"jaxlib": "9.9.9"})
        assert xla_flags.read_missing_flags() == []
    xla_flags.set_known_flags()
    assert os.environ["XLA_FLAGS"].split() == [
        "--xla_cpu_use_xnnpack=false",
        NO_COMMAND_BUFFERS,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xla_flags.warn_of_missing_flags()
    # After a fix the flag is forgotten; the user's own setting needs no hint.
    mended = MACHINE.replace('"buffer" not in', '"nothing" in')
    monkeypatch.setattr(first_light, "COMMAND", (sys.executable, "-c", mended))
    main(["--first-light"])
    monkeypatch.delenv("XLA_FLAGS")
    assert xla_flags.read_missing_flags() == []


@pytest.mark.usefixtures("broken_machine")
def test_no_flag_is_reported_if_none_helps(monkeypatch, capsys):
    worse = MACHINE.replace('"buffer" not in', '"nothing" not in')
    monkeypatch.setattr(first_light, "COMMAND", (sys.executable, "-c", worse))
    main(["--first-light"])
    output = capsys.readouterr().out
    assert output.count("no known flag helps") == 2 and "set in the" not in output
    assert xla_flags.read_missing_flags() == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"flags": 3, "versions": 1}'])
def test_a_broken_flags_file_is_ignored(monkeypatch, tmp_path, text):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "jkv").mkdir()
    (tmp_path / "jkv" / "first-light.json").write_text(text)
    assert xla_flags.read_missing_flags() == []


def test_a_machine_that_cannot_start_jax_is_reported(broken_machine, monkeypatch):
    monkeypatch.setattr(
        first_light, "COMMAND", (sys.executable, "-c", "raise SystemExit('no device')")
    )
    assert main(["--first-light", "--report", "light.json"]) == 1
    (finding,) = json.loads((broken_machine / "light.json").read_text())["findings"]
    assert finding["detail"] == "no device" and "driver" in finding["cure"]


def test_the_command_finishes_in_time(broken_machine, monkeypatch):
    monkeypatch.setattr(first_light, "TOTAL", 2.0)
    silent = "import time; time.sleep(60)"
    monkeypatch.setattr(first_light, "COMMAND", (sys.executable, "-c", silent))
    began = time.monotonic()
    answers = first_light.FirstLight(
        first_light.Report(), began + first_light.TOTAL, ""
    ).try_all(["first", "second", "third"])
    assert time.monotonic() - began < 20
    assert [each.verdict for each in answers] == ["FAILED", "FAILED", "not checked"]
    assert "hangs" in answers[0].detail and "time is over" in answers[2].detail
    assert broken_machine.exists()


# A child process of jkv, with stubs instead of GPU results.
CHILD = """
import os, sys
from jkv.commands.children import answer
def wrong(): raise ValueError("wrong numbers")
def refuse(): raise NotImplementedError("no tile")
tries = {"right": lambda: "yes", "facts": lambda: {"a": 1}, "wrong": wrong,
         "refused": refuse, "gone": lambda: os._exit(3)}
answer(tries, sys.argv[1:])
"""


def test_a_child_process_reports_each_check():
    command = (sys.executable, "-c", CHILD)
    names = ("right", "facts", "wrong", "gone", "refused")
    found = list(ask(command, names, lambda: 60.0))
    assert [each[:3] for each in found] == [
        ("right", "ok", "yes"),
        ("facts", "ok", ""),
        ("wrong", "FAILED", "ValueError: wrong numbers"),
        ("gone", "FAILED", "its process ended with status 3"),
        ("refused", "not checked", "no tile"),
    ]
    assert found[1].facts == {"a": 1}


def test_probes_detect_wrong_results(monkeypatch):
    """The CPU's results with one bit or one row changed."""
    monkeypatch.setattr(probes, "TALL", (600, 8, 4))
    probes.multiply_tall()
    probes.draw_numbers()
    right = jnp.matmul
    monkeypatch.setattr(jnp, "matmul", lambda a, b: right(a, b).at[500:].add(1))
    with pytest.raises(ValueError, match="100 of 600 rows differ, from 500 on"):
        probes.multiply_tall()
    wanted = {"a": np.arange(3, dtype=np.int32), "b": np.float32(0)}
    probes.require_equal(wanted, jax.tree.map(jnp.asarray, wanted))
    with pytest.raises(ValueError, match=r"in replay 3 \['b'\] is not the CPU's"):
        probes.require_equal(wanted | {"b": np.float32(-0.0)}, wanted, "in replay 3 ")


def test_loops_and_scatters_are_compared_with_the_cpu(monkeypatch):
    monkeypatch.setattr(probes, "NUM_REPLAYS", 3)
    probes.replay_loops()
    compared = []
    monkeypatch.setattr(probes, "require_equal", lambda *each: compared.append(each))
    probes.scatter_many()
    ((found, _),) = compared
    lengths = found.metadata.sequences.context_lengths
    assert (np.asarray(lengths) == probes.NUM_APPENDED).all()


def test_each_kernel_has_a_probe():
    names = [*probes.list_tries(is_on_cpu=False)]
    assert len(names) == len({*names})
    for part in ("decode, bfloat16", "prefill, float16", "int8", "blocks of 64"):
        assert any(part in name for name in names), part
    wanted = {"kernel: derivative, float32, sinks", "kernel: rows stored, int8"}
    assert wanted | {"generate", "jkv's own lowering: int8"} <= {*names}
    # Probes on a CPU are among the names that a child accepts.
    assert len(probes.list_tries(is_on_cpu=True)) < 10


def test_reports_contain_no_names_or_paths(monkeypatch):
    monkeypatch.setattr("jkv.commands.report._find_names", lambda: ("ada", "tower"))
    output = {
        "a": ["/home/ada/x.so: ada@tower", r"C:\Users\ada\x", "3 GB/s, 5 and/or 6"],
        "b": 5,
        "/opt/rocm": "~/work/here.txt adage",
    }
    assert clean(output) == {
        "a": ["<path>: <name>@<name>", "<path>", "3 GB/s, 5 and/or 6"],
        "b": 5,
        "/opt/rocm": "<path> adage",
    }
    assert len(clean("x" * 10_000)) < 2_100


@pytest.mark.further
def test_on_a_cpu_every_check_passes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "light.json"
    assert main(["--first-light", "--report", str(path)]) == 0
    found = json.loads(path.read_text())["findings"]
    assert {each["verdict"] for each in found} <= {"ok", "warning"}
    assert {"generate", WITHOUT_BUFFERS} <= {each["what"] for each in found}
