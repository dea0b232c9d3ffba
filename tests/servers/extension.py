"""For ``--worker-extension-cls``: a worker shows its sites, and makes a real site's calls. Imports nothing of ours.

FlashInfer is imported with this module: when vLLM has loaded its plugins and prepares the worker, as by its own layers.
Stand-ins are cuDNN's graph object and handle, and the CUDA stream. The site, its workspace and the addresses are real.
"""

import ctypes
import faulthandler
import os
import sys
from unittest import mock

import flashinfer.gemm  # noqa: F401
import torch
from flashinfer import utils
from flashinfer.gemm import gemm_base
from vllm.v1.worker import gpu_worker

MIB = 1 << 20
SITE = "execute_cudnn_gemm_fp8_graph"
LANE = ("bmm_fp8_workspace", torch.device("cpu"))
FLAT = 32 * MIB + 256  # what cuDNN's cuBLASLt-backed plan asks for, whatever the shape
LEFT_OVER = 0x5A  # what a kernel leaves in its workspace

# Of a soak, by step: what the eager call of that step asks for, MIB where it is not listed, and which calls a graph
# captures. Generations of ours: 40, 80 and 160 MiB.
ASKED = {0: 32 * MIB, 64: FLAT, 128: 48 * MIB, 129: 48 * MIB, 192: 96 * MIB}
CAPTURED = (0, 129)


class Graph:
    """cuDNN's graph object, as far as the site sees it: keeps the address that the last execute was given."""

    asked = address = 0

    def get_execution_plan_count(self) -> int:
        return 1

    def get_workspace_size(self) -> int:
        return self.asked

    def execute(self, variant_pack: object, workspace: torch.Tensor, handle: object) -> None:
        assert workspace.numel() >= self.asked
        self.address = workspace.data_ptr()
        ctypes.memset(self.address, LEFT_OVER, self.asked)


_graph = Graph()
_matrix = torch.zeros(1, 1, 1)


def own() -> torch.Tensor:
    """FlashInfer's own buffer of the lane, as its runners ask for it."""
    buffer: torch.Tensor = utils._get_cache_buf(LANE[0], gemm_base.DEFAULT_WORKSPACE_SIZE, LANE[1])
    return buffer


def call(asked: int) -> int:
    """Call the site for a plan that asks for that many bytes; return the address that it was given."""
    _graph.asked = asked
    with (
        mock.patch.object(torch.cuda, "current_stream", lambda device=None: None),
        mock.patch.object(gemm_base, "_get_cudnn_handle", lambda device, stream: None),
    ):
        getattr(gemm_base, SITE)(_graph, *[_matrix] * 5, own())
    return _graph.address


def is_mapped(address: int) -> bool:
    """Say whether there is memory at an address, without reading it ourselves: that would end the process."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        return bool(os.pread(memory, 1, address))
    except OSError:
        return False
    finally:
        os.close(memory)


class Soak:
    """A hook of the model: each of its steps replays what was captured so far, then makes one eager call."""

    def __init__(self) -> None:
        self.steps = self.replays = 0
        self.graphs: dict[int, int] = {}  # what a CUDA graph knows of its workspace: where, and how much it writes

    def __call__(self, *unused: object) -> None:
        for address, nbytes in self.graphs.items():
            ctypes.memset(address, LEFT_OVER, nbytes)
            self.replays += 1
        asked = ASKED.get(self.steps, MIB)
        address = call(asked)
        if self.steps in CAPTURED:
            self.graphs[address] = asked
        if self.steps in ASKED:
            what = "captured" if self.steps in CAPTURED else "eager"
            print(f"soak: step {self.steps}: {what}, {asked} bytes at {address:#x}", file=sys.stderr, flush=True)
        self.steps += 1


class Sites:
    """Methods of each worker, for ``collective_rpc``."""

    def wsfix_state(self) -> dict[str, object]:
        """How many sites are guarded, whether the warm-up is under its name in the worker, and by which routes.

        ``routes`` is None where nothing of ours is there.
        """
        sites = [value for name, value in vars(gemm_base).items() if name.startswith("execute_cudnn_")]
        ours = sys.modules.get("flashinfer_wsfix")
        return {
            "pid": os.getpid(),
            "sites": len(sites),
            "guarded": sum(type(site).__name__ == "Guard" for site in sites),
            "warm-up": type(gpu_worker.kernel_warmup).__name__ == "Guard",
            "routes": list(ours.status().routes) if ours else None,
        }

    def wsfix_calls(self, sizes: list[int]) -> dict[str, object]:
        """Call the site for each size: which addresses it was given, and which are still there after the last call.

        ``own``: the address of FlashInfer's own buffer, before the first call and after each.
        """
        addresses, owned = [], [own().data_ptr()]
        for size in sizes:
            addresses.append(call(size))
            owned.append(own().data_ptr())
        return {"addresses": addresses, "own": owned, "mapped": [is_mapped(address) for address in addresses]}

    def wsfix_soak(self) -> None:
        """Have each step of the model come with a replay and a call from now on."""
        faulthandler.enable()
        self.soak = Soak()
        self.get_model().register_forward_pre_hook(self.soak)  # type: ignore[attr-defined]  # the worker's own

    def wsfix_soaked(self) -> dict[str, object]:
        """What has come of it so far."""
        return {"steps": self.soak.steps, "replays": self.soak.replays}
