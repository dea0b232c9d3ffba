"""Lanes and their generations: what a site gets in place of FlashInfer's tensor, and how that grows without moving.

What is handed to a site is *armed*: its ``resize_`` ends the call before anything ran, since a site compares
``workspace.numel()`` with the plan's size first of all. The caller then picks a larger buffer and calls the site again.
"""

import inspect
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from . import report, settings
from .hook import AUTOTUNER, GEMM_BASE, UTILS
from .sites import LANES

STEP = 2 * settings.MIB  # generations are whole steps: the caching allocator's own granularity for large blocks
SCRATCH = "scratch"
ATTRIBUTE = "_wsfix_lane"  # on a tensor that a site was given: its Lane


class Overflow(BaseException):
    """A plan wants ``size`` bytes, more than its buffer has. FlashInfer's ``except Exception`` must not see it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def _overflow(size: int, *unused: object, **also_unused: object) -> None:
    raise Overflow(size)


def arm(buffer: torch.Tensor) -> torch.Tensor:
    """Have `buffer.resize_` raise Overflow instead, on this one tensor."""
    buffer.resize_ = _overflow
    return buffer


def _make_probe() -> torch.Tensor:
    """Make a buffer that no plan fits in, so that a lane's first call tells what it needs before anything is made."""
    probe = arm(torch.empty(0, dtype=torch.uint8, device="cpu"))
    probe.numel = lambda: float("-inf")
    return probe


PROBE = _make_probe()


def zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate ``nbytes`` of zeros (uint8, armed) for this thread's current stream. Raises what torch raises."""
    return arm(torch.zeros(nbytes, dtype=torch.uint8, device=device))


def _zeroed(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate ``nbytes`` of zeros (uint8, armed) that any stream may use at once. Raises what torch raises.

    In a thread of its own: torch keeps the current stream, memory pool, inference mode and function modes per thread,
    and a generation must come from none of the caller's. vLLM's sleep mode unmaps what was made in its pool, a tensor
    made in inference mode cannot be written outside it, and a fill on one stream is not seen by another without a wait.
    """
    if sys.is_finalizing():  # a thread would never start, and up to Python 3.11 nobody would say so
        raise RuntimeError("the interpreter is shutting down")
    result: list[Any] = []

    def wsfix_allocate() -> None:
        try:
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            result.append(buffer)
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=wsfix_allocate, name="flashinfer-wsfix", daemon=True)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return arm(result[0])


def is_capturing(device: torch.device) -> bool:
    """Say whether the current stream of ``device`` is being captured into a CUDA graph."""
    try:
        with torch.cuda.device(device if device.type == "cuda" else -1):
            return bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError:  # a CPU build of torch has no such thing
        return False


class Lane:
    """A workspace and the generations made for it: one of FlashInfer's, the auto-tuner's scratch, or vLLM's.

    ``current`` is what a site gets: the newest generation, or while there is none the probe, or FlashInfer's own buffer
    where none could be made. All generations are kept as long as the lane, since graphs may hold their addresses; a
    lane of FlashInfer's lives as long as the process.
    """

    __slots__ = ("__weakref__", "current", "device", "generations", "high_water", "name")

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.current = PROBE
        self.generations: list[torch.Tensor] = []
        self.high_water = 0  # bytes: the largest size that did not fit; what fits is never seen

    def __reduce__(self) -> tuple[Any, ...]:
        """Be None in a copy or a pickle: a lane is not the copy's, and what is saved must load without us."""
        return type(None), ()

    def buffer_for(self, size: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return an armed buffer of at least ``size`` bytes for a call that was given ``tensor``.

        Grows the lane, unless the current stream is capturing: a buffer made then would live in that graph's private
        pool and its zero-fill would only be recorded, so nothing made then is published. What is left in that case, or
        where growing fails, is FlashInfer's own buffer, if the lane has no generation yet and it is large enough, else
        a call-local one. Raises torch.OutOfMemoryError where there is no memory for that either.
        """
        scratch = self.name == SCRATCH
        capturing = is_capturing(self.device)
        with report.lock:
            self.high_water = max(self.high_water, size)
            if self.generations and self.generations[-1].numel() >= size:  # another thread was faster
                self.current = self.generations[-1]
                return self.current
        on_overflow_only = not first_bytes and not self.generations and not scratch
        if not capturing and not (on_overflow_only and size <= tensor.numel()):
            try:
                return self.grow(size)
            except Exception as error:
                report.warn_once(
                    ("grow", self.name, self.device),
                    f"the workspace {self.name} on {self.device} could not grow to {size} bytes ({error}): this call"
                    " gets a temporary buffer and the lane stays as it was. If memory is short, leave more of it free.",
                )
        if size <= tensor.numel() and not self.generations and not scratch:
            own = arm(tensor.detach())
            with report.lock:  # until a plan overflows it: growing is not tried again at each call
                if not capturing and not self.generations:
                    self.current = own
            return own
        if capturing:
            tuners = _measuring.lanes.get(self.device) if _is_measuring() else None
            if tuners is not None and tuners.current.numel() >= size:
                return tuners.current
            report.count("capture_overflows")
            mib = -(-size // STEP) * STEP // settings.MIB
            advice = f"Set {settings.PREFIX}_WORKSPACE_MIB={mib} or call presize() before capture to avoid it."
            if all(self.name != row.name for row in LANES):  # vLLM's
                advice = "Run that shape once before capture to avoid it."
            report.warn_once(
                ("capture", self.name, self.device),
                f"a plan asked for {size} bytes of {self.name} on {self.device} while a CUDA graph was being captured,"
                " more than there is: that graph gets a buffer of its own, which is safe but is zeroed at every replay."
                f" {advice}",
            )
        return zeros(size, self.device)

    def grow(self, size: int) -> torch.Tensor:
        """Publish a generation of at least ``size`` bytes and twice the last one, retire the last, return the new one.

        Doubling keeps all retired generations together smaller than the current one. Raises what torch raises where
        memory runs out, with the lane as it was.
        """
        with report.lock:
            growing = _growing.setdefault(self, threading.RLock())
        # The allocation waits for a thread and for a stream, which may wait for other devices and run finalizers: only
        # who wants to grow this very lane waits for it.
        with growing:
            last = self.generations[-1] if self.generations else None
            if last is not None and last.numel() >= size:
                return last
            least = 2 * last.numel() if last is not None else first_bytes
            make = zeros if self.name == SCRATCH else _zeroed
            buffer = make(-(-max(size, least) // STEP) * STEP, self.device)
            with report.lock:
                self.generations.append(buffer)
                self.current = buffer
        if self.name != SCRATCH:
            if last is not None:
                report.count("growths")
            old = (0, 0) if last is None else (last.data_ptr(), last.numel())
            new = (buffer.data_ptr(), buffer.numel())
            report.moved(f"generation {len(self.generations)}", self.name, self.device, old, new, False, logging.INFO)
        return buffer


# A lane's lock for growing. A child of a fork starts with none: a thread that held one is not there.
_growing: weakref.WeakKeyDictionary[Lane, threading.RLock] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_growing.clear)

_lanes: dict[tuple[str, torch.device], Lane] = {}
first_bytes = 40 * settings.MIB  # size of a lane's first generation; 0: none until a plan overflows FlashInfer's buffer


def lanes() -> tuple[Lane, ...]:
    """List the lanes of this process, in the order in which they were first used."""
    return tuple(_lanes.values())


def lane(name: str, device: torch.device) -> Lane:
    """Return the lane of that name and device, made on first use."""
    with report.lock:
        return _lanes.setdefault((name, device), Lane(name, device))


def lane_of(tensor: torch.Tensor) -> Lane:
    """Return the lane of a tensor that a site was given, and remember it on the tensor.

    A tensor that is in FlashInfer's cache belongs to the lane of its key. Any other is the auto-tuner's scratch (or a
    caller's own): its lane belongs to the tensor and is freed with it, so that nothing leaks per tuning profile.

    The tuner also clones its inputs, the workspace too, and captures CUDA graphs that run through the clones. What it
    measures with in one thread and on one device shares a lane: the first call on it is eager, the captured ones find
    it large enough, and no zero-fill falsifies what is measured.
    """
    with report.lock:
        found: Lane | None = getattr(tensor, ATTRIBUTE, None)
        if found is None:
            key = cache_key(tensor)
            if key is not None:
                found = lane(*key)
            elif _is_measuring():
                found = _measuring.lanes.setdefault(tensor.device, Lane(SCRATCH, tensor.device))
            else:
                found = Lane(SCRATCH, tensor.device)
            setattr(tensor, ATTRIBUTE, found)
        return found


class _Measuring(threading.local):
    """This thread's lanes of auto-tuner scratch by device, each for as long as a tensor belongs to it."""

    def __init__(self) -> None:
        self.lanes: weakref.WeakValueDictionary[torch.device, Lane] = weakref.WeakValueDictionary()


_measuring = _Measuring()


def _is_measuring() -> bool:
    """Say whether FlashInfer's auto-tuner is measuring in this thread: a graph that it captures now is thrown away."""
    is_measuring = getattr(sys.modules.get(AUTOTUNER), "is_in_profile_measurement", None)
    return is_measuring is not None and bool(is_measuring())


def cache_key(tensor: torch.Tensor) -> tuple[str, torch.device] | None:
    """Return the key under which FlashInfer's cache holds this very tensor, or None."""
    cache: dict[tuple[str, torch.device], torch.Tensor] = sys.modules[UTILS]._cache_buf
    return next((key for key, buffer in list(cache.items()) if buffer is tensor), None)


class RetiringCache(dict[tuple[str, torch.device], torch.Tensor]):
    """FlashInfer's ``_cache_buf``, except that a buffer which leaves it is kept for the life of the process."""

    is_wsfix_cache = True  # also where the package was imported anew
    retired: ClassVar[list[torch.Tensor]] = []  # of all instances: a reload of FlashInfer makes a new one

    @staticmethod
    def _changing(change: Callable[..., Any]) -> Callable[..., Any]:
        def wsfix_change(self: "RetiringCache", *args: Any, **kwargs: Any) -> Any:
            with report.lock:
                before = list(self.values())
                try:
                    return change(self, *args, **kwargs)
                finally:
                    held = {id(buffer) for buffer in self.values()}
                    gone = [buffer for buffer in before if id(buffer) not in held]
                    self.retired.extend(gone)
                    report.count("displaced_buffers", len(gone))

        return wsfix_change

    __setitem__ = _changing(dict.__setitem__)
    __delitem__ = _changing(dict.__delitem__)
    __ior__ = _changing(dict.__ior__)
    clear = _changing(dict.clear)
    pop = _changing(dict.pop)
    popitem = _changing(dict.popitem)
    update = _changing(dict.update)


def presize(
    device: torch.device | str | int | None = None,
    nbytes: int | None = None,
    lanes: Iterable[str] | None = None,
) -> None:
    """Make the first generation of lanes ahead of capture.

    ``device``: the CUDA device; None, or a process without CUDA, is a no-op. ``nbytes``: bytes for each lane; None
    means what ``FLASHINFER_WSFIX_WORKSPACE_MIB`` says. ``lanes``: names of lanes, such as "bmm_fp8_workspace"; None
    means all that FlashInfer's sites use. A lane that is large enough is left alone.

    FlashInfer's own buffer of each lane is made too, zeroed and at its stock size, where it does not exist yet. Before
    FlashInfer is imported, and while the current stream is capturing, nothing is done but a warning. Raises ValueError
    for an unknown lane or a negative size, and torch.OutOfMemoryError where memory runs out.
    """
    if device is None or not torch.cuda.is_available():
        return
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    known = [row.name for row in LANES]
    names = known if lanes is None else list(lanes)
    for name in names:
        if name not in known:
            raise ValueError(f"FlashInfer has no workspace {name!r}; the lanes are {', '.join(known)}")
    if nbytes is not None and nbytes < 0:
        raise ValueError(f"a workspace cannot have {nbytes} bytes")
    if UTILS not in sys.modules or GEMM_BASE not in sys.modules:
        report.warn_once("presize early", "presize() did nothing: FlashInfer is not imported yet. Import it first.")
        return
    if is_capturing(where):
        report.warn_once(
            "presize late", "presize() did nothing: a CUDA graph is being captured. Call it before the first capture."
        )
        return
    size = first_bytes if nbytes is None else nbytes
    for name in names:
        own = _own_buffer(name, where)
        if size and report.verdicts["flashinfer"].state == "guarded":
            found = lane_of(own)
            found.high_water = max(found.high_water, nbytes or 0)
            found.grow(size)


def _own_buffer(name: str, device: torch.device) -> torch.Tensor:
    """Return FlashInfer's own buffer of a lane, made zeroed and at its stock size where it does not exist yet."""
    utils, nbytes = sys.modules[UTILS], sys.modules[GEMM_BASE].DEFAULT_WORKSPACE_SIZE
    existing: torch.Tensor | None = utils._cache_buf.get((name, device))
    if existing is not None:
        return existing
    # The size goes by position: its parameter is `bytes` up to 0.6.x and `num_bytes` from 0.7.0 on.
    if "zero_init" in inspect.signature(utils._get_cache_buf).parameters:
        made: torch.Tensor = utils._get_cache_buf(name, nbytes, device, zero_init=True)
        return made
    made = utils._get_cache_buf(name, nbytes, device)
    return made.zero_()
