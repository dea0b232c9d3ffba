"""Run `tests/real` on each release of FlashInfer, each in its own process, two at a time.

``python tests/each_release.py default|affected [pytest arguments]``; the last line adds all of them up.
"""

import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import releases

TAIL = 15  # lines of a release that failed


def run(release: str, options: list[str]) -> tuple[Counter[str], str]:
    """Return how many tests of a release ended how, and what to print of it."""
    command = [sys.executable, "-m", "pytest", "-q", "--flashinfer", release, str(Path(__file__).parent / "real")]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.strip().splitlines() or [""]
    counts = Counter({word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped)", lines[-1])})
    counts["failed"] += sum(int(number) for number in re.findall(r"(\d+) errors?\b", lines[-1]))
    if not counts["failed"] and (done.returncode or not counts["passed"]):
        counts["failed"] = 1  # broken off, or nothing ran
    return counts, "\n".join(lines[-TAIL:] if counts["failed"] else lines[-1:])


def main(which: str, options: list[str]) -> int:
    total: Counter[str] = Counter(passed=0, failed=0)
    with ThreadPoolExecutor(2) as pool:
        running = {pool.submit(run, release, options): release for release in releases.LISTS[which]}
        for future in as_completed(running):
            counts, output = future.result()
            total += counts
            print(f"--- FlashInfer {running[future]}\n{output}", flush=True)
    skipped = f", {total['skipped']} skipped" if total["skipped"] else ""
    print(f"{total['passed']} passed, {total['failed']} failed{skipped}")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
