"""A user's script passes mypy and pyright in strict mode."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
import typed_port

pytestmark = pytest.mark.one_end
HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
SCRIPTS = [ROOT / "examples" / "quickstart.py", HERE / "typed_port.py"]

# Neither the result of `jax.jit` nor its arguments have a type in pyright: parts of JAX
# are not written in Python. jkv itself is checked for unknown types separately.
PYRIGHT = {
    "include": [str(script) for script in SCRIPTS],
    "typeCheckingMode": "strict",
    "extraPaths": [str(ROOT)],
    "reportUnknownMemberType": False,
    "reportUnknownVariableType": False,
    "reportUnknownArgumentType": False,
}
# Flags of mypy's strict mode that the package's settings omit.
STRICTER = "disallow-untyped-calls, warn-return-any, warn-unused-ignores"

WRONG = """
import jax
import jkv
import numpy as np


def wrong(cache: jkv.Cache, batch: jkv.Batch, queries: jax.Array) -> jax.Array:
    return jkv.attend(cache, 0, batch, queries, return_lse=True)


jkv.append(jkv.init, 0)


def of_floats(cache: jkv.Cache, batch: jkv.Batch, queries: jax.Array) -> None:
    jkv.append(cache, 1.5)
    jkv.append(cache, 0, num_tokens=[1.5])
    jkv.truncate(cache, 0, lengths=0.5)
    jkv.attend(cache, 0, batch, queries, window=2.5)
    jkv.allocate(cache, 4, tokens=[[1.5]])
    jkv.free(cache, np.ones(2))
"""
# Floats where a function takes integers.
NUM_OF_FLOATS = 6


def run(tool, *arguments):
    """Run a type checker of this environment; return its exit code and output."""
    command = [pathlib.Path(sys.executable).with_name(tool), *arguments]
    # Pyright does not find editable installs when it checks the package itself.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return result.returncode, result.stdout + result.stderr


def test_the_typed_port_runs():
    cache = jax.eval_shape(typed_port.make_cache)
    _, tokens = jax.eval_shape(lambda c: typed_port.continue_prompts(c, 1), cache)
    assert tokens.shape == (2, 4)
    assert jax.eval_shape(typed_port.play_with, cache).shape == (7,)
    assert "0 tokens" in typed_port.look_at(typed_port.make_cache())


@pytest.mark.slow
def test_mypy_in_strict_mode(tmp_path):
    """The package's settings are made stricter; mypy caches the results."""
    scripts = {script.name: script.read_text() for script in SCRIPTS}
    for name, text in (scripts | {"wrong.py": WRONG}).items():
        (tmp_path / name).write_text(f"# mypy: {STRICTER}\n{text}")
    files = [tmp_path / name for name in (*scripts, "wrong.py")]
    code, output = run("mypy", f"--config-file={ROOT / 'pyproject.toml'}", *files)
    faults = [line for line in output.splitlines() if ": error:" in line]
    assert code == 1 and len(faults) == 2 + NUM_OF_FLOATS, output
    assert all("wrong.py" in fault for fault in faults), output


@pytest.mark.slow
def test_pyright_in_strict_mode(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    project = tmp_path / "pyrightconfig.json"
    project.write_text(
        json.dumps(PYRIGHT | {"include": [*PYRIGHT["include"], str(wrong)]})
    )
    code, output = run(
        "basedpyright",
        "--outputjson",
        f"--pythonpath={sys.executable}",
        f"--project={project}",
    )
    report = json.loads(output)
    faults = report["generalDiagnostics"]
    assert report["summary"]["filesAnalyzed"] == 3
    assert {fault["file"] for fault in faults} == {str(wrong)}, faults
    assert code == 1 and len(faults) >= 2 + NUM_OF_FLOATS


@pytest.mark.further
@pytest.mark.slow
def test_no_type_of_the_package_is_unknown():
    _, output = run(
        "basedpyright",
        "--outputjson",
        f"--pythonpath={sys.executable}",
        "--verifytypes=jkv",
        "--ignoreexternal",
    )
    symbols = json.loads(output)["typeCompleteness"]["symbols"]
    # Integrations have types of packages that are not installed here.
    exported = [
        symbol
        for symbol in symbols
        if symbol["isExported"] and not symbol["name"].startswith("jkv.integrations.")
    ]
    unknown = {
        each["name"]
        for each in exported
        if not each["isTypeKnown"] and not each["isTypeAmbiguous"]
    }
    # The client library's `Metric` is only partly typed.
    collector = "jkv.serving.prometheus.EngineCollector"
    unknown -= {collector, f"{collector}.collect"}
    assert len(exported) > 1000 and not unknown, unknown
