"""The support matrix: every row has existing tests, and its page is generated."""

import importlib.util
import sys

import pytest
from support.paths import ROOT

# Loaded by path, as the tests' helpers are a package of the same name.
_SPEC = importlib.util.spec_from_file_location("matrix", ROOT / "tools" / "matrix.py")
matrix = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(matrix)

pytestmark = pytest.mark.one_end
REPORT = """<testsuites><testsuite>
<testcase classname="tests.verbs.test_a.TestB" name="test_good[1]"/>
<testcase classname="tests.verbs.test_a" name="test_bad"><failure/></testcase>
<testcase classname="tests.verbs.test_a" name="test_left_out"><skipped/></testcase>
</testsuite></testsuites>"""


def row(*tests, results=()):
    words = ("tested", "-", "plain", "plain")
    return matrix.Row("a feature", "float32", words, tests, results)


def test_every_test_and_every_result_of_a_row_exists(monkeypatch) -> None:
    assert not matrix.find_missing_tests() and not matrix.find_missing_results()
    known = "test_matrix.py::test_the_page_equals_the_generated_one"
    unknown = "test_matrix.py::test_of_no_name"
    result = matrix.Result("gpu", {"workload": "of no name"})
    rows = {"Some": (row(known, unknown, results=(result,)),)}
    monkeypatch.setattr(matrix, "TABLES", rows)
    assert matrix.find_missing_tests() == [unknown]
    assert matrix.find_missing_results() == [result]


def test_every_support_level_has_its_evidence() -> None:
    cards = {"timed": {"gpu"}, "compiled": {"kernel_code", "rocm_compile"}}
    for each in matrix.all_rows():
        assert each.tests and len(each.words) == len(matrix.BACKENDS), each.feature
        assert {*each.words} <= {*matrix.WORDS}, each.feature
        assert each.words[3] != "timed", "no AMD card was ever there"
        files = {result.file for result in each.results}
        if any(test.startswith("test_kernel_machine_code") for test in each.tests):
            files.add("kernel_code")
        for word, named in cards.items():
            assert word not in each.words or files & named, (each.feature, word)


def test_the_page_equals_the_generated_one() -> None:
    assert matrix.PAGE.read_text() == matrix.write_page(), (
        "the table has changed: run python3 tools/matrix.py"
    )


def test_rows_without_a_passing_test_fail(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "a.xml").write_text(REPORT)
    names = [f"test_a.py::test_{name}" for name in ("good", "bad", "left_out")]
    monkeypatch.setattr(matrix, "TABLES", {"Some": (row(*names),)})
    assert matrix.say_faults(tmp_path) == [
        "a feature, float32: test_a.py::test_bad failed",
        "a feature, float32: test_a.py::test_left_out was not run",
    ]
    monkeypatch.setattr(sys, "argv", ["matrix.py", "--reports", str(tmp_path)])
    assert matrix.main() == 1 and "test_bad failed" in capsys.readouterr().out
    monkeypatch.setattr(matrix, "TABLES", {"Some": (row(names[0]),)})
    assert matrix.main() == 0
