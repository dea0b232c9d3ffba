"""Run the tests with branch coverage of the package, and print the table.

``python tests/covered.py [pytest arguments]``: exits with 1 where a test fails, with 2 where less is covered than
setup.cfg asks for. Child processes and forks are measured too, except those that a signal kills and those of the
environments that the tests make, which have no coverage in them: most of startup.py and doctor.py run only there and
count as missed, and bootstrap/sitecustomize.py is not measured at all.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The state machine's 2,000 sequences take minutes more with a tracer, and reach no line that nothing else does.
OPTIONS = ["-k", "not whatever_happens"]


def coverage(*words: str) -> int:
    return subprocess.run([sys.executable, "-m", "coverage", *words], cwd=ROOT).returncode


if __name__ == "__main__":
    coverage("erase")
    failed = coverage("run", "tests/each_release.py", "default", *(sys.argv[1:] or OPTIONS))
    sys.exit(coverage("combine", "--quiet") or coverage("report") or failed)
