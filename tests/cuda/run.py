"""Build the simulated runtime, and run on it: the tests, or a command. It needs g++ and binutils.

``python tests/cuda/run.py``: the runtime's own tests, tests/test_gpu.py, the demo's CUDA half, and this folder's tests.
``python tests/cuda/run.py RELEASE COMMAND [ARG ...]``: a command on it, such as ``python -m flashinfer_wsfix demo``.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

import build  # noqa: E402
import releases  # noqa: E402


def environment(release: str, capability: str = "9.0", devices: int = 1) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(releases.fetch(release)), os.environ.get("PYTHONPATH")]))
    lib = str(build.build(Path(sys.prefix, "simulation")))
    simulated = {"FAKECUDA_CC": capability, "FAKECUDA_DEVICES": str(devices), "LD_LIBRARY_PATH": lib}
    return {**os.environ, "PYTHONPATH": path, **simulated}


if __name__ == "__main__":
    sys.exit(subprocess.run(sys.argv[2:], env=environment(sys.argv[1])).returncode)
