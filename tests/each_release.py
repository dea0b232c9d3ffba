"""Run the tests in processes of their own, two at a time: each release of FlashInfer, and the files of other tests.

``python tests/each_release.py default [pytest arguments]`` runs `tests/real` on six releases, and all other tests once;
a release in place of ``default``, on that one alone; ``affected`` runs `tests/real` on every affected release, and no
other tests. The last line adds all of them up.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import releases

TESTS = Path(__file__).parent
# Two processes, before the releases, so that both cores have work to the end: the longest first. All other tests share
# one more, as most of them fork the same server.
LONG = {"start-up": ["startup"], "doctor and demo": ["test_doctor*.py", "test_demo.py"]}
# As long as a release, and on one of them alone.
MACHINE = "tests/real/test_state_machine.py::test_whatever_happens_the_contract_holds"
MACHINE_RELEASE = releases.AFFECTED[-1]
# While both cores have work, torch's own threads only wait for each other, and turn round while they do.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TAIL = 60  # lines of a run that failed


def runs(which: str) -> dict[str, list[str]]:
    """What to run, in this order: the name of each process, and its arguments to pytest."""
    # The newest first, which have the most tests, and last those that have few, as nothing is to be guarded there.
    chosen = sorted(releases.LISTS.get(which, (which,))[::-1], key=lambda name: name not in releases.AFFECTED)
    real = {name: ["--flashinfer", name, str(TESTS / "real"), "--deselect", MACHINE] for name in chosen}
    machine = {"state machine": ["--flashinfer", MACHINE_RELEASE, str(TESTS.parent / MACHINE)]}
    if MACHINE_RELEASE in chosen:
        real = {**machine, **real}
    if which == "affected":
        return real
    long = {name: sorted(str(path) for glob in globs for path in TESTS.glob(glob)) for name, globs in LONG.items()}
    rest = sorted({str(path) for path in TESTS.glob("test_*.py")}.difference(*long.values()))
    return {"all other files": rest, **long, **real}


def run(what: list[str]) -> tuple[Counter[str], str]:
    """Run pytest; return how many tests ended how, and what to print of it."""
    command = [sys.executable, "-m", "pytest", "-q", *what]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.strip().splitlines() or [""]
    found = re.findall(r"(\d+) (passed|failed|skipped|deselected)", lines[-1])
    counts = Counter({word: int(number) for number, word in found})
    counts["failed"] += sum(int(number) for number in re.findall(r"(\d+) errors?\b", lines[-1]))
    ended = done.returncode in (0, 5)  # 5: all that is there is skipped or not asked for
    if not counts["failed"] and not (ended and counts.total()):
        counts["failed"] = 1  # broken off, or nothing was there
    return counts, "\n".join(lines[-TAIL:] if counts["failed"] else lines[-1:])


def main(which: str, options: list[str]) -> int:
    total: Counter[str] = Counter()
    with ThreadPoolExecutor(2) as pool:
        running = {pool.submit(run, [*what, *options]): name for name, what in runs(which).items()}
        for future in as_completed(running):
            counts, output = future.result()
            total += counts
            print(f"--- {running[future]}\n{output}", flush=True)
    skipped = f", {total['skipped']} skipped" if total["skipped"] else ""
    print(f"{total['passed']} passed, {total['failed']} failed{skipped}")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
