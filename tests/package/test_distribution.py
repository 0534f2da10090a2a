"""The distribution's name, and the contents of a wheel and an sdist."""

import inspect
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import commands  # of the examples
import pytest
from support.paths import ROOT

import jkv

pytestmark = pytest.mark.one_end

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = "jkv-generate", "jkv-chat", "jkv-serve", "jkv-batch"
STEM = f"{PROJECT['name'].replace('-', '_')}-{jkv.__version__}"
# Contents of an sdist beside the package.
BESIDE = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml")
# A cache is used, without a model and without any extra.
USE = """
import importlib.metadata, sys
import jax.numpy as jnp
import jkv, jkv.serving, jkv.grammar, jkv.trees, jkv.logits_processors
config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=8,
    block_size=4, max_sequences=2, max_context_length=16)
cache, opened = jkv.allocate(jkv.init(config), [0])
cache, batch = jkv.append(cache, opened.seq_ids)
rows = jnp.ones((1, 1, 8))
cache = jkv.write(cache, 0, batch, rows, rows)
assert jkv.attend(cache, 0, batch, rows).shape == (1, 1, 8)
jkv.check(jkv.commit(cache, batch))
assert "site-packages" in jkv.__file__, jkv.__file__
print(importlib.metadata.version(sys.argv[1]), jkv.__version__)
"""


def pages() -> dict[str, str]:
    """Texts for users, by name: pages, and all code with install commands."""
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
    # Its own extras, by its own name: another project's would be installed otherwise.
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
        (name,) = re.findall(r"\w+\.py", inspect.getsource(function))
        assert (ROOT / "examples" / name).is_file()


def test_install_instructions_use_the_checkout() -> None:
    """There is only a checkout: `pip install .`, with extras or without."""
    for name, text in pages().items():
        for wrong in (r"jkv\[", r"jkv-cache\[", r"pip install (-U )?['\"]?jkv"):
            assert not re.search(rf"pip install[^\n]*{wrong}|^{wrong}", text), name
        for extra in re.findall(r"pip install (?:-e )?['\"]?\.\[([\w,-]+)\]", text):
            missing = {*extra.split(",")} - {*PROJECT["optional-dependencies"]}
            assert not missing, (name, missing)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the sdist, and the wheel that was built of it."""
    folder = tmp_path_factory.mktemp("dist")
    python = make_environment(folder / "builder")
    run(python, "-m", "pip", "install", "--quiet", "build")
    run(python, "-m", "build", "--outdir", folder, ROOT)
    return folder


def make_environment(folder: pathlib.Path) -> pathlib.Path:
    """The interpreter of a new environment with nothing but pip."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(*command: object) -> str:
    """Return the output of a command; an error if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def package_files() -> set[str]:
    """The files of the package as git has them."""
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
def test_a_wheel_ships_the_package_alone(built: pathlib.Path) -> None:
    with zipfile.ZipFile(built / f"{STEM}-py3-none-any.whl") as archive:
        shipped = {*archive.namelist()}
        about = archive.read(f"{STEM}.dist-info/METADATA").decode()
    information = ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")
    of_it = {f"{STEM}.dist-info/{name}" for name in information}
    assert shipped == package_files() | of_it
    assert "jkv/py.typed" in shipped
    # As an index shows it: the README, and the packages needed without any extra.
    assert "# jkv" in about and "Requires-Dist: jax>=0.10.2" in about


@pytest.mark.further
@pytest.mark.slow
def test_a_bare_environment_runs_the_wheel(
    built: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    python = make_environment(tmp_path / "bare")
    wheel = built / f"{STEM}-py3-none-any.whl"
    run(python, "-m", "pip", "install", "--quiet", wheel)
    # Isolated: neither this checkout nor PYTHONPATH is on the path.
    said = run(python, "-I", "-c", USE, PROJECT["name"]).split()
    assert said == [jkv.__version__, jkv.__version__]
    assert sys.version_info >= (3, 11)
    listed = run(python, "-I", "-m", "jkv")
    assert "jkv.doctor" in listed and "jkv.plan" in listed


@pytest.mark.further
@pytest.mark.slow
def test_an_installation_of_the_examples_has_their_commands(
    tmp_path: pathlib.Path,
) -> None:
    python = make_environment(tmp_path / "builder")
    target = tmp_path / "installed"
    install = "-m", "pip", "install", "--quiet", "--no-deps", "--target", target
    run(python, *install, ROOT / "examples")
    assert {*os.listdir(target / "bin")} == {*COMMANDS}
    program = target / "bin" / "jkv-generate"
    path = os.pathsep.join([str(target), str(ROOT)])
    said = run("env", f"PYTHONPATH={path}", sys.executable, program, "--help")
    assert said.startswith("usage: generate.py")
