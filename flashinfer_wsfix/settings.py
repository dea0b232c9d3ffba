"""The environment variables: what they are, what they may say, and what is used where they make no sense."""

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .sites import GATES, LANES

PREFIX = "FLASHINFER_WSFIX"
MIB = 1 << 20
SWITCH = dict.fromkeys(("1", "on", "true", "yes"), True) | dict.fromkeys(("0", "off", "false", "no"), False)
MODES = {word: "on" if on else "off" for word, on in SWITCH.items()} | {"observe": "observe"}
LEVELS = {level.lower(): level for level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


class Setting(NamedTuple):
    """One variable: its default as one would write it, what it takes, and how its text is read, in lower case."""

    variable: str
    default: str
    takes: str
    parse: Callable[[str], Any]


class Settings(NamedTuple):
    """What the variables say. ``workspace_bytes`` is in bytes; ``presize`` is "used", "all", or names of lanes."""

    mode: str
    workspace_bytes: int
    gate: tuple[str, ...]
    vllm: bool
    presize: str | tuple[str, ...]
    strict: bool
    log: str


def _bytes(mebibytes: str) -> int:
    if not 0 <= int(mebibytes) <= 65536:
        raise ValueError(mebibytes)
    return int(mebibytes) * MIB


def _chosen(text: str, names: Iterable[str]) -> tuple[str, ...]:
    chosen = {part.strip() for part in text.split(",")} - {""}
    if not SWITCH.get(text, True):
        return ()
    if not chosen or chosen.difference(names):
        raise ValueError(text)
    return tuple(name for name in names if name in chosen)


def _presize(text: str) -> str | tuple[str, ...]:
    return text if text in ("used", "all") else _chosen(text, LANES)


SETTINGS = {
    "mode": Setting(PREFIX, "1", "1, 0 or observe", MODES.__getitem__),
    "workspace_bytes": Setting(PREFIX + "_WORKSPACE_MIB", "40", "a whole number of MiB from 0 to 65536", _bytes),
    "gate": Setting(PREFIX + "_GATE", "fp8,bf16", "fp8, bf16, fp8,bf16 or off", lambda text: _chosen(text, GATES)),
    "vllm": Setting(PREFIX + "_VLLM", "1", "1 or 0", SWITCH.__getitem__),
    "presize": Setting(PREFIX + "_PRESIZE", "used", "used, all, off, or names of lanes joined by commas", _presize),
    "strict": Setting(PREFIX + "_STRICT", "0", "1 or 0", SWITCH.__getitem__),
    "log": Setting(PREFIX + "_LOG", "INFO", "DEBUG, INFO, WARNING or ERROR", LEVELS.__getitem__),
}


def read() -> tuple[Settings, list[str]]:
    """Read the variables as they are now. The second value has one sentence for each that makes no sense."""
    values, complaints, known = {}, [], {row.variable for row in SETTINGS.values()}
    for field, row in SETTINGS.items():
        text = os.environ.get(row.variable, "").strip() or row.default
        try:
            values[field] = row.parse(text.lower())
        except (KeyError, ValueError):
            values[field] = row.parse(row.default.lower())
            sense = f"makes no sense (it takes {row.takes}); the default {row.default!r} is used"
            complaints.append(f"{row.variable}={text!r} {sense}")
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable not in known:
            complaints.append(f"{variable} is not a setting of flashinfer-wsfix and does nothing")
    return Settings(**values), complaints
