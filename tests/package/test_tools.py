"""`make test` runs every test, and fails if one of its processes fails."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import parallel  # noqa: E402, in tools, as the Makefile runs it
import tasks  # noqa: E402

pytestmark = pytest.mark.one_end
CI = ROOT / ".ci" / "run"


def job(name: str, code: str, after: str | None = None) -> parallel.Job:
    return parallel.Job(name, [sys.executable, "-S", "-c", code], after=after)


def test_every_test_is_in_one_suite_of_the_oldest_jax() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = path.relative_to(ROOT).as_posix()
        holders = [
            name
            for name, task in tasks.SUITES.items()
            if not name.startswith("newest") and is_given(file, task.arguments)
        ]
        further = [name for name in holders if name.startswith("further")]
        if file.startswith("tests/under/"):
            # The suite of its library runs it; the others exclude it.
            name = f"under-{path.stem.removeprefix('test_').replace('_', '-')}"
            holders = [each for each in holders if each == name]
        assert len(holders) - len(further) == 1, (file, holders)
        # Its further cases are in a suite that `.ci/run` names.
        text = path.read_text()
        if re.search(r"\b(with_)?further\b", text):
            assert len(further) == 1, (file, holders)
            assert f" {further[0]} " in CI.read_text().replace('"', " ")
        if "newest_further" in text:
            assert is_given(file, tasks.SUITES["newest-further"].arguments), file
            assert " newest-further " in CI.read_text()


def is_given(file: str, arguments: tuple[str, ...]) -> bool:
    """Return True if pytest's arguments include a file."""
    given = [path for path in arguments if not path.startswith("--")]
    # Paths excluded by pyproject.toml run if they are named.
    ignored = [
        path.removeprefix("--ignore=") for path in arguments if path not in given
    ]
    given, ignored = given or ["tests"], ignored + ["tests/devices"] * (not given)
    names = ("integrations", "harness", "models", "replicated", "under")
    alone = [f"tests/{name}" for name in names]
    ignored += [folder for folder in alone if folder not in given]
    ignored = [path for path in ignored if path not in given]
    return file.startswith((*given,)) and not file.startswith((*ignored,))


def test_everything_includes_all_but_the_extras() -> None:
    everything = tasks.choose_everything(None, [])
    assert {*everything} == {*tasks.SUITES, *tasks.CHECKS} - {*tasks.EXTRAS}
    assert {*tasks.choose_everything(None, ["tunix"])} - {*everything} == {"tunix"}
    newest = tasks.choose_everything("newest", [])
    assert newest and all(task.layers == tasks.NEWEST for task in newest.values())
    # Broken links are errors.
    assert "--strict" in everything["docs"].arguments


def test_a_failed_job_is_reported_and_stops_its_dependents(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    jobs = [
        job("first", "print('one\\n== 3 failed in 2s =='); raise SystemExit(3)"),
        job("second", "print('two')", after="first"),
        job("third", "import sys; print('three', file=sys.stderr)"),
        job("fourth", "import os; print(os.getcwd())", after="third"),
    ]
    found = {one.name: one for one in parallel.run_jobs(jobs, 2, tmp_path)}
    statuses = {name: one.status for name, one in found.items()}
    assert statuses == {"first": 3, "second": None, "third": 0, "fourth": 0}
    assert found["fourth"].last_line == str(tmp_path)
    assert found["fourth"].processor_seconds > 0
    assert not parallel.show_table([*found.values()])
    shown = capsys.readouterr().out
    assert (
        "one\n== 3 failed in 2s ==\n" in shown and "first: ended with status 3" in shown
    )
    assert "FAILED: 3 failed in 2s\n" in shown and "FAILED: not run" in shown
    assert "two" not in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_all_processes(
    number: signal.Signals, tmp_path: pathlib.Path
) -> None:
    # Including a process with a waiting child.
    code = "sleep 60 & echo $$ $! > $$; mv $$ pids.$$; wait"
    script = (
        "import pathlib, sys, parallel, run\n"
        f"jobs = [parallel.Job(name, ['sh', '-c', {code!r}]) for name in 'ab']\n"
        "run.run_tests = lambda *_: parallel.run_jobs(jobs, 2, pathlib.Path('.'))\n"
        "sys.exit(run.main())\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", script, "test"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tools")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while len(found := [*tmp_path.glob("pids.*")]) < 2:
        assert started.poll() is None, started.communicate()
        time.sleep(0.01)
    started.send_signal(number)
    output, _ = started.communicate(timeout=30)
    assert started.returncode == 130
    assert (
        output.splitlines()[-1].startswith("interrupted") and "Traceback" not in output
    )
    for pid in [int(pid) for path in found for pid in path.read_text().split()]:
        for _ in range(1000):
            if not is_running(pid):
                break
            time.sleep(0.01)
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
