"""Which libcudnn FlashInfer gets: the doctor asks for the version that counts, and this is why it has to ask."""

import os
import subprocess
import sys
from pathlib import Path

import backends
import pytest

WHEEL, OTHER = backends.VERSIONS
ASK = """
import importlib.metadata
import cudnn
print(importlib.metadata.version("nvidia-cudnn-cu13"), cudnn.backend_version())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python into which the frontend and one backend's wheel are installed, and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for requirement in (backends.FRONTEND, f"{backends.BACKEND}=={WHEEL}"):
        for part in backends.install(requirement).iterdir():
            (packages / part.name).symlink_to(part)
    return folder / "bin" / "python"


def ask(python: Path, **environment: str) -> list[str]:
    """Return the version that the wheel's metadata has, and the one that cuDNN has."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    child = subprocess.run(
        [python, "-c", ASK], env={**inherited, **environment}, check=True, stdout=subprocess.PIPE, text=True
    )
    return child.stdout.split()


def number(version: str) -> str:
    """9.20.0.48 is 92000 in cuDNN's words."""
    major, minor, patch, _ = map(int, version.split("."))
    return str(major * 10_000 + minor * 100 + patch)


def test_the_wheel_is_loaded_where_the_loader_is_told_nothing(python: Path) -> None:
    assert ask(python) == [WHEEL, number(WHEEL)]


def test_ld_library_path_wins_over_the_wheel(python: Path) -> None:
    """And the wheel's metadata goes on telling the version that is not in use."""
    path = backends.libraries(OTHER)
    assert ask(python, LD_LIBRARY_PATH=f"/nowhere:{path}") == [WHEEL, number(OTHER)]
