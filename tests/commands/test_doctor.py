"""python -m jkv.doctor: a report of what was found, and an exit status."""

import json

import jax.numpy as jnp
import pytest

from jkv.commands import bookkeeping, correctness
from jkv.commands.cases import CASES
from jkv.commands.diagnosis import main
from jkv.commands.facts import list_known_faults


@pytest.fixture
def few_cases(monkeypatch):
    """Two cases and one dtype: the others only take time."""
    wanted = ("mixed, with padding", "sinks")
    cases = tuple(case for case in CASES if case.name in wanted)
    monkeypatch.setattr(correctness, "CASES", cases)
    monkeypatch.setattr(correctness, "IMPLEMENTATIONS", ("xla",))
    monkeypatch.setattr(correctness, "TOLERANCES", {"float32": 2e-5})


def findings(path, verdict):
    report = json.loads(path.read_text())
    return [each for each in report["findings"] if each["verdict"] == verdict]


@pytest.mark.usefixtures("few_cases")
def test_a_machine_that_works(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["--report", str(path)]) == 0
    assert findings(path, "FAILED") == []
    what = [each["what"] for each in findings(path, "ok")]
    assert any(name.startswith("500 cycles") for name in what)
    assert "xla, float32: 2 cases" in what
    assert any(name.startswith("decode, 8 contexts") for name in what)
    unchecked = [each["what"] for each in findings(path, "not checked")]
    assert "the compiled kernel" in unchecked
    facts = json.loads(path.read_text())["facts"]
    assert facts["versions"]["jax"] and facts["devices"]
    assert "nothing failed" in capsys.readouterr().out


@pytest.mark.one_end
@pytest.mark.usefixtures("few_cases")
def test_wrong_attention_is_reported(tmp_path, monkeypatch):
    right = correctness.paged_attention

    def wrong(*arguments, implementation, **options):
        found = right(*arguments, implementation="reference", **options)
        return jnp.roll(found, 1, axis=0) if implementation == "xla" else found

    monkeypatch.setattr(correctness, "paged_attention", wrong)
    path = tmp_path / "report.json"
    assert main(["--quick", "--report", str(path)]) == 1
    assert len(findings(path, "FAILED")) == 3  # each case, and all of them


@pytest.mark.one_end
@pytest.mark.usefixtures("few_cases")
def test_lost_blocks_are_reported(tmp_path, monkeypatch):
    free = bookkeeping.free
    monkeypatch.setattr(bookkeeping, "free", lambda cache, ids: free(cache, ids[:1]))
    path = tmp_path / "report.json"
    assert main(["--quick", "--report", str(path)]) == 1
    assert "lost" in findings(path, "FAILED")[0]["detail"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"versions": {"jaxlib": "0.12.0", "jax-rocm7-plugin": "0.11.0"}}, "release"),
        ({"environment": {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}}, "another"),
        ({"drivers": {"rocm-smi": "6.4"}}, "is not installed"),
    ],
)
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
