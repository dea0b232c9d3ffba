"""vLLM's half: ``SM100Workspace.ensure_size`` moves its buffer just the same, and ``kernel_warmup`` is where to presize."""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from . import report, settings, workspace
from .detection import Verdict, parameters, resized
from .guards import Guard, Patch, is_guarded, is_sm12x
from .hook import UTILS
from .sites import LANES, SM100_WORKSPACE, WARMUP


class _Asking:
    """Stands in for the workspace while vLLM's own ``ensure_size`` computes what it needs: its buffer is armed."""

    def __init__(self, instance: Any, buffer: torch.Tensor) -> None:
        self._instance = instance
        self._workspace_buf = workspace.arm(buffer.detach())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instance, name)


class _State:
    """What we keep on an instance: its lane, the buffer last published, and a call-local one of a graph."""

    def __init__(self, instance: Any) -> None:
        own = instance._workspace_buf
        name, device = SM100_WORKSPACE[1], own.device
        with report.lock:
            taken = sum(lane.name.startswith(name) and lane.device == device for lane in workspace.lanes())
            self.lane = workspace.lane(f"{name}.{taken}" if taken else name, device)
            self.lane.generations.append(own)
        self.published = own
        self.local: torch.Tensor | None = None


def wsfix_ensure_size(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let vLLM's method say what it needs, and grow by the rules of a lane: zeroed, and the old buffer kept."""
    state = vars(instance).get("_wsfix")
    if state is None:
        state = instance._wsfix = _State(instance)
    if instance._workspace_buf is state.local:  # of the last call, which was captured: nobody else's to use
        instance._workspace_buf, state.local = state.published, None
    try:
        return wrapped.__func__(_Asking(instance, instance._workspace_buf), *args, **kwargs)  # type: ignore[attr-defined]
    except workspace.Overflow as overflow:
        size = overflow.size
    buffer = state.lane.buffer_for(size, instance._workspace_buf)
    # vLLM gets its own, unarmed view of the buffer: it must work without us as well.
    instance._workspace_buf = buffer.detach()
    if buffer is state.lane.generations[-1]:
        state.published = instance._workspace_buf
    else:
        state.local = instance._workspace_buf
    return None


def wsfix_kernel_warmup(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run vLLM's warm-up, then presize the lanes of the worker's device: what comes next is the capture."""
    result = wrapped(*args, **kwargs)
    try:
        worker = args[0] if args else kwargs.get(WARMUP[2])
        device = getattr(worker, "device", None)
        if device is not None and UTILS in sys.modules:
            workspace.presize(device, lanes=_lanes_to_presize(torch.device(device)))
    except Exception as error:
        report.warn_once(
            "warm-up",
            f"the workspaces could not be presized before capture ({error}): they grow when they are first used.",
        )
    return result


def _lanes_to_presize(device: torch.device) -> list[str]:
    config, _ = settings.read()
    cache = sys.modules[UTILS]._cache_buf
    names = []
    for lane in LANES:
        gated = lane.gate in report.gates and is_sm12x(device)  # cuDNN does not run there: memory for nothing
        chosen = lane.name in config.presize or config.presize == "all"
        used = config.presize == "used" and (lane.name, device) in cache
        if not gated and (chosen or used):
            names.append(lane.name)
    return names


def plan(config: settings.Settings) -> tuple[Verdict, list[Patch], str | None]:
    """Judge the vLLM modules that are imported, and list what has to be set to guard them. Changes nothing."""
    version = getattr(sys.modules.get("vllm"), "__version__", None)
    vllm = f"vLLM {version or 'of unknown version'}"
    module, class_name, method, buffer = SM100_WORKSPACE
    if not config.vllm:
        return Verdict("disabled", f"{settings.PREFIX}_VLLM is off: vLLM is left alone"), [], version
    patches, sites, said = [], [], []
    workspace_class = vars(sys.modules[module]).get(class_name) if module in sys.modules else None
    ensure_size = vars(workspace_class).get(method) if workspace_class else None
    if ensure_size is not None and not is_guarded(ensure_size):
        code = getattr(ensure_size, "__code__", None)
        moves = code is not None and "resize_" in code.co_names
        if type(ensure_size) is not FunctionType or (moves and resized(code) != [f".{buffer}"]):
            return (
                Verdict(
                    "unsupported",
                    f"{vllm} has a {class_name}.{method} in a way that flashinfer-wsfix does not know: nothing of vLLM is guarded,"
                    " and CUDA graphs with CUTLASS MLA may replay against freed memory",
                ),
                [],
                version,
            )
        if moves:
            patches.append(Patch(workspace_class, method, ensure_size, Guard(ensure_size, wsfix_ensure_size)))
    if ensure_size is not None and (is_guarded(ensure_size) or patches):
        sites.append(f"{module}.{class_name}.{method}")
        said.append(f"{class_name} is guarded")
    elif module in sys.modules:
        said.append(f"its {class_name} does not move")
    module, function, parameter = WARMUP
    warmup = vars(sys.modules[module]).get(function) if module in sys.modules else None
    if is_guarded(warmup):
        sites.append(f"{module}.{function}")
    elif type(warmup) is FunctionType and parameters(warmup.__code__)[:1] == (parameter,):
        patches.append(Patch(sys.modules[module], function, warmup, Guard(warmup, wsfix_kernel_warmup)))
        sites.append(f"{module}.{function}")
    if f"{module}.{function}" in sites:
        said.append("warm-up presizes the workspaces")
    state = "guarded" if sites else "not-needed"
    return Verdict(state, f"{vllm}: {', '.join(said)}", tuple(sites)), patches, version
