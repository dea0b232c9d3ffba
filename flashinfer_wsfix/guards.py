"""FlashInfer's half: what stands around a site, around the cache, and around the functions that start the auto-tuner.

Wrappers take ``(wrapped, instance, args, kwargs)`` by position, as wrapt calls them, and are named ``wsfix_...``, so
that a traceback says whose they are.
"""

import logging
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import wrapt

from . import report, settings, workspace
from .detection import Verdict, guard_in, judge, live_functions, parameters, resized
from .hook import GEMM_BASE, GEMM_BF16_FP4, UTILS, is_lazy
from .sites import GATES

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


class Guard(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapper of ours. Pickled as the name that it stands under, and copied as itself, as the function is."""

    is_wsfix_guard = True

    def __reduce_ex__(self, protocol: object) -> str:
        return self.__wrapped__.__qualname__

    # torch.compile takes it for a function, since wrapt gives it the function's class, and then fails on it.
    _torchdynamo_disable = True

    def __copy__(self) -> "Guard":
        return self

    def __deepcopy__(self, memo: object) -> "Guard":
        return self


class Patch(NamedTuple):
    """One attribute of foreign code, what it was, and what takes its place."""

    owner: Any
    name: str
    original: Any
    replacement: Any


def is_guarded(value: object) -> bool:
    """Say whether a guard of ours is ``value``, or stands somewhere below it."""
    return guard_in(value) is not None


def site_guard(position: int, parameter: str) -> Wrapper:
    """Make the wrapper of a site that takes its workspace as ``parameter``, at ``position``."""

    def wsfix_site(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The ordinary call: one attribute read on the tensor, one on its lane, one copy of the arguments.
        by_position = len(args) > position
        tensor = args[position] if by_position else kwargs.get(parameter)
        lane = getattr(tensor, workspace.ATTRIBUTE, None)
        if lane is None:
            lane = uncompiled(_lane_of)(tensor)
            if lane is None:
                return wrapped(*args, **kwargs)
        buffer = lane.current
        while True:
            try:
                if by_position:
                    arguments = list(args)
                    arguments[position] = buffer
                    return wrapped(*arguments, **kwargs)
                return wrapped(*args, **{**kwargs, parameter: buffer})
            except workspace.Overflow as overflow:
                size = overflow.size
            # Outside of the except block, so that an exception of the site has no context of ours.
            try:
                buffer = uncompiled(lane.buffer_for)(size, tensor)
            except RuntimeError:  # torch has no memory: FlashInfer's own call would say the same
                raise
            except Exception as error:
                unguarded("a cuDNN GEMM", error)
                return wrapped(*args, **kwargs)

    return wsfix_site


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile, where something uses it, from compiling what a guard of a compiled caller's site runs."""
    dynamo = sys.modules.get("torch._dynamo")
    disabled: Callable[..., Any] = dynamo.disable(function) if dynamo else function
    return disabled


def _lane_of(tensor: object) -> workspace.Lane | None:
    if not isinstance(tensor, torch.Tensor):
        return None  # FlashInfer's own error for that
    try:
        return workspace.lane_of(tensor)
    except Exception as error:
        unguarded("a cuDNN GEMM", error)
        return None


def unguarded(what: str, error: Exception) -> None:
    """Say once that the host's own code runs instead of ours."""
    report.warn_once(
        ("unguarded", what),
        f"{what} runs UNGUARDED, because of an error of flashinfer-wsfix ({error!r}): CUDA graphs may replay against"
        " freed memory. Please report it.",
    )


def observer(position: int, parameter: str) -> Wrapper:
    """Make the wrapper that changes nothing and logs each move of a site's workspace."""

    def wsfix_observe(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[position] if len(args) > position else kwargs.get(parameter)
        if not isinstance(tensor, torch.Tensor):
            return wrapped(*args, **kwargs)
        return observed("FlashInfer", None, tensor, lambda: wrapped(*args, **kwargs))

    return wsfix_observe


def observed(host: str, name: str | None, tensor: torch.Tensor, call: Callable[[], Any]) -> Any:
    """Make a host's call and log it where it moved ``tensor``. ``name``: of the lane, None for the one in the cache."""
    old = (tensor.data_ptr(), tensor.numel())
    try:
        return call()
    finally:
        new = (tensor.data_ptr(), tensor.numel())
        if new != old:
            try:
                key = None if name else workspace.cache_key(tensor)
                name = name or (key[0] if key else workspace.SCRATCH)
                capturing = workspace.is_capturing(tensor.device)
                report.moved(f"MOVED by {host}", name, tensor.device, old, new, capturing, logging.WARNING)
            except Exception as error:
                report.warn_once("observe", f"a workspace moved; an error of flashinfer-wsfix hid where ({error!r}).")


def is_sm12x(device: torch.device) -> bool:
    """Say whether ``device`` is an SM12x GPU (RTX PRO 6000, RTX 50xx, GB10)."""
    try:
        return bool(torch.cuda.get_device_capability(device)[0] == 12)
    except Exception:  # not a CUDA device, or none that answers: then cuDNN is not ours to judge
        return False


def gate(name: str, position: int, parameter: str, first: str) -> Wrapper:
    """Make the wrapper that takes "cudnn" out of the list of runners on SM12x, where others are left."""

    def wsfix_gate(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_position = len(args) > position
        runners: Iterable[str] | None = args[position] if by_position else kwargs.get(parameter)
        matrix = args[0] if args else kwargs.get(first)
        if runners is None or not isinstance(matrix, torch.Tensor) or "cudnn" not in runners:
            return wrapped(*args, **kwargs)
        left = [runner for runner in runners if runner != "cudnn"]
        if not left or not is_sm12x(matrix.device):
            return wrapped(*args, **kwargs)
        report.count("gated_calls")
        report.inform_once(
            ("gate", name),
            f"gate: cuDNN is left out of FlashInfer's {name} auto-tuning on SM12x (replayed from CUDA graphs, its"
            f" kernels read rewritten parameters there); it chooses from {', '.join(left)}. {settings.PREFIX}_GATE=off"
            " undoes this.",
        )
        if by_position:
            return wrapped(*args[:position], left, *args[position + 1 :], **kwargs)
        return wrapped(*args, **{**kwargs, parameter: left})

    return wsfix_gate


def plan(config: settings.Settings) -> tuple[Verdict, list[Patch], str | None]:
    """Judge the FlashInfer that is imported, and list what has to be set to guard it. Changes nothing."""
    version = getattr(sys.modules.get("flashinfer"), "__version__", None)
    modules = [sys.modules.get(name) for name in (GEMM_BASE, GEMM_BF16_FP4)]
    functions = [
        function for module in modules if module and not is_lazy(module) for function in live_functions(module)
    ]
    verdict = judge(functions, version or "of unknown version")
    if verdict.state != "guarded":
        return verdict, [], version
    cache = getattr(sys.modules.get(UTILS), "_cache_buf", None)
    if type(cache) is not dict and not getattr(type(cache), "is_wsfix_cache", False):
        reason = (
            f"FlashInfer {version} keeps its workspaces in a way that flashinfer-wsfix does not know: nothing is"
            " guarded, and CUDA graphs may replay against freed memory"
        )
        return Verdict("unsupported", reason), [], version
    make = site_guard
    if config.mode == "observe":
        make = observer
        verdict = verdict._replace(
            state="observing",
            reason=f"FlashInfer {version} moves its cuDNN workspace; each move is logged and NOTHING is guarded",
        )
    patches = []

    def replace(module: str, name: str, wrapper: Wrapper) -> None:
        original = vars(sys.modules[module])[name]
        if not is_guarded(original):
            patches.append(Patch(sys.modules[module], name, original, Guard(original, wrapper)))

    for function in functions:
        if f"{function.module}.{function.name}" in verdict.sites:
            (parameter,) = resized(function.code)
            replace(function.module, function.name, make(parameters(function.code).index(parameter), parameter))
    if config.mode == "on":
        for row in GATES:
            original = getattr(sys.modules[row.module], row.function, None)
            if row.name in config.gate and isinstance(original, FunctionType):
                names = parameters(original.__code__)
                wrapper = gate(row.name, names.index(row.parameter), row.parameter, names[0])
                replace(row.module, row.function, wrapper)
        if type(cache) is dict:
            patches.append(Patch(sys.modules[UTILS], "_cache_buf", cache, workspace.RetiringCache(cache)))
    return verdict, patches, version
