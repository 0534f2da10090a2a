"""The distribution's name, and the contents of a wheel and an sdist."""

import inspect
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import commands  # of the examples
import pytest
from support.paths import ROOT

import jkv

sys.path.insert(0, str(ROOT / "tools"))

import environments  # noqa: E402, a tool, which is not a package

pytestmark = pytest.mark.one_end

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = "jkv-generate", "jkv-chat", "jkv-serve", "jkv-batch"
STEM = f"{PROJECT['name'].replace('-', '_')}-{jkv.__version__}"
# Contents of an sdist besides the package.
BESIDE = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml")
# Packages that import without extras, from the installed wheel.
USE = """
import importlib.metadata, sys
import jkv, jkv.serving, jkv.grammar, jkv.trees, jkv.logits_processors
assert "site-packages" in jkv.__file__, jkv.__file__
print(importlib.metadata.version(sys.argv[1]), jkv.__version__)
"""
PYTHONS = ("3.11", "3.12", "3.13")


def pages() -> dict[str, str]:
    """Return user-facing texts by name: pages, and code with install commands."""
    folders = [ROOT / name for name in ("docs", "jkv", "examples", "benchmarks")]
    found = [path for folder in folders for path in folder.rglob("*.*")]
    kept = [path for path in found if path.suffix in {".md", ".py", ".ipynb"}]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in [*kept, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    }


def test_name_and_version_are_defined_once() -> None:
    assert PROJECT["name"] == "jkv-cache"  # `jkv` on the index is another project
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", jkv.__version__)
    # Extras must use the own name: another project's would be installed otherwise.
    extras = PROJECT["optional-dependencies"]
    own = [each for group in extras.values() for each in group if "jkv" in each]
    assert own and all(each.startswith(f"{PROJECT['name']}[") for each in own)
    named = {
        n
        for each in own
        for n in re.findall(r"[\w-]+", each.split("[")[1].split("]")[0])
    }
    assert named <= {*extras}


def test_the_examples_are_one_project_with_four_commands() -> None:
    examples = tomllib.loads((ROOT / "examples" / "pyproject.toml").read_text())
    project = examples["project"]
    assert project["version"] == jkv.__version__
    assert project["dependencies"] == [f"{PROJECT['name']}[examples,http]"]
    scripts = project["scripts"]
    assert {*scripts} == {*COMMANDS}
    for script in scripts.values():
        function = getattr(commands, script.removeprefix("jkv_examples.commands:"))
        (name,) = re.findall(r'"(\w+\.py)"', inspect.getsource(function))
        assert (ROOT / "examples" / name).is_file()


def test_install_instructions_use_the_checkout() -> None:
    """Only a checkout can be installed: `pip install .`, with or without extras."""
    for name, text in pages().items():
        for wrong in (r"jkv\[", r"jkv-cache\[", r"pip install (-U )?['\"]?jkv"):
            assert not re.search(rf"pip install[^\n]*{wrong}|^{wrong}", text), name
        for extra in re.findall(r"pip install (?:-e )?['\"]?\.\[([\w,-]+)\]", text):
            missing = {*extra.split(",")} - {*PROJECT["optional-dependencies"]}
            assert not missing, (name, missing)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the sdists, and the wheels built from them."""
    folder = tmp_path_factory.mktemp("builder")
    python, dist = make_environment(folder / "venv"), folder / "dist"
    run(python, *PIP, "build", "twine")
    for project in (ROOT, ROOT / "examples"):
        run(python, "-m", "build", "--outdir", dist, project)
    run(python, "-m", "twine", "check", "--strict", *dist.iterdir())
    return dist


PIP = "-m", "pip", "install", "--quiet", "--no-compile"


def make_environment(
    folder: pathlib.Path, python: str = sys.executable
) -> pathlib.Path:
    """Create an environment with only pip; return its interpreter."""
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def run(*command: object) -> str:
    """Return the output of a command; fail if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def package_files() -> set[str]:
    """Return the package's files in git."""
    return {*run("git", "-C", ROOT, "ls-files", "jkv").split()}


@pytest.mark.further
@pytest.mark.slow
def test_an_sdist_ships_the_package_and_its_docs(built: pathlib.Path) -> None:
    with tarfile.open(built / f"{STEM}.tar.gz") as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    expected = package_files() | {*BESIDE, "PKG-INFO", ".gitignore"}
    assert shipped == expected


@pytest.mark.further
@pytest.mark.slow
def test_a_wheel_ships_only_the_package(built: pathlib.Path) -> None:
    with zipfile.ZipFile(built / f"{STEM}-py3-none-any.whl") as archive:
        shipped = {*archive.namelist()}
        about = archive.read(f"{STEM}.dist-info/METADATA").decode()
    information = ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")
    of_it = {f"{STEM}.dist-info/{name}" for name in information}
    assert shipped == package_files() | of_it
    assert "jkv/py.typed" in shipped
    # The metadata of an index: the README, and the required packages.
    assert "# jkv" in about and "Requires-Dist: jax>=0.10.2" in about


@pytest.mark.further
@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_the_installed_wheel_runs_the_quick_start(
    built: pathlib.Path, tmp_path: pathlib.Path, version: str
) -> None:
    """It runs with the oldest JAX, then with the newest for that Python."""
    base = environments.find_python(version)
    if base is None:
        pytest.skip(f"Python {version} is not installed")
    page = (ROOT / "docs" / "quickstart.md").read_text()
    program = tmp_path / "quickstart.py"
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    program.write_text(code)
    (printed,) = re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S)
    python = make_environment(tmp_path / "bare", base)
    wheel = built / f"{STEM}-py3-none-any.whl"
    for packages in ((wheel, *environments.OLDEST), ("--upgrade", "jax", "jaxlib")):
        run(python, *PIP, *packages)
        # Isolated: neither this checkout nor PYTHONPATH is on the path.
        output = run(python, "-I", "-c", USE, PROJECT["name"]).split()
        assert output == [jkv.__version__, jkv.__version__]
        plain = "env", "-u", "XLA_FLAGS", "JAX_PLATFORMS=cpu"
        assert run(*plain, python, "-I", program) == printed
    listed = run(python, "-I", "-m", "jkv")
    assert "jkv.doctor" in listed and "jkv.plan" in listed


@pytest.mark.further
@pytest.mark.slow
def test_an_installation_of_the_examples_has_their_commands(
    built: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    python = make_environment(tmp_path / "builder")
    target = tmp_path / "installed"
    wheel = built / f"jkv_examples-{jkv.__version__}-py3-none-any.whl"
    run(python, *PIP, "--no-deps", "--target", target, wheel)
    assert {*os.listdir(target / "bin")} == {*COMMANDS}
    program = target / "bin" / "jkv-generate"
    path = os.pathsep.join([str(target), str(ROOT)])
    output = run("env", f"PYTHONPATH={path}", sys.executable, program, "--help")
    assert output.startswith("usage: generate.py")
