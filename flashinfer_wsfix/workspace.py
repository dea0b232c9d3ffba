"""FlashInfer's cache of workspaces: which lane each belongs to, what keeps them, and where a lane's memory begins."""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch

from . import allocation, report, state
from .allocation import is_capturing, place
from .importer import namespace
from .lanes import Lane, lane, lanes, scratch
from .names import UTILS
from .sites import LANES

__all__ = ["ATTRIBUTE", "Lane", "RetiringCache", "cache_key", "lane_of", "lanes"]

Key = tuple[str, torch.device]

ATTRIBUTE = "_wsfix_lane"  # on a tensor that a site was given: its Lane


def lane_of(tensor: torch.Tensor) -> Lane:
    """Return the lane of a tensor that a site was given, and remember it on the tensor.

    A tensor that is in FlashInfer's cache belongs to the lane of its key. Any other is the auto-tuner's scratch (or a
    caller's own): its lane belongs to the tensor and is freed with it, so that nothing leaks per tuning profile.
    """
    with state.lock:
        found: Lane | None = getattr(tensor, ATTRIBUTE, None)
        if found is not None:
            return found
        key = cache_key(tensor)
        found = lane(*key, on=tensor.device) if key else scratch(tensor.device)
        setattr(tensor, ATTRIBUTE, found)
    cache = sys.modules[UTILS]._cache_buf
    if key and isinstance(cache, RetiringCache):
        cache.hold(key, tensor)
    return found


def cache_key(tensor: torch.Tensor) -> Key | None:
    """Return the key under which FlashInfer's cache holds this very tensor, or None."""
    cache: dict[Key, torch.Tensor] = sys.modules[UTILS]._cache_buf
    return next((key for key, buffer in list(cache.items()) if buffer is tensor), None)


def look() -> tuple[Lane, ...]:
    """List the lanes, with all counted that has left FlashInfer's cache by now."""
    cache = namespace(sys.modules.get(UTILS)).get("_cache_buf")
    if isinstance(cache, RetiringCache):
        cache.settle()
    return lanes()


class _Resize:
    """``resize_`` of FlashInfer's own buffer of a lane, whose memory is a generation's: it moves, and frees nothing.

    The host's own code calls it where no guard stands in between: once we are deactivated, or after an error of ours.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __call__(self, size: int, *unused: object, **also_unused: object) -> torch.Tensor:
        if size > self.tensor.numel():
            RetiringCache.retired.append(self.tensor.detach())
            _begin(self.tensor, getattr(self.tensor, ATTRIBUTE).grow(size), size)
        return self.tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., torch.Tensor]:
        """Be torch's own for the copy, which is in ``memo`` once it is made."""
        return lambda *size: torch.Tensor.resize_(memo[id(self.tensor)], *size)


def _begin(tensor: torch.Tensor, generation: torch.Tensor, nbytes: int) -> None:
    """Let a tensor be the first bytes of a generation; what it was before is freed."""
    tensor.set_(generation.untyped_storage(), 0, (nbytes,), (1,))


def _adopt(key: Key, buffer: torch.Tensor) -> bool:
    """Let a buffer that FlashInfer has just made for a lane start zeroed and cost no memory besides the lane's.

    It becomes the beginning of the lane's newest generation before it enters the cache, with its own size. (Of zeros
    of its own where no generation is wanted before a plan overflows it.) Returns False where it must not enter: under
    capture it lives in that graph's private pool, and its zero-fill is recorded.
    """
    capturing = is_capturing(buffer.device)
    try:
        found = lane(*key, on=buffer.device)
        setattr(buffer, ATTRIBUTE, found)
        if not capturing:
            make = found.grow if state.first_bytes else partial(allocation.zeroed, device=buffer.device)
            _begin(buffer, make(buffer.numel()), buffer.numel())
            buffer.resize_ = _Resize(buffer)
            # What torch saves of it, in a pickle or a shallow copy: that must load without us, and is no lane's.
            buffer.__getstate__ = lambda: {ATTRIBUTE: None}
            return True
    except RuntimeError:  # no memory: the lane's first call tries again, and says so
        pass
    except Exception as error:
        report.failed("flashinfer", error, "a buffer of FlashInfer's")
    with suppress(RuntimeError):  # an inference tensor, outside of inference mode
        buffer.zero_()
    return not capturing


class RetiringCache(dict[Key, torch.Tensor]):
    """FlashInfer's ``_cache_buf``, which keeps what a CUDA graph may hold for the life of the process.

    That is every buffer of a lane, and of the others those that were there before us, or were fetched or made under
    capture. What no graph has seen leaves as in stock. With ``keeps=False`` it only logs what is replaced.
    """

    is_wsfix_cache = True  # also where the package was imported anew
    retired: ClassVar[list[torch.Tensor]] = []  # of all instances: a reload of FlashInfer makes a new one
    born: ClassVar[dict[Key, torch.Tensor]] = {}  # by a lane's key: what FlashInfer made last under capture

    def __init__(self, cache: dict[Key, torch.Tensor], keeps: bool = True) -> None:
        self.keeps = keeps
        self.held: dict[Key, torch.Tensor] = {}  # what a graph may hold, kept in whichever way it leaves the cache
        self.take(cache)

    def take(self, cache: dict[Key, torch.Tensor]) -> None:
        """Take what is in the plain dictionary, also what another thread has put there since ours was made of it."""
        for key, buffer in list(cache.items()):
            self.setdefault(key, buffer)
            if self.keeps and isinstance(buffer, torch.Tensor):
                self.held.setdefault(key, buffer)

    def give_back(self, cache: dict[Key, torch.Tensor]) -> None:
        """Let the plain dictionary have what is here, and go on holding what a graph may hold."""
        known = {id(buffer) for buffer in self.retired}
        self.retired.extend(buffer for buffer in self.held.values() if id(buffer) not in known)
        cache.clear()
        cache.update(self)

    # What torch.compile finds in FlashInfer's _get_cache_buf: it cannot compile a closure or a lock on its way.
    def get(self, key: Key, default: Any = None) -> Any:
        buffer = super().get(key)
        self._fetched(key, buffer)
        return default if buffer is None else buffer

    def __getitem__(self, key: Key) -> torch.Tensor:
        buffer = super().__getitem__(key)
        self._fetched(key, buffer)
        return buffer

    def __setitem__(self, key: Key, buffer: torch.Tensor) -> None:
        if torch.compiler.is_dynamo_compiling() or self._may_enter(key, buffer):
            super().__setitem__(key, buffer)
            self._fetched(key, buffer)

    def _may_enter(self, key: Key, buffer: torch.Tensor) -> bool:
        """Look at a buffer that FlashInfer has made; False where the cache must not have it."""
        try:
            old = super().get(key)
            if old is buffer:
                return True
            if self.keeps and _is_lanes(key, buffer) and not _adopt(key, buffer):
                self.born[key] = buffer  # the one before is that graph's as any temporary is
                return False
            if not self.keeps and old is not None:
                where, what, capturing = old.device, "MOVED by FlashInfer", is_capturing(old.device)
                report.moved(what, key[0], where, place(old), place(buffer), capturing, logging.WARNING)
            if old is not None:
                self.let_go(key, old)
        except Exception as error:
            report.failed("flashinfer", error, "a request for one of FlashInfer's buffers")
        return True

    def _fetched(self, key: Key, buffer: torch.Tensor | None) -> None:
        """Hold a buffer that FlashInfer gets, if it is a lane's or a graph that is being captured gets its address."""
        try:
            if not self.keeps or not isinstance(buffer, torch.Tensor):
                return
            # is_compiling() would be true in every thread while one of them compiles. Compiled code does not come here
            # again, so that all that it fetches counts as held.
            if torch.compiler.is_dynamo_compiling():
                if self.held.get(key) is not None and self.held[key] is not buffer:
                    self.retired.append(self.held[key])
                self.held[key] = buffer
            elif self.held.get(key) is not buffer and (_is_lanes(key, buffer) or is_capturing(buffer.device)):
                self.hold(key, buffer)
        except Exception as error:
            report.failed("flashinfer", error, "a request for one of FlashInfer's buffers")

    def hold(self, key: Key, buffer: torch.Tensor) -> None:
        """Hold a buffer, and retire another that is held under its key: it left the cache by an unknown way."""
        with state.lock:
            old = self.held.get(key)
            self.held[key] = buffer
        if old is not None and old is not buffer:
            keep(key, old)

    def let_go(self, key: Key, buffer: torch.Tensor) -> None:
        """Retire a buffer, which leaves the cache, where it is held."""
        with state.lock:
            held = self.held.get(key) is buffer
            if held:
                del self.held[key]
        if held:
            keep(key, buffer)

    def settle(self) -> None:
        """Retire what is not in the cache any more."""
        for key, buffer in list(self.held.items()):
            if super().get(key) is not buffer:
                self.let_go(key, buffer)


def keep(key: Key, buffer: torch.Tensor) -> None:
    """Keep a buffer that FlashInfer's cache has let go of for the life of the process."""
    RetiringCache.retired.append(buffer)
    generations = getattr(getattr(buffer, ATTRIBUTE, None), "generations", ())
    # A generation's are counted there.
    nbytes = 0 if any(buffer.data_ptr() == each.data_ptr() for each in generations) else buffer.nbytes
    state.count("displaced_buffers")
    state.count("displaced_nbytes", nbytes)
    what = f"kept {nbytes} bytes of {key[0] if isinstance(key, tuple) else key} on {buffer.device}"
    why = "that FlashInfer's cache let go of, since a CUDA graph may hold their address"
    report.log(logging.INFO, f"{what} {why} ({state.counters['displaced_nbytes']} bytes in all).")


def _is_lanes(key: Key, buffer: torch.Tensor) -> bool:
    plain = type(buffer) is torch.Tensor and buffer.dtype is torch.uint8 and buffer.dim() == 1
    return plain and isinstance(key, tuple) and len(key) == 2 and key[0] in LANES and buffer.is_contiguous()
