"""Executed files and lines behind each entry point, which may only fall."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
from support import walks
from support.paths import ROOT

pytestmark = [pytest.mark.one_end, pytest.mark.further]

# Maximum files and lines of functions. Lower them with the code. Raise lines only to
# mend a fault, and files never.
MOST = {
    "verbs": (40, 4520),
    "attend": (19, 1525),
    "generate": (48, 4915),
    "engine": (60, 7220),
    "schema": (21, 1465),
}


@pytest.fixture(scope="module")
def walked() -> dict[str, dict[str, int]]:
    """The executed lines of each file, by entry point, from a separate process."""
    program = pathlib.Path(walks.__file__)
    ran = subprocess.run(
        [sys.executable, program, "--json"], check=True, capture_output=True, text=True
    )
    found: dict[str, dict[str, int]] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("door", MOST)
def test_walks_do_not_grow(walked: dict[str, dict[str, int]], door: str) -> None:
    files = walked[door]
    most_files, most_lines = MOST[door]
    largest = sorted(files, key=lambda name: -files[name])
    assert len(files) <= most_files, f"{door} runs through {largest}"
    assert sum(files.values()) <= most_lines, f"{door} runs through {largest}"


def test_the_core_in_an_hour_names_the_files_of_the_verbs(
    walked: dict[str, dict[str, int]],
) -> None:
    page = (ROOT / "docs" / "design" / "core.md").read_text()
    named = {*re.findall(r"`([\w/]+\.py)`", page)}
    package = walks.PACKAGE
    assert not [name for name in named if not (package / name).is_file()]
    assert not {name for name, lines in walked["verbs"].items() if lines >= 15} - named


def test_walks_list_the_executed_files(walked: dict[str, dict[str, int]]) -> None:
    """Each entry point runs its own file, and no unrelated one."""
    assert "verbs/attending.py" in walked["attend"]
    assert "verbs/appending.py" in walked["verbs"].keys() & walked["generate"].keys()
    assert "serving/engine.py" in walked["engine"]
    assert not any(name.startswith("serving/") for name in walked["generate"])
    assert {name.split("/")[0] for name in walked["schema"]} <= {
        "arguments.py",
        "grammar",
        "operations.py",
        "signatures.py",
        "logits_processors",
    }
