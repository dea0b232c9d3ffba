"""Lanes and their generations: what a site gets in place of FlashInfer's tensor, and how that grows without moving.

What is handed to a site is *armed*: its ``resize_`` ends the call before anything ran, since a site compares
``workspace.numel()`` with the plan's size first of all. The caller then picks a larger buffer and calls the site again.
"""

import logging
import os
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

import torch

from . import allocation, report, settings, state
from .allocation import arm, is_capturing, place
from .names import AUTOTUNER
from .sites import LANES

STEP = 2 * settings.MIB  # generations are whole steps: the caching allocator's own granularity for large blocks
SCRATCH = "scratch"
NEVER = sys.maxsize
TRIES = {5**power for power in range(1, 25)}  # after a growth that failed: which of the calls try it again


class Lane:
    """A workspace and the generations made for it: one of FlashInfer's, the auto-tuner's scratch, or vLLM's.

    ``current`` is what a site gets: the newest generation, or FlashInfer's own buffer where none could be made, or None
    before the first call. All generations are kept as long as the lane, since graphs may hold their addresses; a lane
    of FlashInfer's lives as long as the process.
    """

    __slots__ = ("__weakref__", "current", "device", "generations", "high_water", "name", "refused", "waited")

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.current: torch.Tensor | None = None
        self.generations: list[torch.Tensor] = []
        self.high_water = 0  # bytes: the largest size that did not fit; what fits is never seen
        self.refused = NEVER  # bytes: from this size on there was no memory
        self.waited = 0  # calls that wanted as much since

    def __reduce__(self) -> tuple[Any, ...]:
        """Be None in a copy or a pickle: a lane is not the copy's, and what is saved must load without us."""
        return type(None), ()

    def describe(self) -> tuple[Any, ...]:
        """Return the fields of ``report.LaneStatus``."""
        sizes = [buffer.numel() for buffer in self.generations]
        address, _ = place(self.generations[-1] if sizes else None)
        return self.name, str(self.device), len(sizes), sum(sizes[-1:]), sum(sizes[:-1]), address, self.high_water

    def buffer_for(self, asked: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return an armed buffer of at least ``asked`` bytes for a call that was given ``tensor``.

        Grows the lane, unless the current stream is capturing: a buffer made then would live in that graph's private
        pool and its zero-fill would only be recorded, so nothing made then is published. What is left in that case, or
        where growing fails, is FlashInfer's own buffer, if the lane has no generation yet and it is large enough, else
        a call-local one. Raises torch.OutOfMemoryError where there is no memory for that either.
        """
        capturing, scratch = is_capturing(self.device), self.name == SCRATCH
        size = max(asked, tensor.numel()) if scratch or not self.generations else asked
        with state.lock:
            self.high_water = max(self.high_water, asked)
            if self.generations and self.generations[-1].numel() >= size:  # another thread was faster
                self.current = self.generations[-1]
                return self.current
        fits_own = asked <= tensor.numel() and not self.generations and not scratch
        if not capturing and (state.first_bytes or not fits_own) and self._may_grow(size):
            try:
                return self.grow(size)
            except Exception as error:
                self.refused = min(self.refused, size)
                why = str(error)  # not the exception itself, which holds the host's frames
            what = f"the workspace {self.name} on {self.device} could not grow to {size} bytes ({why})"
            then = "calls that need more than it has get temporary buffers, and it is tried again more and more seldom"
            advice = f"{what}: {then}. If memory is short, leave more of it free."
            report.once(logging.WARNING, ("grow", self.name, self.device), advice)
        if fits_own:
            own = arm(tensor.detach())
            with state.lock:  # until a plan overflows it: growing is not tried again at each call
                if not capturing and not self.generations:
                    self.current = own
            return own
        if capturing:
            tuners = _measured.get(self.device) if is_measuring() else None
            if tuners is not None and tuners.current is not None and tuners.current.numel() >= size:
                return tuners.current
            if asked > 0:
                self._tell_overflow(asked)
        return allocation.zeros(size, self.device)

    def _may_grow(self, size: int) -> bool:
        """Say whether a growth is worth a try: not at each call, once there was no memory for it."""
        self.waited += size >= self.refused
        return size < self.refused or self.waited in TRIES

    def _tell_overflow(self, size: int) -> None:
        state.count("capture_overflows")
        if self.name not in LANES:  # vLLM's
            advice = "Run that shape once before capture to avoid it"
        elif size > state.first_bytes:
            mib = -(-size // STEP) * STEP // settings.MIB
            advice = f"Set {settings.PREFIX}_WORKSPACE_MIB={mib} or call presize() before capture to avoid it"
        else:
            advice = "Call presize() before capture to avoid it: this lane had no generation when its capture began"
        what = f"a plan asked for {size} bytes of {self.name} on {self.device} while a CUDA graph was being captured"
        then = "more than there is: that graph gets a buffer of its own, which is safe but is zeroed at every replay"
        report.once(logging.WARNING, ("capture", self.name, self.device), f"{what}, {then}. {advice}.")

    def grow(self, size: int) -> torch.Tensor:
        """Publish a generation of at least ``size`` bytes and twice the last one, retire the last, return the new one.

        Doubling keeps all retired generations together smaller than the current one. Where twice does not fit, less is
        tried, down to what was asked for. Raises what torch raises where memory runs out, with the lane as it was.
        """
        with state.lock:
            growing = _growing.setdefault(self, threading.RLock())
        # The allocation waits for a thread and for a stream, which may wait for other devices and run finalizers: only
        # who wants to grow this very lane waits for it.
        with growing:
            last = self.generations[-1] if self.generations else None
            if last is not None and last.numel() >= size:
                return last
            wanted = [state.first_bytes] if last is None else [2 * last.numel(), last.numel() * 3 // 2]
            buffer = self._largest({-(-max(size, each) // STEP) * STEP for each in (*wanted, size)})
            with state.lock:
                self.generations.append(buffer)
                self.current = buffer
                self.refused, self.waited = NEVER, 0
        if self.name != SCRATCH:
            state.count("growths", last is not None)
            number = f"generation {len(self.generations)}"
            report.moved(number, self.name, self.device, place(last), place(buffer), False, logging.INFO)
        return buffer

    def _largest(self, sizes: set[int]) -> torch.Tensor:
        make = allocation.zeroed
        if self.name == SCRATCH:  # freed with its tensor, in the order of the caller's stream, to the caller's pool
            make = allocation.zeros if is_measuring() else allocation.filled
        *larger, least = sorted(sizes, reverse=True)
        for nbytes in larger:
            with suppress(RuntimeError):  # torch's OutOfMemoryError is one
                return make(nbytes, self.device)
        return make(least, self.device)


# A lane's lock for growing. A child of a fork starts with none: a thread that held one is not there.
_growing: weakref.WeakKeyDictionary[Lane, threading.RLock] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_growing.clear)

_lanes: dict[tuple[str, torch.device], Lane] = {}
# The lane that the auto-tuner measures with, by device, for as long as a tensor belongs to it. FlashInfer lets one
# thread measure at a time.
_measured: weakref.WeakValueDictionary[torch.device, Lane] = weakref.WeakValueDictionary()


def lanes() -> tuple[Lane, ...]:
    """List the lanes of this process, in the order in which they were first used."""
    return tuple(_lanes.values())


def lane(name: str, device: torch.device, on: torch.device | None = None) -> Lane:
    """Return the lane of that name and device, made on first use; ``on``: the device of its buffers, index and all."""
    with state.lock:
        return _lanes.setdefault((name, device), Lane(name, on or device))


def scratch(device: torch.device) -> Lane:
    """Return a lane for a tensor that is none of FlashInfer's cached workspaces, to be freed with it."""
    made = Lane(SCRATCH, device)
    return _measured.setdefault(device, made) if is_measuring() else made


def is_measuring() -> bool:
    """Say whether FlashInfer's auto-tuner is measuring in this thread: a graph that it captures now is thrown away."""
    return bool(getattr(sys.modules.get(AUTOTUNER), "is_in_profile_measurement", bool)())
