"""A cuDNN plan that asks for a chosen size and launches real kernels on its workspace, through the fp8 site."""

from collections.abc import Callable, Iterable
from importlib import import_module

import torch

MIB = 1 << 20
LANE = "bmm_fp8_workspace"
DIRT = 0xCD  # what fresh memory of a simulated device is full of
SENTINEL = 0xA5


class Gemm:
    """It notes the largest byte that it comes upon and adds 1 to each, at both ends of what it asked for.

    `own`: the workspace that a caller of FlashInfer's passes, that of the cache or one of his own.
    """

    def __init__(self, device: str = "cuda:0", own: torch.Tensor | None = None) -> None:
        self.gemm_base, utils = import_module("flashinfer.gemm.gemm_base"), import_module("flashinfer.utils")
        self.gemm_base._get_cudnn_handle = lambda device, stream: None
        where = torch.device(device)
        self.own = utils._get_cache_buf(LANE, self.gemm_base.DEFAULT_WORKSPACE_SIZE, where) if own is None else own
        self.matrix = torch.zeros(1, 1, 1, device=where)
        self.largest = torch.zeros(2, dtype=torch.uint8, device=where)
        self.asked = 0

    def get_execution_plan_count(self) -> int:
        return 1

    def get_workspace_size(self) -> int:
        return self.asked

    def execute(self, variant_pack: object, workspace: torch.Tensor, handle: object) -> None:
        self.address = workspace.data_ptr()
        first, last = workspace[:MIB], workspace[self.asked - MIB : self.asked]
        for largest, end in zip(self.largest, (first, last), strict=True):
            largest.copy_(end.max())
            end.add_(1)

    def call(self, mib: int) -> int:
        """Run a plan that asks for so many MiB; the address of its workspace."""
        self.asked = mib * MIB
        self.gemm_base.execute_cudnn_gemm_fp8_graph(self, *[self.matrix] * 5, self.own)
        return self.address

    def found(self) -> int:
        """Return the largest byte that the last execute came upon."""
        torch.cuda.synchronize()
        return max(self.largest.tolist())


def captured(call: Callable[[], object], **options: object) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        call()
    return graph


def sentinel(mib: int) -> torch.Tensor:
    """Allocate memory of another owner."""
    return torch.full((mib * MIB,), SENTINEL, dtype=torch.uint8, device="cuda")


def unharmed(tensors: Iterable[torch.Tensor]) -> bool:
    torch.cuda.synchronize()
    return all(bool((tensor == SENTINEL).all()) for tensor in tensors)


def generations() -> list[int]:
    """Return the sizes of the one lane's generations, in MiB."""
    (lane,) = import_module("flashinfer_wsfix.workspace").lanes()
    return [buffer.numel() // MIB for buffer in lane.generations]
