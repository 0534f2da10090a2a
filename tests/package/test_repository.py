"""Repository files: workflows, the issue form, the citation."""

import re
import sys

import pytest
from support.paths import ROOT

import jkv

sys.path.insert(0, str(ROOT / "tools"))

import tasks  # noqa: E402, in tools, as workflows run it

pytestmark = pytest.mark.one_end

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


def read(path):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text())


def test_there_are_workflows_for_tests_pages_and_releases() -> None:
    names = {path.stem for path in WORKFLOWS}
    assert names == {"tests", "further", "docs", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_with_their_version(path) -> None:
    """A tag can be moved to another commit."""
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*", action), action


def test_one_action_has_one_commit() -> None:
    pinned = {
        found
        for path in WORKFLOWS
        for found in re.findall(r"uses: ([\w./-]+)@(\w+)", path.read_text())
    }
    assert len({name for name, _ in pinned}) == len(pinned)


def test_workflows_run_suites_that_exist() -> None:
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    named = re.findall(r'--suites "([\w -]+)"', text)
    named += re.findall(r"suite: \[(.*)\]", text)
    named += re.findall(r"extras: ([\w -]+)$", text, re.MULTILINE)
    suites = {name for group in named for name in re.split(r"[, ]+", group)}
    known = {*tasks.SUITES, *tasks.CHECKS}
    assert suites and suites <= known, suites - known
    # Every check, and every extra suite of `.ci/run`.
    assert {*tasks.CHECKS, *tasks.EXTRAS} <= suites
    for file in re.findall(r"python (tools/\w+\.py)", text):
        assert (ROOT / file).is_file()
    for test in re.findall(r"tests/[\w/]+\.py", text):
        assert (ROOT / test).is_file()


def test_the_oldest_and_newest_jax_are_tested() -> None:
    jobs = read(GITHUB / "workflows" / "tests.yml")["jobs"]
    ends = [each["jax"] for each in jobs["tests"]["strategy"]["matrix"]["include"]]
    assert ends == ["oldest", "newest"]
    assert jobs["matrix"]["needs"] == "tests"  # of the support matrix


def test_only_a_tag_publishes_and_only_that_job_may() -> None:
    workflow = read(GITHUB / "workflows" / "release.yml")
    assert workflow["permissions"] == {"contents": "read"}
    build, publish = (workflow["jobs"][name] for name in ("build", "publish"))
    assert "permissions" not in build and publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    assert "startsWith(github.ref, 'refs/tags/v')" in publish["if"]
    steps = [step.get("uses", "") for step in publish["steps"]]
    assert sum("gh-action-pypi-publish" in step for step in steps) == 1
    text = (GITHUB / "workflows" / "release.yml").read_text()
    assert "secrets." not in text and "password:" not in text
    # Started manually (YAML reads `on` as `True`), it is a dry run.
    assert "workflow_dispatch" in workflow[True]


def test_the_issue_form_requires_the_doctor_report() -> None:
    form = read(GITHUB / "ISSUE_TEMPLATE" / "fault.yml")
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    doctor = fields["doctor"]
    assert "python -m jkv.doctor --first-light" in doctor["attributes"]["description"]
    assert "python -m jkv.doctor --quick" in doctor["attributes"]["description"]
    assert doctor["validations"]["required"]


def test_citation_has_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {jkv.__version__}\n" in text
    # The changelog begins with "Unreleased", or with this version and its date.
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    known = [head for head in heads if head != "Unreleased"]
    assert re.fullmatch(rf"{re.escape(jkv.__version__)} - \d{{4}}-\d\d-\d\d", known[0])
    assert read(ROOT / "CITATION.cff")["license"] == "Apache-2.0"


def test_trusted_inputs_are_documented() -> None:
    """Folders whose contents are executed are named beside the code that does so."""
    text = (ROOT / "SECURITY.md").read_text()
    unpickled = [
        path.stem
        for path in (ROOT / "jkv").rglob("*.py")
        if "pickle.loads(" in path.read_text()
    ]
    assert unpickled == ["kept_programs"] and "KeptPrograms" in text
    for word in ("jkv.load", "JKV_API_KEY", "salt", "jinja2", "serve_ray"):
        assert word in text, word
