"""Fetch FlashInfer's real Python code from its released wheels.

``python tests/releases.py default|affected`` fetches them all into ``tests/.releases``, which git ignores.
``python tests/releases.py RELEASE COMMAND [ARG ...]`` runs a command that finds this release as if it were installed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DEFAULT = ("0.6.11.post3", "0.6.12", "0.6.14", "0.6.16.post3", "0.6.18.post1", "0.7.4")
EIGHT_SITES = ("0.6.12", "0.6.13")
TEN_SITES = (
    "0.6.14",
    "0.6.15",
    "0.6.15.post1",
    "0.6.16",
    "0.6.16.post1",
    "0.6.16.post2",
    "0.6.16.post3",
    "0.6.16.post4",
    "0.6.17",
    "0.6.18",
    "0.6.18.post1",
)
AFFECTED = EIGHT_SITES + TEN_SITES
STATIC = ("0.5.3",)  # only read, for its `_get_cache_buf` without `zero_init`
LISTS = {"default": DEFAULT, "affected": AFFECTED}

FOLDER = Path(__file__).parent / ".releases"


def fetch(release: str) -> Path:
    """Return the folder that holds this release's `flashinfer/` and its `.dist-info`."""
    folder = FOLDER / release
    if folder.exists():
        return folder
    FOLDER.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=FOLDER, prefix=f"fetching-{release}-"))
    try:
        # --no-deps: FlashInfer's own requirements would bring a second torch and gigabytes of CUDA.
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        options = ["--no-deps", "--only-binary", ":all:", "-d", str(scratch)]
        subprocess.run([*pip, *options, f"flashinfer-python=={release}"], check=True)
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            wheel.extractall(scratch / release, filter(_wanted, wheel.namelist()))
        _publish(scratch / release, folder)
    finally:
        shutil.rmtree(scratch)
    return folder


def _wanted(name: str) -> bool:
    """What the import reads: the kernels' sources in `data/`, up to 700 MB, are only for compiling them."""
    if name.startswith("flashinfer/"):
        return name.endswith((".py", ".json")) and not name.startswith("flashinfer/data/")
    return ".dist-info/" in name


def _publish(made: Path, folder: Path) -> None:
    """Put the folder in place in one step, or leave the one that another process put there first."""
    try:
        os.replace(made, folder)
    except OSError:
        if not folder.exists():
            raise


def run(release: str, command: list[str]) -> int:
    """Run a command with this release first on its import path; return its exit code."""
    path = os.pathsep.join(filter(None, [str(fetch(release)), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


if __name__ == "__main__":
    if sys.argv[1] not in LISTS:
        sys.exit(run(sys.argv[1], sys.argv[2:]))
    with ThreadPoolExecutor(2) as pool:
        for fetched in pool.map(fetch, LISTS[sys.argv[1]]):
            print(fetched)
