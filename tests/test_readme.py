"""What the README shows is what the files say and what running them prints."""

import json
import pathlib
import re
import runpy

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_quick_start_is_the_example_and_its_output(capsys) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    output = re.search(r"```text\n(.*?)```", README, re.DOTALL)
    assert code is not None and output is not None
    example = ROOT / "examples" / "quickstart.py"
    assert code[1] == example.read_text()
    assert len(code[1].splitlines()) <= 60
    runpy.run_path(str(example))
    assert capsys.readouterr().out == output[1]


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def test_every_test_named_in_the_table_of_features_exists() -> None:
    tests = ROOT / "tests"
    names = set(
        re.findall(r"def (test_\d\d)", (tests / "test_features.py").read_text())
    )
    for cell in re.findall(r"`(test_[^`]*)`", (ROOT / "docs/features.md").read_text()):
        known = cell[:7] in names if cell.endswith("_*") else (tests / cell).exists()
        assert known, cell


def test_measured_results_are_kept_with_machine_and_versions() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    for path in results:
        text = json.dumps(json.loads(path.read_text())).lower()
        assert "jax" in text and "device" in text, path.name
