"""Real cuDNN on a machine without a GPU: what it takes, and the environment of a process that has it.

``python tests/real_cudnn/backends.py [pytest arguments]`` runs the tests of this folder, once for each backend;
``python tests/real_cudnn/backends.py 9.20.0.48 COMMAND [ARG ...]`` runs a command on one of them. Wants gcc.

cuDNN is proprietary: pip installs it below the environment's own folder, and nothing of it is kept in this repository.
Beside it stand three small libraries (`stubs/`) that say what a CUDA driver, a compiler and cuBLASLt would say to it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import releases  # noqa: E402

VERSIONS = ("9.20.0.48", "9.28.1.4")  # the one of vLLM #55571, and the newest
BACKEND = "nvidia-cudnn-cu13"
FRONTEND = "nvidia-cudnn-frontend==1.32.0"
PLANNER = ("cuda-bindings==13.5.0", "cuda-pathfinder==1.9.1")  # what the frontend's planner imports
FLASHINFER = "0.6.18.post1"  # the newest that is affected: its builders and its sites
STUBS = {"cuda": "libcuda.so.1", "nvrtc": "libnvrtc.so.13", "cublaslt": "libcublasLt.so.13"}
NAMED = "TESTS_REAL_CUDNN"  # in the environment of a process that has real cuDNN: which one

FOLDER = Path(sys.prefix, "cudnn")


def install(requirement: str) -> Path:
    """Return the folder that holds this wheel and nothing that it requires: that would be gigabytes of CUDA."""
    folder = FOLDER / requirement
    if not folder.exists():
        FOLDER.mkdir(exist_ok=True)
        scratch = tempfile.mkdtemp(dir=FOLDER, prefix="installing-")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        try:
            subprocess.run([*pip, "--no-deps", "--target", scratch, requirement], check=True)
            os.replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def libraries(version: str) -> Path:
    """Return the folder of a backend's shared libraries."""
    return install(f"{BACKEND}=={version}") / "nvidia" / "cudnn" / "lib"


def build_stubs() -> Path:
    """Compile the three libraries and return their folder."""
    folder = FOLDER / "stubs"
    folder.mkdir(parents=True, exist_ok=True)
    for source, library in STUBS.items():
        made = folder / f"{library}.{os.getpid()}"
        gcc = ["gcc", "-Wall", "-Wno-builtin-declaration-mismatch", "-shared", "-fPIC", f"-Wl,-soname,{library}"]
        subprocess.run([*gcc, "-o", str(made), str(HERE / "stubs" / f"{source}.c")], check=True)
        os.replace(made, folder / library)
        plain = folder / library.partition(".so")[0]
        plain.with_suffix(".so").unlink(missing_ok=True)
        plain.with_suffix(".so").symlink_to(library)
    return folder


def first_generation() -> int:
    """Bytes of a lane's first generation where nobody asks for another size: the package's own table says."""
    from flashinfer_wsfix import settings

    row = settings.SETTINGS["workspace_bytes"]
    return int(str(row.parse(row.default)))


def prepare(versions: Sequence[str] = VERSIONS) -> None:
    """Fetch and build what processes on these backends need, two things at a time."""
    import torch

    if torch.version.cuda:
        sys.exit(
            "This torch is a CUDA build: it loads the real cuBLASLt, which offers nothing without a GPU. Install its"
            " CPU build into this environment (PIP_EXTRA_INDEX_URL with PyTorch's CPU wheels, then tox -r)."
        )
    if not shutil.which("gcc"):
        sys.exit("gcc is missing: the libraries in tests/real_cudnn/stubs are compiled with it.")
    FOLDER.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        wheels = pool.map(install, [*(f"{BACKEND}=={version}" for version in versions), FRONTEND, *PLANNER])
        releases.fetch(FLASHINFER)
        build_stubs()
        list(wheels)


def environment(version: str) -> dict[str, str]:
    """Return the variables of a process on this backend. What it needs must be there: see `prepare`."""
    path = [releases.fetch(FLASHINFER), *map(install, (FRONTEND, *PLANNER)), os.environ.get("PYTHONPATH")]
    loader = [FOLDER / "stubs", libraries(version), os.environ.get("LD_LIBRARY_PATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(part) for part in path if part),
        "LD_LIBRARY_PATH": os.pathsep.join(str(part) for part in loader if part),
        NAMED: version,
    }


def _run_tests(version: str, options: list[str]) -> tuple[str, Counter[str]]:
    # Without the conftest.py one folder up, which puts a fake in cuDNN's place.
    pytest = [sys.executable, "-m", "pytest", "-q", f"--confcutdir={HERE}", str(HERE), *options]
    done = subprocess.run(pytest, env=environment(version), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # After its last line comes what the frontend's binding says of its leaks as the interpreter ends.
    output = done.stdout.partition("\nnanobind: ")[0].strip()
    counts = Counter({word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped)", output)})
    if done.returncode and not counts["failed"]:
        counts["failed"] = 1
    return output, counts


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in VERSIONS:
        prepare(arguments[:1])
        return subprocess.run(arguments[1:], env=environment(arguments[0])).returncode
    prepare()
    total: Counter[str] = Counter()
    with ThreadPoolExecutor(2) as pool:
        for version, (output, counts) in zip(
            VERSIONS, pool.map(lambda version: _run_tests(version, arguments), VERSIONS), strict=True
        ):
            total += counts
            print(f"--- cuDNN {version}\n{output if counts['failed'] else output.splitlines()[-1]}", flush=True)
    print(f"{total['passed']} passed, {total['failed']} failed")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
