"""Zeroed memory: the one place where this package allocates."""

import ctypes
import os
import sys
import threading
from contextlib import suppress
from typing import Any

import torch

RELAXED, NON_BLOCKING = 2, 1  # cudaStreamCaptureModeRelaxed, cudaStreamNonBlocking
_streams: dict[torch.device, Any] = {}  # the stream of the zero-fill, by device


class Overflow(BaseException):
    """A plan wants ``args[0]`` bytes, more than its buffer has. FlashInfer's ``except Exception`` must not see it."""


def _overflow(size: int, *unused: object, **also_unused: object) -> None:
    raise Overflow(size)


def arm(buffer: torch.Tensor) -> torch.Tensor:
    """Have `buffer.resize_` raise Overflow instead, on this one tensor."""
    buffer.resize_ = _overflow
    return buffer


def is_capturing(device: torch.device) -> bool:
    """Say whether the current stream of ``device`` is being captured into a CUDA graph."""
    try:
        with torch.cuda.device(device if device.type == "cuda" else -1):
            return bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError:  # a CPU build of torch has no such thing
        return False


def place(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Return a tensor's address and its bytes, as the log tells them; zeros for none."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.nbytes)


def zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate ``nbytes`` of zeros (uint8, armed) for this thread's current stream. Raises what torch raises."""
    return arm(torch.zeros(nbytes, dtype=torch.uint8, device=device))


def filled(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate as ``zeros`` does, and wait until this thread's current stream has made them."""
    buffer = zeros(nbytes, device)
    if device.type == "cuda":
        # Not the stream's own synchronize(), which torch.cuda.set_sync_debug_mode("error") forbids in every thread.
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
    return buffer


def zeroed(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate ``nbytes`` of zeros (uint8, armed) that any stream may use at once.

    In a thread of its own: torch keeps the current stream, memory pool, inference mode and function modes per thread,
    and a generation must come from none of the caller's. vLLM's sleep mode unmaps what was made in its pool, a tensor
    made in inference mode cannot be written outside it, and a fill on one stream is not seen by another without a wait.

    Raises torch.OutOfMemoryError, or RuntimeError for anything else, both new ones: an exception that came over from
    the thread would hold every frame of the host's below us.
    """
    if sys.is_finalizing():  # a thread would never start, and up to Python 3.11 nobody would say so
        raise RuntimeError("the interpreter is shutting down")
    made: list[torch.Tensor] = []
    said: list[tuple[bool, str]] = []

    def wsfix_allocate() -> None:
        try:
            made.append(_on_own_stream(nbytes, device) if device.type == "cuda" else zeros(nbytes, device))
        except BaseException as error:
            said.append((isinstance(error, torch.OutOfMemoryError), str(error) or type(error).__name__))

    thread = threading.Thread(target=wsfix_allocate, name="flashinfer-wsfix", daemon=True)
    thread.start()
    thread.join()
    if not made:
        short_of_memory, why = said[0]
        raise (torch.OutOfMemoryError if short_of_memory else RuntimeError)(why)
    return made[0]


def _on_own_stream(nbytes: int, device: torch.device) -> torch.Tensor:
    """Fill on a stream of our own, in this thread, which ends then, and wait for that alone.

    The default stream would wait for all that is queued on the device. And to allocate or to wait, while another thread
    captures in mode "global", ends that capture, unless this thread's own mode is "relaxed".
    """
    torch.cuda.set_device(device)  # so that nothing here switches back to a device that the process does not use
    with suppress(OSError, AttributeError):  # where CUDA's runtime is no library of its own, as torch has loaded it
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}", mode=os.RTLD_NOLOAD)
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
        handle = ctypes.c_void_p()
        # Not a stream of torch's pool: the host may be capturing on that one.
        if device not in _streams and runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), NON_BLOCKING) == 0:
            _streams[device] = torch.cuda.ExternalStream(handle.value, device=device)
    if device in _streams:
        torch.cuda.set_stream(_streams[device])
    return filled(nbytes, device)
