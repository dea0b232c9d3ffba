"""What this process knows of itself: verdicts, counters, the log, and ``status()``. Never raises into the host."""

import logging
import os
import sys
import threading
from contextlib import suppress
from typing import Any, NamedTuple

from . import __version__, hook
from .detection import Verdict

PENDING = {
    "flashinfer": Verdict("pending", "no import of FlashInfer was seen in this process yet"),
    "vllm": Verdict("pending", "no import of vLLM's CUTLASS MLA backend or warm-up was seen in this process yet"),
}
INACTIVE = Verdict("disabled", "flashinfer-wsfix was deactivated in this process: nothing is guarded")
COUNTERS = ("growths", "capture_overflows", "gated_calls", "displaced_buffers")

# The one lock of this package but for a lane's own: around patching, publishing and counting, never on the way of an
# ordinary call, and never held while an import or a log handler runs. A fork waits for it, so that no child inherits it
# taken.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

verdicts: dict[str, Verdict] = dict(PENDING)
versions: dict[str, str] = {}
gates: tuple[str, ...] = ()  # in force in this process
_counters = dict.fromkeys(COUNTERS, 0)
_said: set[object] = set()


class TargetStatus(NamedTuple):
    """One host library: its version, its verdict, and what is wrapped in it."""

    name: str
    version: str | None
    state: str
    reason: str
    sites: tuple[str, ...]


class LaneStatus(NamedTuple):
    """One lane, in bytes; ``address`` of its current generation, ``high_water`` the largest size that did not fit."""

    name: str
    device: str
    generation: int
    nbytes: int
    retired_nbytes: int
    address: int
    high_water: int


class Status(NamedTuple):
    """This process: the package's version, how it was activated, and what it has done since."""

    version: str
    pid: int
    routes: tuple[str, ...]
    targets: tuple[TargetStatus, ...]
    gates: tuple[str, ...]
    lanes: tuple[LaneStatus, ...]
    growths: int
    capture_overflows: int
    gated_calls: int
    displaced_buffers: int

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain dictionaries, lists, strings and integers, ready for ``json.dumps``."""
        return self._asdict() | {
            "targets": [target._asdict() for target in self.targets],
            "lanes": [lane._asdict() for lane in self.lanes],
        }


def status() -> Status:
    """Return a frozen record of what is guarded in this process and what has happened since. Imports nothing new."""
    workspace = sys.modules.get(f"{__package__}.workspace")
    with lock:
        return Status(
            version=__version__,
            pid=os.getpid(),
            routes=tuple(hook.routes),
            targets=tuple(
                TargetStatus(name, versions.get(name), *(verdict if hook.routes else INACTIVE))
                for name, verdict in verdicts.items()
            ),
            gates=gates,
            lanes=tuple(
                LaneStatus(
                    name=lane.name,
                    device=str(lane.device),
                    generation=len(lane.generations),
                    nbytes=lane.generations[-1].numel() if lane.generations else 0,
                    retired_nbytes=sum(buffer.numel() for buffer in lane.generations[:-1]),
                    address=lane.generations[-1].data_ptr() if lane.generations else 0,
                    high_water=lane.high_water,
                )
                for lane in (workspace.lanes() if workspace else ())
            ),
            **_counters,
        )


class WorkerStatus:
    """For vLLM's ``--worker-extension-cls``: a method of each worker that ``collective_rpc`` can call by its name."""

    def flashinfer_wsfix_status(self) -> dict[str, Any]:
        """Return ``status().as_dict()`` of the worker's process."""
        return status().as_dict()


def count(counter: str, by: int = 1) -> None:
    """Add to one of the counters of ``status()``."""
    with lock:
        _counters[counter] += by


def record(target: str, verdict: Verdict, version: str | None) -> None:
    """Keep a target's verdict, and say it once: INFO where all is well, one WARNING where the server is at risk."""
    if version:
        versions[target] = version
    before = verdicts[target]
    verdicts[target] = verdict
    if verdict[:2] == before[:2]:  # a module of the target that came later, or a reload
        return
    if verdict.state in ("unsupported", "failed"):
        log(logging.WARNING, f"{verdict.reason}.")
    elif verdict.state == "guarded":
        gate = f"; gate on SM12x: {', '.join(gates)}" if target == "flashinfer" and gates else ""
        log(logging.INFO, f"{verdict.reason}{gate}{_removal()} (activated by {', '.join(hook.routes)}).")
    else:
        log(logging.INFO, f"{verdict.reason}{_removal()}.")


def _removal() -> str:
    """Say whether the package can go, once FlashInfer is known not to need it. Either host may be judged last."""
    if verdicts["flashinfer"].state not in ("not-needed", "not-affected"):
        return ""
    if any(site.startswith(hook.CUTLASS_MLA) for site in verdicts["vllm"].sites):
        return "; keep flashinfer-wsfix, for vLLM's SM100Workspace needs it whatever FlashInfer does"
    return "; flashinfer-wsfix can be removed, unless vLLM's SM100Workspace (CUTLASS MLA on SM100) is in use"


def record_failure(target: str, error: BaseException) -> None:
    """Keep and say that an error of ours left a target unguarded."""
    name = {"flashinfer": "FlashInfer", "vllm": "vLLM"}.get(target, target)
    reason = (
        f"{name} is NOT guarded, because of an error of flashinfer-wsfix ({type(error).__name__}: {error}): it runs as"
        " if flashinfer-wsfix were not installed, and CUDA graphs may replay against freed memory"
    )
    for known in [target] if target in verdicts else list(verdicts):
        if known == target or verdicts[known].state != "guarded":
            verdicts[known] = Verdict("failed", reason)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    advice = f"`pip install {missing}` in this environment" if missing else "Please report it"
    warn_once(("failed", name), f"{reason}. {advice}.")


def warn_once(key: object, sentence: str) -> None:
    """Log a warning, once per process for each ``key``."""
    if key not in _said:
        _said.add(key)
        log(logging.WARNING, sentence)


def inform_once(key: object, sentence: str) -> None:
    """Log at INFO, once per process for each ``key``."""
    if key not in _said:
        _said.add(key)
        log(logging.INFO, sentence)


def moved(
    what: str, lane: str, device: object, old: tuple[int, int], new: tuple[int, int], capturing: bool, level: int
) -> None:
    """Log that a lane's address changed: ``old`` and ``new`` are (address, bytes), (0, 0) for none."""
    log(
        level,
        f"{what}: lane {lane} on {device}, {old[1]} bytes at {old[0]:#x} -> {new[1]} bytes at {new[0]:#x}, capturing"
        f" {'yes' if capturing else 'no'}, thread {threading.current_thread().name}, called from {_caller()}",
    )


def _caller() -> str:
    frame = sys._getframe(1)
    between = (__package__, "torch", "wrapt")  # torch: where dynamo keeps from compiling us
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in between:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable in Python 3.10
    """Standard error, for as long as the application has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def log(level: int, sentence: str) -> None:
    """Log a sentence, through vLLM's logger where vLLM has set one up (any other is lost there), else through ours."""
    with suppress(Exception):  # a broken handler of the application's must not reach the host's call
        _logger().log(level, "flashinfer-wsfix[%d]: %s", os.getpid(), sentence)


def set_level(name: str) -> None:
    """Set the level of our loggers, as ``FLASHINFER_WSFIX_LOG`` says, unless the application has set one."""
    global _level
    _level = name


_level = "INFO"


def _logger() -> logging.Logger:
    host = "vllm." if logging.getLogger("vllm").handlers else ""
    logger = logging.getLogger(f"{host}flashinfer_wsfix")
    if not host and not logger.handlers:
        handler = _Handler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(_level)
    return logger
