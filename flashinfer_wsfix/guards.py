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

from . import allocation, report, settings, state, workspace
from .detection import Function, Verdict, guard_in, judge, live_functions, parameters, resized
from .importer import is_complete, is_lazy, namespace
from .installed import gemm_functions
from .lanes import SCRATCH
from .names import GEMM, SITE_MODULES, UTILS
from .sites import CUDNN_FIXED, GATES

NOT_GENERAL = {"tinygemm"}  # for few rows, and K a multiple of 8: FlashInfer would fail or crawl with it alone

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
        buffer = None if lane is None else lane.current
        size = 0
        while True:
            if buffer is None:
                # Outside of the except block, so that an exception of the site has no context of ours.
                buffer = uncompiled(_buffer_for)(size, tensor)
                if buffer is None:
                    return wrapped(*args, **kwargs)
            try:
                if by_position:
                    arguments = list(args)
                    arguments[position] = buffer
                    return wrapped(*arguments, **kwargs)
                return wrapped(*args, **{**kwargs, parameter: buffer})
            except allocation.Overflow as overflow:
                size, buffer = overflow.size, None

    return wsfix_site


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile, where something uses it, from compiling what a guard of a compiled caller's site runs."""
    disable = namespace(sys.modules.get("torch._dynamo")).get("disable")
    if disable is None or not is_complete("torch._dynamo"):  # another thread imports it: nothing is compiled yet
        return function
    disabled: Callable[..., Any] = disable(function)
    return disabled


def _buffer_for(size: int, tensor: object) -> torch.Tensor | None:
    """Return what a site gets in place of ``tensor``; None where its own code has to do."""
    if not isinstance(tensor, torch.Tensor):
        return None  # FlashInfer's own error for that
    try:
        return workspace.lane_of(tensor).buffer_for(size, tensor)
    except RuntimeError:  # torch has no memory: FlashInfer's own call would say the same
        raise
    except Exception as error:
        report.failed("flashinfer", error, "a cuDNN GEMM")
        return None


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
                name = name or (key[0] if key else SCRATCH)
                capturing = allocation.is_capturing(tensor.device)
                report.moved(f"MOVED by {host}", name, tensor.device, old, new, capturing, logging.WARNING)
            except Exception as error:
                report.failed(host.lower(), error, "the log of a workspace that moved")


def is_sm12x(device: torch.device) -> bool:
    """Say whether ``device`` is an SM12x GPU (RTX PRO 6000, RTX 50xx, GB10)."""
    try:
        return bool(torch.cuda.get_device_capability(device)[0] == 12)
    except Exception:  # not a CUDA device, or none that answers: then cuDNN is not ours to judge
        return False


def _cudnn_is_fixed() -> bool:
    """Say whether the cuDNN that is loaded is known to be without D3."""
    try:
        number = sys.modules["cudnn"].backend_version()  # 92301 for 9.23.1
    except Exception:
        return False
    return (number // 10000, number // 100 % 100, number % 100) >= CUDNN_FIXED


def closes(name: str | None, device: torch.device) -> bool:
    """Say whether the gate of this name would act on ``device``.

    bf16's only while cuDNN is not known to be fixed; fp8's always, as measured in production.
    """
    return is_sm12x(device) and not (name == "bf16" and _cudnn_is_fixed())


def gate(name: str, position: int, parameter: str, first: str) -> Wrapper:
    """Make the wrapper that takes "cudnn" out of the list of runners on SM12x, where another can take any call."""

    def wsfix_gate(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_position = len(args) > position
        runners: Iterable[str] | None = args[position] if by_position else kwargs.get(parameter)
        matrix = args[0] if args else kwargs.get(first)
        if runners is None or not isinstance(matrix, torch.Tensor) or "cudnn" not in runners:
            return wrapped(*args, **kwargs)
        left = [runner for runner in runners if runner != "cudnn"]
        if not set(left) - NOT_GENERAL or not closes(name, matrix.device):
            return wrapped(*args, **kwargs)
        state.count("gated_calls")
        report.once(
            logging.INFO,
            ("gate", name),
            f"gate: cuDNN is left out of FlashInfer's {name} auto-tuning on SM12x (replayed from CUDA graphs, its"
            f" kernels read rewritten parameters there); it chooses from {', '.join(left)}. {settings.PREFIX}_GATE=off"
            " undoes this. Whether FlashInfer's other cuDNN GEMMs (fp4, mxfp8, bmm_bf16, bf16_fp4) have that fault is"
            " not known: they keep cuDNN.",
        )
        if by_position:
            return wrapped(*args[:position], left, *args[position + 1 :], **kwargs)
        return wrapped(*args, **{**kwargs, parameter: left})

    return wsfix_gate


_read: dict[tuple[str, ...], list[Function]] = {}  # by the package's path: what was not imported at first


def _functions() -> list[Function]:
    """Read all of ``flashinfer.gemm``: live where it is imported, else as it is installed, so that no verdict changes
    when a module comes that FlashInfer imports late."""
    live = [name for name in SITE_MODULES if is_complete(name)]
    functions = [function for name in live for function in live_functions(sys.modules[name])]
    package = sys.modules.get(GEMM)
    if package is None or is_lazy(package):
        return functions
    path = namespace(package).get("__path__")
    if path is None:  # it was one module once
        return [*functions, *live_functions(package)]
    path = tuple(path)
    if path not in _read:  # once: by the time that a module comes late, a file may not be readable any more
        _read[path] = list(gemm_functions(path, live))
    return [*functions, *(function for function in _read[path] if function.module not in live)]


def plan(config: settings.Settings) -> tuple[Verdict, list[Patch], str | None]:
    """Judge the FlashInfer that is imported, and list what has to be set to guard it. Changes nothing."""
    version = namespace(sys.modules.get("flashinfer")).get("__version__")
    functions = _functions()
    verdict = judge(functions, version or "of unknown version")
    if verdict.state != "guarded":
        return verdict, [], version
    cache = namespace(sys.modules.get(UTILS)).get("_cache_buf")
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
        original = namespace(sys.modules[module])[name]
        if not is_guarded(original):
            patches.append(Patch(sys.modules[module], name, original, Guard(original, wrapper)))

    wrapped = []
    for function in functions:
        name = f"{function.module}.{function.name}"
        if name in verdict.sites and is_complete(function.module):
            wrapped.append(name)
            (parameter,) = resized(function.code)
            replace(function.module, function.name, make(parameters(function.code).index(parameter), parameter))
    for row in GATES if config.mode == "on" else ():
        original = namespace(sys.modules.get(row.module)).get(row.function)
        if row.name in config.gate and isinstance(original, FunctionType):
            names = parameters(original.__code__)
            replace(row.module, row.function, gate(row.name, names.index(row.parameter), row.parameter, names[0]))
    if type(cache) is dict:
        kept = workspace.RetiringCache(cache, keeps=config.mode == "on")
        patches.append(Patch(sys.modules[UTILS], "_cache_buf", cache, kept))
    return verdict._replace(sites=tuple(wrapped)), patches, version
