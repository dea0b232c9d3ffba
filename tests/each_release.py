"""Run the tests in processes of their own, two at a time: each release of FlashInfer, and each file of other tests.

``python tests/each_release.py default [pytest arguments]`` runs `tests/real` on six releases, and all other tests once;
a release in place of ``default``, on that one alone; ``affected`` runs `tests/real` on every affected release, and no
other tests. The last line adds all of them up.
"""

import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import releases

TESTS = Path(__file__).parent
OTHERS = [path.name for path in (TESTS / "startup", *sorted(TESTS.glob("test_*.py")))]  # the longest first
TAIL = 60  # lines of a run that failed


def run(name: str, options: list[str]) -> tuple[Counter[str], str]:
    """Run the tests of a release or of a file; return how many ended how, and what to print of it."""
    what = [str(TESTS / name)] if name in OTHERS else ["--flashinfer", name, str(TESTS / "real")]
    command = [sys.executable, "-m", "pytest", "-q", *what, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.strip().splitlines() or [""]
    counts = Counter({word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped)", lines[-1])})
    counts["failed"] += sum(int(number) for number in re.findall(r"(\d+) errors?\b", lines[-1]))
    ended = done.returncode in (0, 5)  # 5: a file that is skipped as a whole
    if not counts["failed"] and not (ended and counts["passed"] + counts["skipped"]):
        counts["failed"] = 1  # broken off, or nothing was there
    return counts, "\n".join(lines[-TAIL:] if counts["failed"] else lines[-1:])


def main(which: str, options: list[str]) -> int:
    total: Counter[str] = Counter()
    runs = [*(OTHERS if which != "affected" else ()), *releases.LISTS.get(which, [which])]
    with ThreadPoolExecutor(2) as pool:
        running = {pool.submit(run, name, options): name for name in runs}
        for future in as_completed(running):
            counts, output = future.result()
            total += counts
            print(f"--- {running[future]}\n{output}", flush=True)
    skipped = f", {total['skipped']} skipped" if total["skipped"] else ""
    print(f"{total['passed']} passed, {total['failed']} failed{skipped}")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
