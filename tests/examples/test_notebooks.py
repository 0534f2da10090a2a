"""The notebooks run from first to last cell, and are stored without output."""

import json
import pathlib

import pytest
from support.jax_versions import with_further
from support.paths import EXAMPLES, ROOT

pytestmark = pytest.mark.one_end

NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def read_cells(path: pathlib.Path) -> list[dict[str, object]]:
    """Return the cells of a notebook in format 4."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return notebook["cells"]


def test_both_notebooks_are_found() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["dense_to_paged", "grpo_by_hand"]
    pages = [*(ROOT / "docs").rglob("*.md")]
    for path in NOTEBOOKS:
        assert any(path.name in page.read_text() for page in pages), path.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", with_further(NOTEBOOKS, NOTEBOOKS[1]), ids=lambda path: path.stem
)
def test_a_notebook_runs(
    path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each asserts its results: equal logits, rising rewards."""
    names: dict[str, object] = {}
    sources = []
    for number, cell in enumerate(read_cells(path)):
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            exec(compile(text, f"{path.name}, cell {number}", "exec"), names)
            sources.append(text)
    assert any("assert" in text for text in sources)
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_output(path: pathlib.Path) -> None:
    cells = [cell for cell in read_cells(path) if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] for cell in cells)
    assert all(cell["execution_count"] is None for cell in cells)
