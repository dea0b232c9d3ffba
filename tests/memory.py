"""Memory by its address, as a CUDA graph knows it, and a process without lanes to start a test from.

An address is read and written through the kernel, not through a pointer: where nothing is mapped, that is an OSError
here and not the end of the process.
"""

import os
import sys
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_MEMORY = os.open("/proc/self/mem", os.O_RDWR)


def write(address: int, content: bytes) -> None:
    """Write to an address, as a kernel in a replayed graph does. Raises OSError where nothing is mapped."""
    os.pwrite(_MEMORY, content, address)


def read(address: int, nbytes: int) -> bytes:
    """Read from an address. Raises OSError where nothing is mapped."""
    return os.pread(_MEMORY, nbytes, address)


@dataclass(frozen=True, eq=False)
class Handed:
    """A buffer that a cuDNN execute was given, known by its address alone: nothing here keeps it alive."""

    address: int
    nbytes: int
    storage: StorageWeakRef

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Handed":
        return cls(tensor.data_ptr(), tensor.numel(), StorageWeakRef(tensor.untyped_storage()))

    @property
    def ends(self) -> tuple[int, int]:
        """The addresses of its first and of its last eight bytes."""
        return self.address, self.address + self.nbytes - 8

    def is_alive(self) -> bool:
        return not self.storage.expired()

    def write(self, content: bytes) -> None:
        for address in self.ends:
            write(address, content)

    def read(self) -> set[bytes]:
        """What both ends hold."""
        return {read(address, 8) for address in self.ends}


def forget_lanes() -> None:
    """Let go of all lanes, of what FlashInfer's cache holds or held, of the counters and of what was said."""
    from flashinfer_wsfix import lanes, state, workspace

    lanes._lanes.clear()
    workspace.RetiringCache.retired.clear()
    workspace.RetiringCache.born.clear()
    cache = sys.modules["flashinfer.utils"]._cache_buf
    cache.clear()
    getattr(cache, "held", {}).clear()
    state.counters.update(dict.fromkeys(state.counters, 0))
    state.errors.clear()
    state.said.clear()
