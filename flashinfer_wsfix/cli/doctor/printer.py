"""The report laid out for people."""

import re
import textwrap
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
    """Lay the report out for people, in less than 80 columns."""
    yield from _wrapped("", found["sentence"])
    yield from ("", "Environment")
    for key, (name, *_) in ENVIRONMENT.items():
        yield from _wrapped(f"  {name:<18}", found["environment"][key] or "none found")
    for gpu in found["environment"]["gpus"] or [None]:
        text = "{name}, compute capability {capability}, driver {driver}".format(**gpu) if gpu else "none found"
        yield from _wrapped(f"  {'GPU':<18}", text)
    yield from ("", "Defects")
    for defect in found["defects"]:
        state = f"{defect['state']}{', guarded' if defect['guarded'] else ''}"
        yield from _wrapped(f"  {defect['name']}  ", f"{state}: {defect['what']}")
        yield from _wrapped("      - ", f"{defect['sentence']}.")
    yield from ("", "Activation")
    for row in found["activation"]:
        yield from _wrapped("  - ", f"{row['where']}: {row['sentence']}.")
    yield from ("", "Findings, and what to do")
    for finding in found["findings"]:
        yield from _wrapped("  ! " if finding["problem"] else "  - ", finding["sentence"])
        yield from _wrapped("    -> ", finding["advice"])
    if not found["findings"]:
        yield "  - none"
    yield from ("", "It is not this bug if")
    for sentence in found["not_this_bug"]:
        yield from _wrapped("  - ", sentence)
