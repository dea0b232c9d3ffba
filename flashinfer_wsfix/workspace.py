"""FlashInfer's cache of workspaces: which lane each belongs to, what keeps them, and where a lane's memory begins."""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch

from . import allocation, report, state
from .lanes import Lane, lane, lanes, scratch
from .names import UTILS
from .sites import LANES

__all__ = ["ATTRIBUTE", "Lane", "RetiringCache", "cache_key", "lane_of", "lanes"]

Key = tuple[str, torch.device]

ATTRIBUTE = "_wsfix_lane"  # on a tensor that a site was given: its Lane
NAMES = {row.name for row in LANES}
CACHE = "a request for one of FlashInfer's buffers"


def lane_of(tensor: torch.Tensor) -> Lane:
    """Return the lane of a tensor that a site was given, and remember it on the tensor.

    A tensor that is in FlashInfer's cache belongs to the lane of its key. Any other is the auto-tuner's scratch (or a
    caller's own): its lane belongs to the tensor and is freed with it, so that nothing leaks per tuning profile.
    """
    with state.lock:
        found: Lane | None = getattr(tensor, ATTRIBUTE, None)
        if found is None:
            key = cache_key(tensor)
            if key is None:
                found = scratch(tensor.device)
            else:
                found = lane(*key, on=tensor.device)
                hold(key)
            setattr(tensor, ATTRIBUTE, found)
        return found


def cache_key(tensor: torch.Tensor) -> Key | None:
    """Return the key under which FlashInfer's cache holds this very tensor, or None."""
    cache: dict[Key, torch.Tensor] = sys.modules[UTILS]._cache_buf
    return next((key for key, buffer in list(cache.items()) if buffer is tensor), None)


def hold(key: Key) -> None:
    """Never let go of the buffer that FlashInfer's cache has under this key: a graph may hold its address."""
    held: set[Key] = getattr(sys.modules[UTILS]._cache_buf, "held", set())
    held.add(key)


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


def own(tensor: torch.Tensor, found: Lane) -> None:
    """Mark a tensor that the host has of a lane's memory: its own resize_ must not free what a graph may hold."""
    setattr(tensor, ATTRIBUTE, found)
    tensor.resize_ = _Resize(tensor)
    tensor.__getstate__ = _saved  # torch asks the tensor for it


def _saved() -> dict[str, None]:
    """Return what a pickle or a shallow copy has of our marks: it must load without us, and is no lane's."""
    return {ATTRIBUTE: None}


def _begin(tensor: torch.Tensor, generation: torch.Tensor, nbytes: int) -> None:
    """Let a tensor be the first bytes of a generation; what it was before is freed."""
    tensor.set_(generation.untyped_storage(), 0, (nbytes,), (1,))


def _adopt(key: Key, buffer: torch.Tensor) -> bool:
    """Let a buffer that FlashInfer has just made for a lane start zeroed and cost no memory besides the lane's.

    It becomes the beginning of the lane's newest generation before it enters the cache, with its own size. (Of zeros
    of its own where no generation is wanted before a plan overflows it.) Returns False where it must not enter: under
    capture it lives in that graph's private pool, and its zero-fill is recorded.
    """
    capturing = allocation.is_capturing(buffer.device)
    try:
        found = lane(*key, on=buffer.device)
        setattr(buffer, ATTRIBUTE, found)
        if not capturing:
            make = found.grow if state.first_bytes else partial(allocation.zeroed, device=buffer.device)
            _begin(buffer, make(buffer.numel()), buffer.numel())
            own(buffer, found)
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
        super().__init__(cache)
        self.keeps = keeps
        self.held = set(cache)  # keys of buffers whose address a graph may hold

    # What torch.compile finds in FlashInfer's _get_cache_buf: it cannot compile a closure or a lock on its way.
    def get(self, key: Key, default: Any = None) -> Any:
        self._fetched(key)
        return super().get(key, default)

    def __getitem__(self, key: Key) -> torch.Tensor:
        self._fetched(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Key, buffer: torch.Tensor) -> None:
        if not self._entered(key, buffer):
            super().__setitem__(key, buffer)

    def _is_captured(self, key: Key) -> bool:
        return key in self and _is_captured(dict.__getitem__(self, key).device)

    def take(self, cache: dict[Key, torch.Tensor]) -> None:
        """Take what another thread has put into the plain dictionary since ours was made of it."""
        for key in cache.keys() - self.keys():
            super().__setitem__(key, cache[key])
            self.held.add(key)

    def _fetched(self, key: Key) -> None:
        try:
            # is_compiling() would be true in every thread while one of them compiles. Compiled code does not come here
            # again, so that all that it fetches counts as held.
            if torch.compiler.is_dynamo_compiling() or (key not in self.held and self._is_captured(key)):
                self.held.add(key)
        except Exception as error:
            report.failed("flashinfer", error, CACHE)

    def _entered(self, key: Key, buffer: torch.Tensor) -> bool:
        """Take a buffer in, or keep it out; False where that is left to the dictionary."""
        try:
            if torch.compiler.is_dynamo_compiling():
                return False
            if self.keeps and _is_lanes(key, buffer):
                if super().get(key) is not buffer and not _adopt(key, buffer):
                    self.born[key] = buffer  # the one before is that graph's as any temporary is
                    return True
                self._set(key, buffer)
                self.held.add(key)
            else:
                self._set(key, buffer)
                self._fetched(key)
            return True
        except Exception as error:
            report.failed("flashinfer", error, CACHE)
            return False

    @staticmethod
    def _changing(change: Callable[..., Any]) -> Callable[..., Any]:
        def wsfix_change(self: "RetiringCache", *args: Any, **kwargs: Any) -> Any:
            before = self._before()
            try:
                return change(self, *args, **kwargs)
            finally:
                self._after(before)

        return wsfix_change

    _set = _changing(dict.__setitem__)
    __delitem__ = _changing(dict.__delitem__)
    __ior__ = _changing(dict.__ior__)
    clear = _changing(dict.clear)
    pop = _changing(dict.pop)
    popitem = _changing(dict.popitem)
    update = _changing(dict.update)

    def _before(self) -> dict[Key, torch.Tensor] | None:
        """Hold the lock until ``_after``, and tell what is there now; None after an error of ours."""
        try:
            state.lock.acquire()
            return self.copy()
        except Exception as error:
            report.failed("flashinfer", error, CACHE)
            return None

    def _after(self, before: dict[Key, torch.Tensor] | None) -> None:
        if before is None:
            return
        try:
            left = {key: buffer for key, buffer in before.items() if dict.get(self, key) is not buffer}
            held = self.held & left.keys()
            self.held -= held
            state.lock.release()
            for key, buffer in left.items():
                new = dict.get(self, key)
                if self.keeps and key in held:
                    keep(str(key[0] if isinstance(key, tuple) else key), buffer)
                elif not self.keeps and new is not None:
                    old, now = ((tensor.data_ptr(), tensor.nbytes) for tensor in (buffer, new))
                    capturing = allocation.is_capturing(buffer.device)
                    report.moved("MOVED by FlashInfer", key[0], buffer.device, old, now, capturing, logging.WARNING)
        except Exception as error:
            report.failed("flashinfer", error, CACHE)


def keep(name: str, buffer: torch.Tensor) -> None:
    """Keep a buffer that FlashInfer's cache lets go of for the life of the process."""
    RetiringCache.retired.append(buffer)
    state.count("displaced_buffers")
    found = getattr(buffer, ATTRIBUTE, None)
    addresses = [generation.data_ptr() for generation in found.generations] if found is not None else []
    nbytes = 0 if buffer.data_ptr() in addresses else buffer.nbytes  # a generation's are counted there
    state.count("displaced_nbytes", nbytes)
    report.log(
        logging.INFO,
        f"kept {nbytes} bytes of {name} on {buffer.device} that FlashInfer's cache let go of, since a CUDA graph may"
        f" hold their address ({state.counters['displaced_nbytes']} bytes in all).",
    )


def _is_lanes(key: Key, buffer: torch.Tensor) -> bool:
    if not (isinstance(key, tuple) and len(key) == 2):
        return False
    plain = type(buffer) is torch.Tensor and buffer.dtype is torch.uint8 and buffer.dim() == 1
    return plain and key[0] in NAMES and buffer.is_contiguous()


def _is_captured(device: torch.device) -> bool:
    """Say whether a graph is being captured that may hold a buffer on ``device``."""
    try:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            return allocation.is_capturing(device)
        return bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError:  # a CPU build of torch has no such thing
        return False
