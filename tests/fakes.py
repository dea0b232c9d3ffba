"""The only fakes of the tests: cuDNN with its graph object, the CUDA device, and FlashInfer's compiled kernels.

Everything else is real: FlashInfer's Python code, torch, the auto-tuner. Tensors are on the CPU.
"""

import contextlib
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

# --- the clock of the fake device -------------------------------------------------------------------------------------


class Clock(threading.local):
    """Milliseconds of fake device time in this thread: kernels add their cost, events read it."""

    ms = 0.0
    capturing = 0


clock = Clock()


# --- cuDNN ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Execution:
    """What one execute of a graph was given, and what its workspace held at that time."""

    kind: str  # "execute" or "execute_plan_at_index", as the site called it
    variant_pack: dict[int, torch.Tensor]
    workspace: torch.Tensor
    data_ptr: int
    numel: int
    zeroed: bool | None  # None: not looked at
    plan: int  # -1 for `execute`
    capturing: bool
    kwargs: dict[str, Any]


class Overrun(BaseException):
    """cuDNN would write past its workspace. No `Exception`, since FlashInfer's runners swallow those."""


class _Node:
    """A tensor of the graph while it is built: every setter returns the node, as cuDNN's do."""

    def __getattr__(self, name: str) -> Callable[..., "_Node"]:
        if not name.startswith(("set_", "get_")):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


@dataclass(eq=False)
class Graph:
    """A stand-in for cuDNN's graph object, with the methods that FlashInfer's builders and sites call.

    Every field may be set anew between two calls.
    """

    workspace_bytes: int | Callable[[int], int] = 0  # what a plan asks for: a number, or a function of the plan
    plans: int = 3
    write: int | None = None  # this byte fills what the plan asked for, as a kernel's left-overs would
    error: BaseException | None = None  # raised by each execute, after it was recorded
    cost: float = 1.0  # milliseconds on the fake device
    look: bool = True  # False: do not read the whole workspace (0.6 ms for 32 MiB) on each execute
    executions: list[Execution] = field(default_factory=list)

    @property
    def last(self) -> Execution:
        return self.executions[-1]

    def _size(self, plan: int) -> int:
        return self.workspace_bytes(plan) if callable(self.workspace_bytes) else self.workspace_bytes

    # The override-shape sites add a handle, uids, shapes and strides to the size queries.
    def get_workspace_size(self, *override: Any) -> int:
        return self._size(-1)

    def get_workspace_size_plan_at_index(self, plan: int, *override: Any) -> int:
        return self._size(plan)

    def get_execution_plan_count(self) -> int:
        return self.plans

    def get_engine_and_knobs_at_index(self, plan: int) -> tuple[int, dict[int, int]]:
        return plan, {0: plan}

    def execute(self, variant_pack: dict[int, torch.Tensor], workspace: torch.Tensor, **kwargs: Any) -> None:
        self._run("execute", variant_pack, workspace, -1, kwargs)

    def execute_plan_at_index(
        self, variant_pack: dict[int, torch.Tensor], workspace: torch.Tensor, plan: int, **kwargs: Any
    ) -> None:
        self._run("execute_plan_at_index", variant_pack, workspace, plan, kwargs)

    def _run(self, kind: str, variant_pack: Any, workspace: torch.Tensor, plan: int, kwargs: dict[str, Any]) -> None:
        numel, size = workspace.numel(), self._size(plan)
        zeroed = not (numel and workspace.max()) if self.look else None
        now = bool(clock.capturing)
        self.executions.append(
            Execution(kind, variant_pack, workspace, workspace.data_ptr(), numel, zeroed, plan, now, kwargs)
        )
        if numel < size:
            raise Overrun(f"{numel} B given, {size} B asked for")
        if self.error is not None:
            raise self.error
        if self.write is not None:
            workspace[:size].fill_(self.write)
        clock.ms += self.cost

    def _add(self, *args: Any, **kwargs: Any) -> _Node:
        return _Node()

    def _build(self, *args: Any, **kwargs: Any) -> None:
        pass

    tensor = matmul = mul = add = block_scale_dequantize = _add
    validate = build_operation_graph = create_execution_plans = create_execution_plan = _build
    deselect_engines = check_support = build_plans = _build


class _Names:
    """An enumeration of cuDNN's: each name stands for itself."""

    def __getattr__(self, name: str) -> str:
        return name

    def __call__(self, value: int) -> int:
        return value


class Cudnn(types.ModuleType):
    """A stand-in for the module `cudnn` of nvidia-cudnn-frontend, whose real one needs the library.

    `backend` is the version of the library: FlashInfer takes its override-shape path from 9.21 (0.6.18: 9.23.1) on.
    `make_graph` answers FlashInfer's builders; `graphs` holds what it made.
    """

    __version__ = "1.32.0"
    data_type = build_plan_policy = heur_mode = knob_type = tensor_reordering = _Names()

    def __init__(self) -> None:
        super().__init__("cudnn")
        self.reset()

    def reset(self) -> None:
        self.backend = 92301
        self.make_graph: Callable[[], Graph] = Graph
        self.graphs: list[Graph] = []

    def backend_version(self) -> int:
        return self.backend

    def create_handle(self) -> object:
        return "handle"

    def set_stream(self, handle: object, stream: int) -> None:
        pass

    def pygraph(self, **kwargs: Any) -> Graph:
        self.graphs.append(self.make_graph())
        return self.graphs[-1]

    @contextlib.contextmanager
    def graph(self, handle: object) -> Iterator[tuple[Graph, None]]:
        yield self.pygraph(), None

    # What the attention modules need to be imported; they are never called here.
    cudnnGraphNotSupportedError = RuntimeError

    def jit(self, **kwargs: Any) -> Callable[[Any], Any]:
        return lambda function: function

    graph_cache = jit


cudnn = Cudnn()


# --- the device -------------------------------------------------------------------------------------------------------


class Stream:
    cuda_stream = 0

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ms = 0.0

    def record(self, *args: Any) -> None:
        self.ms = clock.ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.ms - self.ms


class CUDAGraph:
    """Its capture runs the kernels once, which a real one would not; its replay only takes as long as they did."""

    ms = 0.0

    def replay(self) -> None:
        clock.ms += self.ms


@contextlib.contextmanager
def capturing(graph: CUDAGraph | None = None, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Let `torch.cuda.is_current_stream_capturing()` be true in this thread. Also stands in for `torch.cuda.graph`."""
    start = clock.ms
    clock.capturing += 1
    try:
        yield
    finally:
        clock.capturing -= 1
        if graph is not None:
            graph.ms, clock.ms = clock.ms - start, start


@contextlib.contextmanager
def _context(device_or_stream: Any = None) -> Iterator[None]:
    yield


class _Device:
    capability = (12, 0)


def _properties(device: Any = None) -> types.SimpleNamespace:
    major, minor = _Device.capability
    # 16 MiB of cache make the tuner clone its inputs once where it profiles with a cold cache.
    return types.SimpleNamespace(
        name="fake", major=major, minor=minor, multi_processor_count=1, L2_cache_size=16 << 20, total_memory=1 << 34
    )


@contextlib.contextmanager
def capability(major: int, minor: int) -> Iterator[None]:
    """Let every device be of this compute capability (12.0 otherwise), for torch and for FlashInfer."""
    before, _Device.capability = _Device.capability, (major, minor)
    _clear_caches(sys.modules["flashinfer.utils"])
    try:
        yield
    finally:
        _Device.capability = before
        _clear_caches(sys.modules["flashinfer.utils"])


@contextlib.contextmanager
def out_of_memory(*calls: int) -> Iterator[None]:
    """Let these calls of `torch.zeros` for a named device find no memory, in whichever thread: 0 is the next one."""
    zeros, numbers = torch.zeros, itertools.count()

    def scarce(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and next(numbers) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return zeros(*args, **kwargs)

    with mock.patch.object(torch, "zeros", scarce):
        yield


@contextlib.contextmanager
def available() -> Iterator[None]:
    """Let torch say that there is a CUDA device."""
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        yield


def install(flashinfer: types.ModuleType | None = None) -> contextlib.ExitStack:
    """Replace the device under torch, and under FlashInfer if given; closing what is returned puts it back."""
    undo = contextlib.ExitStack()
    stream = Stream()
    device = {
        "current_stream": lambda device=None: stream,
        "is_current_stream_capturing": lambda: clock.capturing > 0,
        "get_device_properties": _properties,
        "get_device_capability": lambda device=None: _Device.capability,
        "get_device_name": lambda device=None: "fake",
        "current_device": lambda: 0,
        "current_blas_handle": lambda: 0,
        "synchronize": lambda device=None: None,
        "device": _context,
        "stream": _context,
        "graph": capturing,
        "CUDAGraph": CUDAGraph,
        "Event": Event,
    }
    undo.enter_context(mock.patch.multiple(torch.cuda, **device))
    undo.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
    if flashinfer is None:
        return undo
    # FlashInfer refuses to ask for the capability of a CPU, and its modules copied both names.
    _replace_everywhere(undo, flashinfer.utils.get_compute_capability, lambda device: _Device.capability)
    _replace_everywhere(undo, sys.modules["flashinfer.tllm_utils"].delay_kernel, lambda microseconds: None)
    return undo


def _replace_everywhere(undo: contextlib.ExitStack, old: object, new: object) -> None:
    """Replace an object under every name that a module of FlashInfer has for it."""
    for module in _modules("flashinfer"):
        for name in [name for name, value in list(vars(module).items()) if value is old]:
            undo.enter_context(mock.patch.object(module, name, new))


# --- FlashInfer's compiled kernels ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Launch:
    """One call into a module that FlashInfer would have compiled."""

    kernel: str
    args: tuple[Any, ...]


class Kernels:
    """A stand-in for every compiled module: counts of tactics are two, launches are recorded.

    `costs` has the milliseconds of the kernels whose launches shall not take 1.0.
    """

    def __init__(self, costs: dict[str, float]) -> None:
        self.costs = costs
        self.launches: list[Launch] = []

    def build_and_load(self) -> "Kernels":
        return self

    def __getattr__(self, kernel: str) -> Callable[..., int]:
        if kernel.startswith("_"):
            raise AttributeError(kernel)

        def launch(*args: Any) -> int:
            if not kernel.endswith(("_tactic_num", "_get_algos")):
                self.launches.append(Launch(kernel, args))
                clock.ms += self.costs.get(kernel, 1.0)
            return 2

        return launch


@contextlib.contextmanager
def stub_runners(**costs: float) -> Iterator[Kernels]:
    """Replace what FlashInfer's GEMM runners would compile; the runner classes themselves stay the real ones."""
    kernels = Kernels(costs)
    with contextlib.ExitStack() as undo:
        for module in _modules("flashinfer.gemm"):
            for name in [name for name in vars(module) if name.startswith("gen_") and "module" in name]:
                undo.enter_context(mock.patch.object(module, name, lambda *args, **kwargs: kernels))
            if hasattr(module, "_TGV_DEBUG_USE_CPP"):  # its other kind needs nvidia-cutlass-dsl
                undo.enter_context(mock.patch.object(module, "_TGV_DEBUG_USE_CPP", True))
        forget()
        undo.callback(forget)
        yield kernels


def forget() -> None:
    """Empty the caches of FlashInfer's GEMM modules: built graphs, loaded kernels, runners."""
    for module in _modules("flashinfer.gemm"):
        _clear_caches(module)


def _clear_caches(module: types.ModuleType) -> None:
    for function in list(vars(module).values()):
        if hasattr(function, "cache_clear") and getattr(function, "__module__", None) == module.__name__:
            function.cache_clear()


def _modules(package: str) -> list[types.ModuleType]:
    """The loaded modules of FlashInfer under this name."""
    names = [name for name in list(sys.modules) if name == package or name.startswith(package + ".")]
    return [module for module in map(sys.modules.get, names) if module is not None]
