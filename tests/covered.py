"""Run the tests with branch coverage of the package, and print the table.

``python tests/covered.py [pytest arguments]``: on one release of FlashInfer, since the others reach the same lines.
Exits with 1 where a test fails, with 2 where less is covered than setup.cfg asks for. Children, forks and the
environments that the tests make are measured too, except what a signal kills and other versions of Python than this
one.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASE = "0.6.18.post1"  # has all sites
# The state machine's 2,000 sequences take minutes more with a tracer, and reach no line that nothing else does.
OPTIONS = ["-k", "not whatever_happens"]

# What tells a child to measure itself: empty where nothing is measured.
VARIABLES = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_PROCESS_")}


def measure(site_packages: Path) -> None:
    """Have the processes of a made environment measured, from before our start-up file on, where this one is."""
    if VARIABLES and site_packages.parent.name == "python{}.{}".format(*sys.version_info):
        import coverage

        (site_packages / "coverage").symlink_to(Path(coverage.__file__).parent)
        (site_packages / "coverage.pth").write_text("import coverage; coverage.process_startup()\n")


def run_coverage(*words: str) -> int:
    return subprocess.run([sys.executable, "-m", "coverage", *words], cwd=ROOT).returncode


if __name__ == "__main__":
    run_coverage("erase")
    failed = run_coverage("run", "tests/each_release.py", RELEASE, *(sys.argv[1:] or OPTIONS))
    combined = run_coverage("combine", "--quiet")
    for cut_off in ROOT.glob(".coverage.*"):  # of a process that was killed while it wrote
        cut_off.unlink()
    sys.exit(combined or run_coverage("report") or failed)
