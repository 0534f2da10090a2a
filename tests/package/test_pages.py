"""The pages name files, tests and results that exist."""

import json
import re
import runpy
import tomllib
from collections.abc import Iterator

import pytest
from support.paths import ROOT

README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
FEATURES = (ROOT / "docs" / "features.md").read_text()
pytestmark = pytest.mark.one_end


def test_links_have_targets() -> None:
    for page in (ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def test_page_sizes_are_limited() -> None:
    """A longer page should be split."""
    sizes = {path: path.stat().st_size for path in (ROOT / "docs").rglob("*.md")}
    assert not [path.name for path, size in sizes.items() if size > 20_000]
    assert sum(sizes.values()) <= 260_000


def test_benchmark_tables_equal_the_results() -> None:
    path = ROOT / "benchmarks" / "measured.py"
    measured = runpy.run_path(str(path))
    page = (ROOT / "docs" / "measured.md").read_text()
    assert measured["write_tables"](page) == page, f"run python {path}"


def test_every_test_in_the_table_of_features_exists() -> None:
    """Each row names a test as `file` or `file::test`, or says "later"."""
    files = {
        path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")
    }
    rows = re.findall(r"^\| \d+ .*\| ([^|]+) \|$", FEATURES, re.MULTILINE)
    assert len(rows) == 49
    for shown_by in rows:
        named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", shown_by)
        assert named or shown_by == "later", shown_by
        for file, test in named:
            assert file in files, file
            assert not test or re.search(rf"(def|class) {test}\b", files[file]), test


def test_known_bugs_have_an_issue_number_and_a_test() -> None:
    tests = {
        path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")
    }
    page = (ROOT / "docs" / "elsewhere.md").read_text()
    rows = re.findall(r"^\| (.*) \| (.*) \| `(.*)::(.*)` \|$", page, re.MULTILINE)
    assert len(rows) == page.count("\n| ") - 1 >= 20 and len(page) < 8000
    for what, where, file, test in rows:
        assert re.search(r"\w \d+", where), what
        assert f"def {test}(" in tests[file], what


def test_the_design_page_has_a_row_for_every_package() -> None:
    """Each other module has a row, or a mention."""
    rows = {*re.findall(r"^\| `([\w/]+)` \| .+ \|$", DESIGN, re.MULTILINE)}
    for path in (ROOT / "jkv").rglob("*.py"):
        room = path.parent.relative_to(ROOT / "jkv").as_posix()
        if path.stem != "__init__" and room == ".":
            assert path.stem in rows or f"`{path.name}`" in DESIGN, path.name
        assert room in {".", *rows}, room
    for row in rows:
        place = ROOT / "jkv" / row
        assert place.is_dir() or place.with_suffix(".py").is_file(), row


def test_the_packages_of_the_design_page_import_down() -> None:
    """A row uses the rows below it; attention and grammar are one package each."""
    rows = re.findall(r"^\| `([\w/]+)` \|.*\|$", DESIGN, re.MULTILINE)
    ranks = {room: rank for rank, room in enumerate(rows)}
    for path in (ROOT / "jkv").rglob("*.py"):
        room = path.parent.relative_to(ROOT / "jkv").as_posix()
        if room == "." or path.stem == "__init__":
            continue
        for used in re.findall(r"^from jkv\.([\w.]+) import", path.read_text(), re.M):
            below = used.replace(".", "/")
            while below not in ranks:
                assert below, (path, used)
                below = below.rpartition("/")[0]
            tops = {room.split("/")[0], below.split("/")[0]}
            if tops not in ({"attention"}, {"grammar"}):
                assert ranks[room] <= ranks[below], (path, used)


def test_the_files_named_by_the_design_pages_exist() -> None:
    """Each as `package/file.py`, or as `file.py` of the page's package."""
    for page in (ROOT / "docs" / "design.md", *(ROOT / "docs" / "design").glob("*.md")):
        for name in re.findall(r"(?<![\w./])([\w/]+\.py)\b", page.read_text()):
            folders = ROOT, ROOT / "jkv"
            found = any((folder / name).is_file() for folder in folders)
            alone = "/" not in name and any((ROOT / "jkv").rglob(name))
            assert found or alone, (page.name, name)


def test_the_linter_checks_unused_parameters() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert "ARG" in settings["lint"]["select"] and "ignore" not in settings["lint"]
    for path in (ROOT / "jkv").rglob("*.py"):
        assert "noqa: ARG" not in path.read_text(), path


def test_results_record_machine_and_versions() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    for path in results:
        entries = dict(names_and_values(json.loads(path.read_text())))
        versions = {name for name in entries if "jax" in name or "triton" in name}
        assert any(re.match(r"\d+\.\d+", entries[name]) for name in versions), path.name
        # A result that was only compiled has a target instead of a device.
        assert {"device", "devices", "target", "targets"} & set(entries), path.name


def names_and_values(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield all names in JSON contents, in lower case, with their values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key.lower(), str(inner)
            yield from names_and_values(inner, key.lower())
    elif isinstance(value, list):
        for inner in value:
            yield from names_and_values(inner, name)
