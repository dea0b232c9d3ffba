"""Plant faults in a copy of the package, and show that the state machine finds each of them.

``python tests/planted.py [FAULT ...]``: about a minute for each. Exits with 1 where a fault is not found, where the
copy without a fault fails, or where the text to replace is no longer in the package.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent
RELEASE = "0.6.18.post1"

# Name, then what is replaced by what in workspace.py; each text is there exactly once.
FAULTS: dict[str, list[tuple[str, str]]] = {
    "none": [],
    "free on retire": [("self.generations.append(buffer)", "self.generations[:] = [buffer]")],
    "no zero-fill": [
        (
            "buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)",
            "buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)",
        )
    ],
    "publish under capture": [("capturing = is_capturing(self.device)", "capturing = False")],
    "coarse lanes: by name": [("found = lane(*key)", "found = lane(key[0], torch.device('cpu'))")],
    "coarse lanes: by device": [("found = lane(*key)", "found = lane('one', key[1])")],
    "lost lock": [
        (
            "        with report.lock:\n            last = self.generations[-1] if self.generations else None",
            "        if True:\n            last = self.generations[-1] if self.generations else None",
        )
    ],
    "displaced buffers freed": [("self.retired.extend(gone)", "pass")],
}


def plant(package: Path, changes: list[tuple[str, str]]) -> None:
    source = package / "workspace.py"
    text = source.read_text()
    for old, new in changes:
        if text.count(old) != 1:
            sys.exit(f"{old!r} is {text.count(old)} times in workspace.py: bring tests/planted.py up to date")
        text = text.replace(old, new)
    source.write_text(text)


def try_fault(name: str) -> tuple[bool, str]:
    """Return whether the state machine fails on the package with this fault, and with which words."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(TESTS.parent / "flashinfer_wsfix", Path(folder, "flashinfer_wsfix"))
        plant(Path(folder, "flashinfer_wsfix"), FAULTS[name])
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        options = {"env": environment, "cwd": folder, "stdout": subprocess.PIPE, "text": True}
        where = subprocess.run(
            [sys.executable, "-c", "import flashinfer_wsfix; print(flashinfer_wsfix.__file__)"], check=True, **options
        )
        if not where.stdout.startswith(folder):
            sys.exit(f"the copy is not what is imported, but {where.stdout}")
        machine = str(TESTS / "real" / "test_state_machine.py")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--flashinfer", RELEASE, machine],
            **options,
        )
    errors = re.findall(r"AssertionError: (.+)", done.stdout) or re.findall(r"^E +(\S+: .+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1):
        sys.exit(f"{name}: pytest ended with {done.returncode}\n{done.stdout}")
    return done.returncode == 1, errors[-1] if errors else ""


def main(names: list[str]) -> int:
    wrong = 0
    print(f"{'fault':25} {'found':6} {'s':>4}  how")
    for name in names or FAULTS:
        start = time.monotonic()
        found, words = try_fault(name)
        wrong += found != (name != "none")
        print(f"{name:25} {'yes' if found else 'no':6} {time.monotonic() - start:4.0f}  {words[:70]}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
