"""FlashInfer's half: what stands around a site, around the cache, and around the functions that start the auto-tuner.

Wrappers take ``(wrapped, instance, args, kwargs)`` by position, as wrapt calls them, and are named ``wsfix_...``, so
that a traceback says whose they are.
"""

import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple

import torch
import wrapt

from . import allocation, report, settings, state, workspace
from .allocation import is_capturing, place
from .detection import RISK, Function, Verdict, guard_in, judge, live_functions, parameters, resized
from .importer import is_complete, namespace
from .installed import gemm_functions
from .lanes import SCRATCH
from .names import GEMM, SITE_MODULES, UTILS
from .sites import CUDNN_FIXED, GATES, RUNNERS

NOT_GENERAL = {"tinygemm"}  # for few rows, and K a multiple of 8: FlashInfer would fail or crawl with it alone

Call = Callable[..., Any]
Wrapper = Callable[[Call, Any, tuple[Any, ...], dict[str, Any]], Any]


class Guard(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapper of ours. Pickled as the name that it stands under, and copied as itself, as the function is."""

    is_wsfix_guard = True
    # torch.compile takes it for a function, since wrapt gives it the function's class, and then fails on it.
    _torchdynamo_disable = True

    def __reduce_ex__(self, protocol: object) -> str:
        return self.__wrapped__.__qualname__

    def __deepcopy__(self, memo: object = None) -> "Guard":
        return self

    __copy__ = __deepcopy__


class Patch(NamedTuple):
    """One attribute of foreign code, what it was, and what takes its place."""

    owner: Any
    name: str
    original: Any
    replacement: Any


def is_guarded(value: object) -> bool:
    """Say whether a guard of ours is ``value``, or stands somewhere below it."""
    return guard_in(value) is not None


def around(owner: Any, name: str, wrapper: Wrapper) -> list[Patch]:
    """List the patch that puts ``wrapper`` around an attribute: none where a guard of ours is there already."""
    original = vars(owner)[name]
    return [] if is_guarded(original) else [Patch(owner, name, original, Guard(original, wrapper))]


def site_guard(position: int, parameter: str) -> Wrapper:
    """Make the wrapper of a site that takes its workspace as ``parameter``, at ``position``."""

    def wsfix_site(wrapped: Call, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
                size, buffer = overflow.args[0], None

    return wsfix_site


def uncompiled(function: Call) -> Call:
    """Keep torch.compile, where something uses it, from compiling what a guard of a compiled caller's site runs."""
    name = "torch._dynamo"  # where another thread is importing it, nothing is compiled yet
    dynamo = namespace(sys.modules.get(name)) if is_complete(name) else {}
    disable: Callable[[Call], Call] | None = dynamo.get("disable")
    return disable(function) if disable else function


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


def observer(host: str, name: str | None, find: Callable[..., Any]) -> Wrapper:
    """Make the wrapper that changes nothing and logs each move of a workspace.

    ``find(instance, args, kwargs)`` returns it. ``name``: of its lane, None for the one in FlashInfer's cache.
    """

    def wsfix_observe(wrapped: Call, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = find(instance, args, kwargs)
        old = place(tensor) if isinstance(tensor, torch.Tensor) else None
        try:
            return wrapped(*args, **kwargs)
        finally:
            try:
                if old is not None and place(tensor) != old:
                    lane = name or (workspace.cache_key(tensor) or (SCRATCH,))[0]
                    new, capturing = place(tensor), is_capturing(tensor.device)
                    report.moved(f"MOVED by {host}", lane, tensor.device, old, new, capturing, logging.WARNING)
            except Exception as error:
                report.failed(host.lower(), error, "the log of a workspace that moved")

    return wsfix_observe


def _site_observer(position: int, parameter: str) -> Wrapper:
    def find(instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[position] if len(args) > position else kwargs.get(parameter)

    return observer("FlashInfer", None, find)


def closes(name: str | None, device: torch.device) -> bool:
    """Say whether the gate of this name would act on ``device``: an SM12x GPU (RTX PRO 6000, RTX 50xx, GB10).

    bf16's only while cuDNN is not known to be fixed; fp8's always, as measured in production.
    """
    with suppress(Exception):  # not a CUDA device, or none that answers: then cuDNN is not ours to judge
        if torch.cuda.get_device_capability(device)[0] == 12:
            return not (name == "bf16" and _cudnn_is_fixed())
    return False


def _cudnn_is_fixed() -> bool:
    """Say whether the cuDNN that is loaded is known to be without D3."""
    with suppress(Exception):
        number = sys.modules["cudnn"].backend_version()  # 92301 for 9.23.1
        return (number // 10000, number // 100 % 100, number % 100) >= CUDNN_FIXED
    return False


def gate(name: str, position: int, first: str) -> Wrapper:
    """Make the wrapper that takes "cudnn" out of the list of runners on SM12x, where another can take any call.

    ``position``: of that list among the parameters; ``first``: the name of the first one, a matrix.
    """

    def wsfix_gate(wrapped: Call, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_position = len(args) > position
        runners: Iterable[str] = (args[position] if by_position else kwargs.get(RUNNERS)) or ()
        matrix: Any = args[0] if args else kwargs.get(first)
        left = [runner for runner in runners if runner != "cudnn"]
        acts = "cudnn" in runners and set(left) - NOT_GENERAL and isinstance(matrix, torch.Tensor)
        if not acts or not closes(name, matrix.device):
            return wrapped(*args, **kwargs)
        state.count("gated_calls")
        fault = "replayed from CUDA graphs, its kernels read rewritten parameters there"
        what = f"gate: cuDNN is left out of FlashInfer's {name} auto-tuning on SM12x ({fault}); it chooses from"
        undone = f"{', '.join(left)}. {settings.PREFIX}_GATE=off undoes this. Whether FlashInfer's other cuDNN GEMMs"
        others = "(fp4, mxfp8, bmm_bf16, bf16_fp4) have that fault is not known: they keep cuDNN."
        report.once(logging.INFO, ("gate", name), f"{what} {undone} {others}")
        if by_position:
            return wrapped(*args[:position], left, *args[position + 1 :], **kwargs)
        return wrapped(*args, **{**kwargs, RUNNERS: left})

    return wsfix_gate


_read: dict[tuple[str, ...], list[Function]] = {}  # by the package's path: what was not imported at first


def _functions() -> list[Function]:
    """Read all of ``flashinfer.gemm``: live where it is imported, else as it is installed, so that no verdict changes
    when a module comes that FlashInfer imports late."""
    live = [name for name in SITE_MODULES if is_complete(name)]
    functions = [function for name in live for function in live_functions(sys.modules[name])]
    path = tuple(namespace(sys.modules[GEMM]).get("__path__", ()))
    if not path:  # it was one module once
        return [*functions, *live_functions(sys.modules[GEMM])]
    if path not in _read:  # once: by the time that a module comes late, a file may not be readable any more
        _read[path] = list(gemm_functions(path, live))
    return [*functions, *(function for function in _read[path] if function.module not in live)]


def plan(config: settings.Settings) -> tuple[Verdict, list[Patch], str | None]:
    """Judge the FlashInfer that is imported, and list what has to be set to guard it. Changes nothing."""
    version = namespace(sys.modules.get("flashinfer")).get("__version__")
    functions = _functions()
    verdict = judge(functions, version or "of unknown version")
    cache: Any = namespace(sys.modules.get(UTILS)).get("_cache_buf")
    is_ours = getattr(type(cache), "is_wsfix_cache", False)
    if verdict.state == "guarded" and type(cache) is not dict and not is_ours:
        reason = f"FlashInfer {version} keeps its workspaces in a way that flashinfer-wsfix does not know"
        verdict = Verdict("unsupported", f"{reason}: {RISK}")
    if verdict.state != "guarded":
        return verdict, [], version
    observing = config.mode == "observe"
    make = _site_observer if observing else site_guard
    wrappers: dict[tuple[str, str], Wrapper] = {}
    for function in functions:
        if f"{function.module}.{function.name}" in verdict.sites and is_complete(function.module):
            (parameter,) = resized(function.code)
            position = parameters(function.code).index(parameter)
            wrappers[function.module, function.name] = make(position, parameter)
    verdict = verdict._replace(sites=tuple(".".join(site) for site in wrappers))
    if observing:
        reason = f"FlashInfer {version} moves its cuDNN workspace; each move is logged and NOTHING is guarded"
        verdict = verdict._replace(state="observing", reason=reason)
    for name in () if observing else config.gate:
        module, function_name = GATES[name]
        original = namespace(sys.modules.get(module)).get(function_name)
        if isinstance(original, FunctionType):
            names = parameters(original.__code__)
            wrappers[module, function_name] = gate(name, names.index(RUNNERS), names[0])
    patches = [patch for (module, name), it in wrappers.items() for patch in around(sys.modules[module], name, it)]
    if not is_ours:
        kept = workspace.RetiringCache(cache, keeps=not observing)
        patches.append(Patch(sys.modules[UTILS], "_cache_buf", cache, kept))
    return verdict, patches, version
