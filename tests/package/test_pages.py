"""The pages name files, tests and results that exist."""

import doctest
import json
import re

from places import ROOT

README = (ROOT / "README.md").read_text()


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def test_the_examples_of_the_guide_run() -> None:
    guide = str(ROOT / "docs/guide.md")
    failed, attempted = doctest.testfile(guide, module_relative=False)
    assert attempted > 10 and failed == 0


def test_every_test_named_in_the_table_of_features_exists() -> None:
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    names = set(re.findall(r"def (test_\d\d)", files["test_features.py"].read_text()))
    for cell in re.findall(r"`(test_[^`]*)`", (ROOT / "docs/features.md").read_text()):
        known = cell[:7] in names if cell.endswith("_*") else cell in files
        assert known, cell


def test_measured_results_are_kept_with_machine_and_versions() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    for path in results:
        text = json.dumps(json.loads(path.read_text())).lower()
        # What was only compiled has a target in place of a device.
        assert "jax" in text and ("device" in text or "target" in text), path.name
