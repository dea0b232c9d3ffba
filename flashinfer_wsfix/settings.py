"""The environment variables: what they are, what they may say, and what is used where they make no sense."""

import os
from collections.abc import Callable
from typing import NamedTuple

from .sites import GATES, LANES

PREFIX = "FLASHINFER_WSFIX"
MIB = 1 << 20
ON, OFF = ("1", "on", "true", "yes"), ("0", "off", "false", "no")


class Setting(NamedTuple):
    """One variable: the name of its field, the variable, its default as one would write it, and what it takes."""

    field: str
    variable: str
    default: str
    takes: str
    parse: Callable[[str], object]


class Settings(NamedTuple):
    """What the variables say. ``workspace_bytes`` is in bytes; ``presize`` is "used", "all", or names of lanes."""

    mode: str
    workspace_bytes: int
    gate: tuple[str, ...]
    vllm: bool
    presize: str | tuple[str, ...]
    strict: bool
    log: str


def _switch(text: str) -> bool:
    if text.lower() in ON:
        return True
    if text.lower() in OFF:
        return False
    raise ValueError(text)


def _mode(text: str) -> str:
    if text.lower() == "observe":
        return "observe"
    return "on" if _switch(text) else "off"


def _mebibytes(text: str) -> int:
    mebibytes = int(text)
    if not 0 <= mebibytes <= 65536:
        raise ValueError(text)
    return mebibytes * MIB


def _chosen(text: str, names: tuple[str, ...]) -> tuple[str, ...]:
    chosen = {part.strip() for part in text.split(",")} - {""}
    if not chosen or not chosen <= set(names):
        raise ValueError(text)
    return tuple(name for name in names if name in chosen)


def _gate(text: str) -> tuple[str, ...]:
    if text.lower() in OFF:
        return ()
    return _chosen(text.lower(), tuple(gate.name for gate in GATES))


def _presize(text: str) -> str | tuple[str, ...]:
    if text.lower() in OFF:
        return ()
    if text.lower() in ("used", "all"):
        return text.lower()
    return _chosen(text, tuple(lane.name for lane in LANES))


def _level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError(text)
    return text.upper()


SETTINGS = (
    Setting("mode", PREFIX, "1", "1, 0 or observe", _mode),
    Setting("workspace_bytes", PREFIX + "_WORKSPACE_MIB", "40", "a whole number of MiB from 0 to 65536", _mebibytes),
    Setting("gate", PREFIX + "_GATE", "fp8,bf16", "fp8, bf16, fp8,bf16 or off", _gate),
    Setting("vllm", PREFIX + "_VLLM", "1", "1 or 0", _switch),
    Setting("presize", PREFIX + "_PRESIZE", "used", "used, all, off, or names of lanes joined by commas", _presize),
    Setting("strict", PREFIX + "_STRICT", "0", "1 or 0", _switch),
    Setting("log", PREFIX + "_LOG", "INFO", "DEBUG, INFO, WARNING or ERROR", _level),
)


def read() -> tuple[Settings, list[str]]:
    """Read the variables as they are now. The second value has one sentence for each that makes no sense."""
    complaints = []
    values = {}
    for setting in SETTINGS:
        text = os.environ.get(setting.variable, "").strip() or setting.default
        try:
            values[setting.field] = setting.parse(text)
        except ValueError:
            values[setting.field] = setting.parse(setting.default)
            complaints.append(
                f"{setting.variable}={text!r} makes no sense (it takes {setting.takes});"
                f" the default {setting.default!r} is used"
            )
    known = {setting.variable for setting in SETTINGS}
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable not in known:
            complaints.append(f"{variable} is not a setting of flashinfer-wsfix and does nothing")
    return Settings(**values), complaints  # type: ignore[arg-type]
