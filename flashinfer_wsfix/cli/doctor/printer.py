"""The report laid out for people, in less than 80 columns: what is the matter and what to do come first."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .environment import ENVIRONMENT

WIDTH = 79


def _wrapped(first: str, text: str) -> list[str]:
    """Wrap after ``first``. A command stays whole, to be copied: its blanks are no blanks while the text is wrapped."""
    whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", "\0"), text)
    indent = " " * len(first)
    wrapper = textwrap.TextWrapper(WIDTH, first, indent, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\0", " ") for line in wrapper.wrap(whole)]


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Lay out what ``--json`` prints."""
    yield from _wrapped("", found["sentence"])
    yield from ("", "Findings, and what to do")
    for finding in found["findings"]:
        yield from _wrapped("  ! " if finding["problem"] else "  - ", finding["sentence"])
        yield from _wrapped("    -> ", finding["advice"])
    if not found["findings"]:
        yield "  - none"
    yield from ("", "Defects")
    for defect in found["defects"]:
        how = ", guarded" if defect["guarded"] else ", set up, not tried" if defect["set_up"] else ""
        state = f"{defect['state']}{how}"
        yield from _wrapped(f"  {defect['name']}  ", f"{state}: {defect['what']}")
        yield from _wrapped("      - ", f"{defect['sentence']}.")
    yield from ("", "Activation")
    for row in found["activation"]:
        yield from _wrapped("  - ", f"{row['where']}: {row['sentence']}.")
    yield from ("", "Environment")
    yield from _environment(found["environment"])
    if found["still_dies"]:
        yield from ("", "Guarded, and it still dies: gather for a report")
        for sentence in found["still_dies"]:
            yield from _wrapped("  - ", sentence)
    yield from ("", "It is not this bug if")
    for sentence in found["not_this_bug"]:
        yield from _wrapped("  - ", sentence)


def _environment(environment: dict[str, Any]) -> Iterator[str]:
    for key, (name, *_) in ENVIRONMENT.items():
        if environment[key]:
            told = _cudnn(environment) if key == "cudnn" else environment[key]
            yield from _wrapped(f"  {name:<22}", told)
    gpus = Counter(
        "{name}, compute capability {capability}, driver {driver}".format(**gpu) for gpu in environment["gpus"]
    )
    for gpu, count in gpus.items():
        yield from _wrapped(f"  {'GPU':<22}", f"{count} x {gpu}" if count > 1 else gpu)
    if environment["gpus_unknown"]:
        yield from _wrapped(f"  {'GPU':<22}", f"unknown ({environment['gpus_unknown']})")
    missing = [name for key, (name, *_) in ENVIRONMENT.items() if not environment[key]]
    missing += ["GPU"] * (not gpus and not environment["gpus_unknown"])
    yield from _wrapped(f"  {'not found':<22}", ", ".join(missing)) if missing else ()


def _cudnn(environment: dict[str, Any]) -> str:
    """Name the version that counts, who says so, and the wheels."""
    wheels = ", ".join(f"{wheel} {version}" for wheel, version in environment["cudnn_wheels"].items())
    if environment["cudnn_asked"]:
        return f"{environment['cudnn']}, as cudnn.backend_version() says{f' (wheels: {wheels})' if wheels else ''}"
    return f"{wheels} (by metadata; its frontend gave no answer)" if wheels else str(environment["cudnn"])
