"""What this process tells: the log, ``status()``, and the one policy for errors of ours. Never raises into the host."""

import logging
import os
import sys
import threading
from contextlib import suppress
from typing import Any, NamedTuple

from . import settings, state
from .detection import Verdict
from .names import CUTLASS_MLA

HOSTS = {"flashinfer": "FlashInfer", "vllm": "vLLM"}
PENDING = {
    "flashinfer": Verdict("pending", "no import of FlashInfer was seen in this process yet"),
    "vllm": Verdict("pending", "no import of vLLM's CUTLASS MLA backend or warm-up was seen in this process yet"),
}
INACTIVE = Verdict("disabled", "flashinfer-wsfix is not active in this process: nothing is guarded")


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
    """This process: the package's version, how it was activated, and what it has done since.

    ``displaced_buffers`` and ``displaced_nbytes`` (bytes) are what FlashInfer's cache let go of and we keep;
    ``unguarded_calls`` ran on the host's own code because of an error of ours.
    """

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
    displaced_nbytes: int
    unguarded_calls: int

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain dictionaries, lists, strings and integers, ready for ``json.dumps``."""
        return self._asdict() | {name: [row._asdict() for row in getattr(self, name)] for name in ("targets", "lanes")}


def verdict_of(target: str) -> Verdict:
    """Return what is known of a target by now."""
    if not state.routes:
        return INACTIVE
    verdict = state.verdicts.get(target, PENDING[target])
    error = state.errors.get(target)
    return verdict._replace(reason=f"{verdict.reason}; but {error}") if error else verdict


def status() -> Status:
    """Return a frozen record of what is guarded in this process and what has happened since. Imports nothing new."""
    workspace = sys.modules.get(f"{__package__}.workspace")
    lanes = workspace.look() if workspace else ()
    with state.lock:
        return Status(
            version=sys.modules[__package__].__version__,
            pid=os.getpid(),
            routes=tuple(state.routes),
            targets=tuple(TargetStatus(name, state.versions.get(name), *verdict_of(name)) for name in HOSTS),
            gates=state.gates,
            lanes=tuple(LaneStatus(*lane.describe()) for lane in lanes),
            **state.counters,
        )


class WorkerStatus:
    """For vLLM's ``--worker-extension-cls``: a method of each worker that ``collective_rpc`` can call by its name."""

    def flashinfer_wsfix_status(self) -> dict[str, Any]:
        """Return ``status().as_dict()`` of the worker's process."""
        return status().as_dict()


def record(target: str, verdict: Verdict, version: str | None) -> None:
    """Keep a target's verdict, and say it once: INFO where all is well, one WARNING where the server is at risk."""
    if version:
        state.versions[target] = version
    before = state.verdicts.get(target, PENDING[target])
    state.verdicts[target] = verdict
    if verdict[:2] == before[:2]:  # a module of the target that came later, or a reload
        return
    if verdict.state in ("unsupported", "failed"):
        log(logging.WARNING, f"{verdict.reason}.")
    elif verdict.state == "guarded":
        gate = f"; gate on SM12x: {', '.join(state.gates)}" if target == "flashinfer" and state.gates else ""
        log(logging.INFO, f"{verdict.reason}{gate}{_removal()} (activated by {', '.join(state.routes)}).")
    elif verdict.state == "disabled":  # the same for both targets
        once(logging.INFO, verdict.reason, f"{verdict.reason}.")
    else:
        log(logging.INFO, f"{verdict.reason}{_removal()}.")


def _removal() -> str:
    """Say whether the package can go, once FlashInfer is known not to need it. Either host may be judged last."""
    if verdict_of("flashinfer").state not in ("not-needed", "not-affected"):
        return ""
    if any(site.startswith(CUTLASS_MLA) for site in verdict_of("vllm").sites):
        return "; keep flashinfer-wsfix, for vLLM's SM100Workspace needs it whatever FlashInfer does"
    return "; flashinfer-wsfix can be removed, unless vLLM's SM100Workspace (CUTLASS MLA on SM100) is in use"


def failed(target: str, error: Exception, call: str = "") -> None:
    """Follow the one policy for an error of ours: raise it under STRICT, else say once what it means, and go on.

    ``call``: what runs on the host's own code this time, such as "a cuDNN GEMM"; without it the target is not guarded
    at all. ``status()`` shows it from then on.
    """
    if settings.read()[0].strict:
        raise error
    what = f"{call} ran UNGUARDED" if call else f"{HOSTS.get(target, target)} is NOT guarded"
    reason = (
        f"{what}, because of an error of flashinfer-wsfix ({type(error).__name__}: {error}): the host's own code runs"
        " as if flashinfer-wsfix were not installed, and CUDA graphs may replay against freed memory"
    )
    with state.lock:
        if call:
            state.errors.setdefault(target, reason)
            state.count("unguarded_calls")
        else:
            for known in [target] if target in HOSTS else HOSTS:
                if known == target or verdict_of(known).state != "guarded":
                    state.verdicts[known] = Verdict("failed", reason)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    advice = f"`pip install {missing}` in this environment" if missing else "Please report it"
    once(logging.WARNING, ("failed", target, call), f"{reason}. {advice}.")


def once(level: int, key: object, sentence: str) -> None:
    """Log a sentence, once per process for each ``key``."""
    if key not in state.said:
        state.said.add(key)
        log(level, sentence)


def moved(
    what: str, lane: str, device: object, old: tuple[int, int], new: tuple[int, int], capturing: bool, level: int
) -> None:
    """Log that a lane's address changed: ``old`` and ``new`` are (address, bytes), (0, 0) for none."""
    frame = sys._getframe(1)
    between = (__package__, "torch", "wrapt")  # torch: where dynamo keeps from compiling us
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in between:
        frame = frame.f_back
    log(
        level,
        f"{what}: lane {lane} on {device}, {old[1]} bytes at {old[0]:#x} -> {new[1]} bytes at {new[0]:#x}, capturing"
        f" {'yes' if capturing else 'no'}, thread {threading.current_thread().name}, called from"
        f" {frame.f_code.co_filename}:{frame.f_lineno}",
    )


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable in Python 3.10
    """Standard error, for as long as the application has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def log(level: int, sentence: str) -> None:
    """Log a sentence, through vLLM's logger where vLLM has set one up (any other is lost there), else through ours."""
    with suppress(Exception):  # a broken handler of the application's must not reach the host's call
        host = "vllm." if logging.getLogger("vllm").handlers else ""
        logger = logging.getLogger(f"{host}flashinfer_wsfix")
        if not host and not logger.handlers:
            handler = _Handler()
            handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
            logger.addHandler(handler)
        if logger.level == logging.NOTSET:  # unless the application has set one
            logger.setLevel(settings.read()[0].log)
        logger.log(level, "flashinfer-wsfix[%d]: %s", os.getpid(), sentence)
