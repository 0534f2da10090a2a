"""python -m jkv.doctor: a report of its findings, and an exit status."""

import functools
import itertools
import json
import os
import re
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.attention.kernel.backend import Way
from jkv.attention.kernel.launches.slots import store_rows
from jkv.commands import (
    bookkeeping,
    collectives,
    correctness,
    diagnosis,
    report,
    stores,
)
from jkv.commands.diagnosis import main
from jkv.commands.exiting import run_process
from jkv.commands.facts import list_known_faults
from jkv.commands.report import Report, Step, format_duration, judge, run_checks


@pytest.fixture
def few_cases(monkeypatch):
    """Two cases, one dtype and small copies, to save time."""
    wanted = ("mixed, with padding", "sinks")
    cases = tuple(case for case in correctness.CASES if case.name in wanted)
    monkeypatch.setattr(correctness, "CASES", cases)
    monkeypatch.setattr(correctness, "IMPLEMENTATIONS", ("xla",))
    monkeypatch.setattr(correctness, "TOLERANCES", {"float32": 2e-5})
    monkeypatch.setattr(correctness, "QUICK_CASES", wanted)
    monkeypatch.setattr(correctness, "DERIVED_CASES", ("sinks",))
    monkeypatch.setattr(diagnosis, "keep_compiled_programs", lambda: None)


def findings(path, verdict):
    report = json.loads(path.read_text())
    return [each for each in report["findings"] if each["verdict"] == verdict]


@pytest.mark.newest_further
@pytest.mark.usefixtures("few_cases")
def test_a_working_machine(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["--report", str(path)]) == 0
    assert findings(path, "FAILED") == []
    what = [each["what"] for each in findings(path, "ok")]
    assert any(name.startswith("500 cycles") for name in what)
    assert {"xla, float32: 2 cases", "gradient of xla: 1 cases"} <= {*what}
    unchecked = [each["what"] for each in findings(path, "not checked")]
    assert {"the compiled kernel", "collectives"} <= {*unchecked}
    facts = json.loads(path.read_text())["facts"]
    assert facts["versions"]["jax"] and facts["devices"]
    assert facts["versions"]["jkv"] == jkv.__version__
    output = capsys.readouterr().out
    assert "nothing failed" in output
    titles = re.findall(r"^(\w.*) \((\d+) of 9.*\)$", output, re.MULTILINE)
    assert [int(number) for _, number in titles] == [*range(1, 10)]


@pytest.mark.one_end
@pytest.mark.parametrize(
    "spoil",
    [lambda found: jnp.roll(found, 1, axis=0), lambda found: found * jnp.nan],
    ids=["other rows", "nan"],
)
@pytest.mark.usefixtures("few_cases")
def test_wrong_attention_is_reported(tmp_path, monkeypatch, spoil):
    right = correctness.paged_attention

    def wrong(*arguments, implementation, **options):
        found = right(*arguments, implementation="reference", **options)
        return spoil(found) if implementation == "xla" else found

    monkeypatch.setattr(correctness, "paged_attention", wrong)
    monkeypatch.setattr(diagnosis, "check_cycles", lambda: None)
    path = tmp_path / "report.json"
    assert main(["--quick", "--report", str(path)]) == 1
    assert len(findings(path, "FAILED")) == 2  # each case


@pytest.mark.one_end
@pytest.mark.usefixtures("few_cases")
def test_a_wrong_gradient_is_reported(monkeypatch):
    right = correctness.paged_attention

    def wrong(*arguments, implementation, **options):
        found = right(*arguments, implementation="reference", **options)
        return found * (1.01 if implementation == "xla" else 1)

    monkeypatch.setattr(correctness, "paged_attention", wrong)
    found = Report()
    tries = correctness.list_derived("xla")
    run_checks(found, [Step("", tries, of="gradient of xla")])
    (finding,) = found.findings
    assert finding["verdict"] == "FAILED" and "xla, float32, sinks" in finding["what"]


@pytest.mark.one_end
@pytest.mark.usefixtures("few_cases")
def test_lost_blocks_are_reported(tmp_path, monkeypatch):
    free = bookkeeping.free
    monkeypatch.setattr(bookkeeping, "free", lambda cache, ids: free(cache, ids[:1]))
    monkeypatch.setattr(correctness, "QUICK_CASES", ())
    path = tmp_path / "report.json"
    assert main(["--quick", "--report", str(path)]) == 1
    assert "lost" in findings(path, "FAILED")[0]["detail"]


@pytest.mark.one_end
def test_wrong_stored_values_are_reported():
    """The report has the difference, and the option that disables the kernel."""
    case = stores.Case("bytes", (16, 16), block_size=2, dtype="int8")
    kernel = functools.partial(store_rows, way=Way(interpret=True))

    def wrong(write):
        return kernel(write) | {"value_scales": write.arrays["value_scales"]}

    for store, verdict in ((kernel, "ok"), (wrong, "FAILED")):
        found, detail = judge(functools.partial(stores.compare, case, store))
        assert found == verdict
    assert (
        "value_scales must have the bits" in detail and "JKV_WRITE_KERNEL=0" in detail
    )


@pytest.mark.one_end
@pytest.mark.parametrize(
    "count, units, verdict", [(2, 1, "ok"), (2, 2, "FAILED"), (200, 1, "FAILED")]
)
def test_a_few_rounded_elements_may_be_one_unit_apart(
    monkeypatch, count, units, verdict
):
    case = stores.Case("bytes", (16, 16), block_size=2, dtype="int8")

    def play(write, store):
        elements = np.zeros(write.arrays["key_pool"].shape, np.int8)
        elements.reshape(-1)[:count] = units if store is None else 0
        return write.arrays | {"key_pool": elements}

    monkeypatch.setattr(stores, "play", play)
    monkeypatch.setattr(stores, "scatter", None)
    found, detail = judge(functools.partial(stores.compare, case, store_rows))
    assert found == verdict
    words = "2 elements one unit apart" if verdict == "ok" else "key_pool must have"
    assert words in detail


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"versions": {"jaxlib": "0.12.0", "jax-rocm7-plugin": "0.11.0"}}, "release"),
        ({"versions": {"jaxlib": "0.11.0", "jax-rocm10-plugin": "0.11.0"}}, "39634"),
        (
            {
                "versions": {
                    "jaxlib": "0.12.0",
                    "jax-rocm7-plugin": "0.12.0",
                    "jax_rocm10_plugin": "0.12.0",
                }
            },
            "plugins of two ROCm",
        ),
        ({"environment": {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}}, "another"),
        ({"drivers": {"rocm-smi": "6.4"}}, "is not installed"),
    ],
)
@pytest.mark.one_end
def test_known_bad_combinations(changes, words):
    facts = {
        "versions": {"jaxlib": "0.12.0"},
        "environment": {},
        "drivers": {},
        "platform": "cpu",
    }
    assert not list(list_known_faults(facts))
    (warning,) = list_known_faults(facts | changes)
    assert words in warning


def negate(attend):
    def attend_wrongly(call):
        output, lse = attend(call)
        return -output, lse

    return attend_wrongly


@pytest.mark.one_end
def test_a_quick_run_is_a_small_part():
    """Less than a tenth of the comparisons, including the kernel's."""
    quick, whole = (
        diagnosis.plan_steps(is_quick=is_quick) for is_quick in (True, False)
    )
    few, many = (
        sum(len(step.comparisons) for step in steps if step.title != stores.ALL)
        for steps in (quick, whole)
    )
    assert 0 < few < many / 10
    assert {"attention: xla, float32", "attention: pallas, float32"} <= {
        step.title for step in quick
    }


@pytest.mark.one_end
def test_ctrl_c_writes_a_partial_report(tmp_path, monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(diagnosis, "keep_compiled_programs", lambda: None)
    monkeypatch.setattr(diagnosis, "check_cycles", stop)
    path = tmp_path / "report.json"
    assert main(["--quick", "--report", str(path)]) == 130
    found = json.loads(path.read_text())
    assert found["was_interrupted"] and found["facts"]["versions"]
    assert [each["step"] for each in findings(path, "ok")] == ["known combinations"]
    missed = [each["what"] for each in findings(path, "not checked")]
    assert missed[0] == "bookkeeping on the device"
    assert missed[-1] == "the compiled kernel"
    output = capsys.readouterr().out
    last = output.splitlines()[-1]
    assert last == "INTERRUPTED: not all was checked; nothing had failed until then"
    assert "nothing failed" not in output


@pytest.mark.one_end
def test_the_report_is_written_to_the_given_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(diagnosis, "keep_compiled_programs", lambda: None)
    monkeypatch.setattr(diagnosis, "plan_steps", lambda **_: [])
    assert main([]) == 0
    assert capsys.readouterr().out == "nothing failed\n"
    assert not list(tmp_path.iterdir())
    assert main(["--report", "found.json"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert "written to found.json" in capsys.readouterr().out


@pytest.mark.one_end
def test_an_invalid_report_path_fails_before_the_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(diagnosis, "plan_steps", lambda **_: pytest.fail("too early"))
    for path in (tmp_path / "none" / "report.json", tmp_path):
        with pytest.raises(SystemExit) as ended:
            main(["--report", str(path)])
        output = capsys.readouterr().err
        assert ended.value.code == 2 and output.startswith("error: --report: ")
        assert output.count("\n") == 1


@pytest.mark.one_end
def test_ctrl_c_exits_the_process_with_all_threads(monkeypatch, capsys):
    """A thread that compiles would crash during Python's shutdown."""

    def stop():
        raise KeyboardInterrupt

    def end(status):
        raise SystemExit(f"at once with {status}")

    monkeypatch.setattr(os, "_exit", end)
    for command, status in (
        (stop, "at once with 130"),
        (lambda: 130, "at once with 130"),
        (lambda: 1, 1),
    ):
        with pytest.raises(SystemExit) as ended:
            run_process(command)
        assert ended.value.code == status
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.one_end
def test_comparisons_run_concurrently_and_are_reported_in_order(monkeypatch, capsys):
    """The first waits for the last, which belongs to another step."""
    monkeypatch.setattr(report.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(report, "PROGRESS_SECONDS", 0.01)
    both, now = threading.Barrier(2, timeout=60), itertools.count()
    monkeypatch.setattr(report.time, "monotonic", lambda: 10.0 * next(now))

    def refuse():
        raise NotImplementedError("no such card")

    def wait():
        time.sleep(0.1)  # progress lines are printed
        both.wait()

    steps = [
        Step("alone", lambda found: found.add("ok", "facts")),
        Step("first", {"a": wait, "b": refuse}, of="of first"),
        Step("second", {"c": both.wait, "d": refuse}, of="of second"),
    ]
    found = Report()
    run_checks(found, steps)
    assert [(each["step"], each["verdict"]) for each in found.findings] == [
        ("alone", "ok"),
        *(("first", verdict) for verdict in ("not checked", "ok")),
        *(("second", verdict) for verdict in ("not checked", "ok")),
    ]
    output = capsys.readouterr().out
    assert "  0 of 4 comparisons\n" in output  # no basis for an estimate


@pytest.mark.one_end
def test_remaining_time_is_estimated_from_finished_comparisons(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: seconds[0])
    goes_on = threading.Event()
    tries = {str(i): goes_on.wait if i == 3 else (lambda: 0.0) for i in range(4)}
    monkeypatch.setattr(report.os, "cpu_count", lambda: 2)
    step = Step("title", tries, of="cases")
    comparisons = report.Comparisons([step])
    results = comparisons.results_of(step)
    assert [name for name, _ in itertools.islice(results, 3)] == ["0", "1", "2"]
    seconds[0] = 60.0
    assert comparisons.progress == "3 of 4 comparisons, about 20 s left"
    goes_on.set()
    assert [name for name, _ in results] == ["3"]
    assert comparisons.progress == "4 of 4 comparisons"
    comparisons.stop()


@pytest.mark.one_end
def test_durations_are_rounded():
    output = [format_duration(seconds) for seconds in (1, 43, 89, 100, 600)]
    assert output == ["5 s", "45 s", "90 s", "2 min", "10 min"]


# Reports the first two; the third hangs, the fourth fails.
CHILD = """
import sys, time
for name in sys.argv[1:]:
    if name == "reduce-scatter":
        time.sleep(60)
    if name == "all-to-all":
        sys.exit("no such card")
    print('{"verdict": "ok", "detail": "", "facts": {}}', flush=True)
"""


@pytest.mark.one_end
def test_a_hanging_collective_is_named_and_others_run(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setattr(collectives, "SECONDS", 2.0)
    monkeypatch.setattr(collectives, "COMMAND", (sys.executable, "-c", CHILD))
    report = Report()
    collectives.check_collectives(report)
    found = [(each["verdict"], each["what"].split()[0]) for each in report.findings]
    assert found == [
        ("ok", "all-reduce"),
        ("ok", "all-gather"),
        ("FAILED", "reduce-scatter"),
        ("FAILED", "all-to-all"),
        ("ok", "collective-permute"),
    ]
    details = [each["detail"] for each in report.findings]
    assert "hangs" in details[2] and details[3] == "no such card"
