"""vLLM's half: ``SM100Workspace.ensure_size`` moves its buffer just the same; ``kernel_warmup`` is where to presize."""

import logging
import sys
import weakref
from types import FunctionType
from typing import Any

import torch

from . import allocation, lanes, report, settings, state
from .detection import Verdict, live_functions, parameters, resizes_only
from .guards import Call, Patch, Wrapper, around, closes, is_guarded, observer
from .importer import is_complete, namespace
from .names import UTILS
from .presizing import presize
from .sites import LANES, SM100_WORKSPACE, WARMUP

NAME = SM100_WORKSPACE[1]
LOCAL = "_wsfix_local"  # on a buffer of one captured call: nobody else's to use
VIEW = "_wsfix_view"  # on a generation: what vLLM has of it, not armed, since it must work without us as well


class _Asking:
    """Stands in for the workspace while vLLM's own ``ensure_size`` computes what it needs: its buffer is armed."""

    def __init__(self, instance: Any, buffer: torch.Tensor) -> None:
        self._instance = instance
        self._workspace_buf = allocation.arm(buffer.detach())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instance, name)


# Beside the instances, not on them: they are copied and pickled as vLLM's own.
_lanes: weakref.WeakKeyDictionary[Any, lanes.Lane] = weakref.WeakKeyDictionary()


def _lane_of(instance: Any) -> lanes.Lane:
    """Return an instance's lane, whose first generation is vLLM's own buffer.

    A buffer that somebody else has put there since is kept as well, and is the newest one if it is the largest.
    """
    buffer = instance._workspace_buf
    with state.lock:
        if instance not in _lanes:
            taken = sum(lane.name.startswith(NAME) and lane.device == buffer.device for lane in lanes.lanes())
            _lanes[instance] = lanes.lane(f"{NAME}.{taken}" if taken else NAME, buffer.device)
        lane = _lanes[instance]
        known = [generation.data_ptr() for generation in lane.generations]
        if buffer.data_ptr() not in known and not hasattr(buffer, LOCAL):
            setattr(buffer, VIEW, buffer)
            smaller = bool(known) and buffer.numel() < lane.generations[-1].numel()
            lane.generations.insert(0 if smaller else len(known), buffer)
        return lane


def _publish(instance: Any, lane: lanes.Lane, buffer: torch.Tensor) -> None:
    """Give vLLM the newest generation, or ``buffer`` where that is larger: of one call alone."""
    with state.lock:
        newest = max(lane.generations[-1], buffer, key=torch.Tensor.numel)  # another thread may have grown it further
        if not hasattr(newest, VIEW):
            setattr(newest, VIEW, newest.detach())
        instance._workspace_buf = getattr(newest, VIEW)
        if newest is not lane.generations[-1]:
            setattr(instance._workspace_buf, LOCAL, True)


def workspace_guard(ensure_size: Call) -> Wrapper:
    """Make the wrapper that lets ``SM100Workspace.ensure_size`` say what it needs, and grows by a lane's rules."""

    def wsfix_ensure_size(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            lane = _lane_of(instance)
            buffer, size = lane.generations[-1], 0
            asking = _Asking(instance, buffer)
        except Exception as error:
            report.failed("vllm", error, f"vLLM's {NAME}")
            return wrapped(*args, **kwargs)
        try:
            ensure_size(asking, *args, **kwargs)
        except allocation.Overflow as overflow:
            size = overflow.args[0]
        try:
            _publish(instance, lane, lane.buffer_for(size, buffer) if size else buffer)
        except RuntimeError:  # torch has no memory: vLLM's own call would say the same
            raise
        except Exception as error:
            report.failed("vllm", error, f"vLLM's {NAME}")
            return wrapped(*args, **kwargs)
        return None

    return wsfix_ensure_size


def wsfix_kernel_warmup(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run vLLM's warm-up, then presize the lanes of the worker's device: what comes next is the capture."""
    result = wrapped(*args, **kwargs)
    try:
        device = getattr(args[0] if args else kwargs.get(WARMUP[2]), "device", None)
        if device is not None and is_complete(UTILS):
            presize(device, lanes=_lanes_to_presize(torch.device(device)))
    except torch.OutOfMemoryError as error:
        sentence = f"the workspaces could not be presized before capture ({error}): they grow when they are first used."
        report.once(logging.WARNING, "warm-up", sentence)
    except Exception as error:
        report.failed("vllm", error, "presizing at vLLM's warm-up")
    return result


def _lanes_to_presize(device: torch.device) -> list[str]:
    chosen, cache = settings.read()[0].presize, sys.modules[UTILS]._cache_buf
    if chosen in ("used", "all"):
        chosen = tuple(name for name in LANES if chosen == "all" or (name, device) in cache)
    # Not those that are gated: there is no cuDNN, and that would be memory for nothing.
    return [name for name in chosen if not (LANES[name] in state.gates and closes(LANES[name], device))]


def _is_plain(function: object) -> bool:
    return type(function) is FunctionType and not hasattr(function, "__wrapped__")


def plan(config: settings.Settings) -> tuple[Verdict, list[Patch], str | None]:
    """Judge the vLLM modules that are imported, and list what has to be set to guard them. Changes nothing."""
    version = namespace(sys.modules.get("vllm")).get("__version__")
    vllm = f"vLLM {version or 'of unknown version'}"
    if not config.vllm:
        return Verdict("disabled", f"{settings.PREFIX}_VLLM is off: vLLM is left alone"), [], version
    observing = config.mode == "observe"
    patches, sites, said = [], [], []

    module, class_name, method, buffer = SM100_WORKSPACE
    if is_complete(module):
        owner = vars(sys.modules[module]).get(class_name)
        ensure_size: Any = vars(owner).get(method) if isinstance(owner, type) else None
        codes = [(found.name, found.code) for found in live_functions(sys.modules[module])]
        moving = [(name, code.co_name) for name, code in codes if "resize_" in code.co_names]
        known = moving == [(class_name, method)] and _is_plain(ensure_size)
        if is_guarded(ensure_size) or (known and resizes_only(ensure_size.__code__, buffer)):
            observe = observer("vLLM", NAME, lambda instance, args, kwargs: instance._workspace_buf)
            patches += around(owner, method, observe if observing else workspace_guard(ensure_size))
            sites.append(f"{module}.{class_name}.{method}")
            said.append(f"{class_name} is {'observed, and NOTHING is guarded' if observing else 'guarded'}")
        elif moving or not (ensure_size is None or _is_plain(ensure_size)):
            unknown = f"{vllm} resizes its {class_name} in a way that flashinfer-wsfix does not know"
            risk = "nothing of vLLM is guarded, and CUDA graphs with CUTLASS MLA may replay against freed memory"
            return Verdict("unsupported", f"{unknown}: {risk}"), [], version
        else:
            said.append(f"its {class_name} is never resized")

    module, function, parameter = WARMUP
    if is_complete(module) and not observing:
        warmup: Any = vars(sys.modules[module]).get(function)
        if is_guarded(warmup) or (_is_plain(warmup) and parameters(warmup.__code__)[:1] == (parameter,)):
            patches += around(sys.modules[module], function, wsfix_kernel_warmup)
            sites.append(f"{module}.{function}")
            said.append("its warm-up presizes FlashInfer's workspaces")
        else:
            said.append("its warm-up is not known and does not presize FlashInfer's workspaces")

    state = "not-needed" if not sites else "observing" if observing else "guarded"
    reason = f"{vllm}: {', '.join(said) or 'there is nothing to observe yet'}"
    return Verdict(state, reason, tuple(sites)), patches, version
