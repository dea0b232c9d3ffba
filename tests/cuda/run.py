"""Build the simulated CUDA runtime and run tests on it, or a command. It needs g++ and binutils.

``python tests/cuda/run.py``: what the runtime itself does, then `tests/test_gpu.py` and this folder, two at a time, on
the oldest and the newest affected release, on capabilities 9.0 and 12.0, on one and on two devices.
``python tests/cuda/run.py PYTEST-ARGUMENT ...``: this folder alone, on the newest release; ``--walks 200 -k walks``: a
long random walk. ``python tests/cuda/run.py planted [FAULT ...]``: planted faults, and which test finds each.
``python tests/cuda/run.py RELEASE COMMAND ...``: a command, such as ``flashinfer-wsfix demo``.

The runtime's settings and what it cannot do stand in `runtime/state.h`. What passes here passes on PyTorch's real CUDA
host code over a simulated runtime; that is no GPU.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

import faults  # noqa: E402
from build import build  # noqa: E402

import releases  # noqa: E402

OLDEST, NEWEST = releases.AFFECTED[0], releases.AFFECTED[-1]
GPU_TESTS, SMOKE = TESTS / "test_gpu.py", HERE / "test_smoke.py"
THIS = (HERE, "--deselect", SMOKE)  # the same on any release
RUNS = (  # release, capability, devices, and what; the longest first
    (NEWEST, "12.0", 2, (GPU_TESTS,)),
    (OLDEST, "9.0", 1, (GPU_TESTS,)),
    (NEWEST, "12.0", 2, THIS),
    (NEWEST, "9.0", 1, THIS),
    (OLDEST, "12.0", 2, THIS),
    (OLDEST, "9.0", 1, THIS),
)


def environment(release: str, capability: str = "9.0", devices: int = 1) -> dict[str, str]:
    """Return the environment of a process that finds this release, and a simulated GPU."""
    path = os.pathsep.join(filter(None, [str(releases.fetch(release)), os.environ.get("PYTHONPATH")]))
    library = str(build(Path(sys.prefix, "simulation")))
    simulated = {"FAKECUDA_CC": capability, "FAKECUDA_DEVICES": str(devices), "LD_LIBRARY_PATH": library}
    return {**os.environ, "PYTHONPATH": path, **simulated}


def run(release: str, capability: str, devices: int, what: tuple[object, ...]) -> tuple[int, str]:
    """Run tests; return the exit code, and what to print of it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, what)]
    told = environment(release, capability, devices)
    done = subprocess.run(command, env=told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.strip().splitlines()[-60 if done.returncode else -2 :]
    name = f"{what[0].name}, {release}, capability {capability}, {devices} device{'s' * (devices > 1)}"
    return done.returncode, "\n".join([f"--- {name}", *lines])


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["planted"]:
        return faults.main(arguments[1:], environment(NEWEST, "12.0", 2))
    if arguments and arguments[0] in releases.AFFECTED:
        return subprocess.run(arguments[1:], env=environment(arguments[0])).returncode
    if arguments:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE), *arguments]
        return subprocess.run(command, env=environment(NEWEST)).returncode
    code, told = run(NEWEST, "9.0", 1, (SMOKE,))
    print(told, flush=True)
    if code:
        return code
    with ThreadPoolExecutor(2) as pool:
        for done in as_completed([pool.submit(run, *row) for row in RUNS]):
            failed, told = done.result()
            print(told, flush=True)
            code = code or failed
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
