"""The import hook, and activation on top of it: standard library only, and of that only ``sys``.

A start-up file runs this in every interpreter of an environment, so nothing else may be imported until one of the
watched modules has been. wrapt's own post-import hooks are no use here: importing wrapt alone costs tens of
milliseconds in a bare interpreter, its hooks break the user's import when they raise, do not fire again after a reload,
and fire on a half-built module.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GEMM = "flashinfer.gemm"
GEMM_BASE = "flashinfer.gemm.gemm_base"
GEMM_BF16_FP4 = "flashinfer.gemm.gemm_bf16_fp4_cudnn"
UTILS = "flashinfer.utils"
AUTOTUNER = "flashinfer.autotuner"
CUTLASS_MLA = "vllm.v1.attention.backends.mla.cutlass_mla"
KERNEL_WARMUP = "vllm.model_executor.warmup.kernel_warmup"

# Module that was executed -> target that has to be looked at again.
WATCHED = {
    GEMM: "flashinfer",
    GEMM_BASE: "flashinfer",
    GEMM_BF16_FP4: "flashinfer",
    UTILS: "flashinfer",
    CUTLASS_MLA: "vllm",
    KERNEL_WARMUP: "vllm",
}

routes: "list[str]" = []  # by which routes this process was activated, in order


def activate(route: str = "call") -> None:
    """Guard FlashInfer and vLLM in this process: now where they are imported, else as soon as they are.

    ``route`` is a word for the log and for ``status()``. Idempotent, thread-safe, never raises unless
    ``FLASHINFER_WSFIX_STRICT=1``.
    """
    try:
        if route not in routes and not (routes and route == "import"):
            # Every other route imports the package too, so that one counts alone only.
            routes[:] = [known for known in routes if known != "import"] + [route]
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        # "flashinfer" is not watched itself: it stands for the moment between a finder's answer for flashinfer.gemm and
        # that module's place in sys.modules, which we would otherwise miss in another thread's import.
        for name in ("flashinfer", *WATCHED):
            spec = _spec(sys.modules.get(name))
            if getattr(spec, "_initializing", False):
                _watch(spec)
        for name in (GEMM, CUTLASS_MLA, KERNEL_WARMUP):
            if is_complete(name):  # by now; else its own turn comes
                _loaded(name)
    except Exception as error:
        _failed("activation", error)


def deactivate() -> "tuple[str, ...]":
    """Take the hook and every wrapper out again, freeing no buffer.

    Returns a sentence for each place that could not be restored because another tool has wrapped it since.
    """
    while _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    routes.clear()
    patching = sys.modules.get(f"{__package__}.patching")
    return patching.undo_all() if patching else ()


def _spec(module: object) -> "Any":
    """Return a module's spec, or None. Not by ``getattr``, which would load a lazy module."""
    try:
        return object.__getattribute__(module, "__spec__")
    except AttributeError:
        return None


def is_complete(name: str) -> bool:
    """Say whether a module has been executed to its end: not half-imported, nor prepared by a lazy loader."""
    module = sys.modules.get(name)
    return not (module is None or is_lazy(module) or getattr(_spec(module), "_initializing", False))


def is_lazy(module: object) -> bool:
    """Say whether importlib.util.LazyLoader has only made this module ready. ``type`` does not load it."""
    return type(module).__name__ == "_LazyModule"


def _loaded(name: str) -> None:
    """Look at the target of ``name`` again, now that this module has been executed."""
    if _FINDER not in sys.meta_path:
        return
    target = WATCHED.get(name, "flashinfer")
    if target == "flashinfer" and name != GEMM and not is_complete(GEMM):
        return  # the package is still being imported; its own turn comes last
    try:
        # Imported before patching takes its lock: no lock of ours is held while an import runs.
        from . import patching

        patching.refresh(target)
    except Exception as error:
        _failed(target, error)


def _failed(target: str, error: Exception) -> None:
    """Say once what an error of ours means, and go on as if we were not there."""
    if _is_strict():
        raise error
    try:
        from . import report

        report.record_failure(target, error)
    except Exception:
        if sys.stderr is not None:
            sys.stderr.write(
                f"flashinfer-wsfix: NOT guarded ({target}), because of an error of ours ({error!r}): FlashInfer and"
                " vLLM run as if flashinfer-wsfix were not installed.\n"
            )


def _is_strict() -> bool:
    import os

    return os.environ.get("FLASHINFER_WSFIX_STRICT", "").strip().lower() in ("1", "on", "true", "yes")


class _Finder:
    """Stands first on ``sys.meta_path``, lets the others find, and has the loader say when a module was executed."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in WATCHED:
            return None
        finders = list(sys.meta_path)
        # Only those after us: one that was put before us may itself ask all that come after it.
        for finder in finders[finders.index(self) + 1 :] if self in finders else ():
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(name, path, target) if find_spec and finder is not self else None
            if spec is not None:
                _tell(spec, name)
                return spec
        return None


_FINDER = _Finder()


def _tell(spec: "Any", name: str) -> None:
    """Have the loader of this spec call us after it has executed the watched module ``name``. Never raises."""
    try:
        _ask(spec)
    except Exception as error:
        _failed(WATCHED[name], error)


def _ask(spec: "Any") -> None:
    """Replace ``exec_module`` of the spec's loader.

    An attribute of the instance, not a proxy around it: ``inspect``, ``importlib.resources`` and ``pkgutil`` go on
    seeing the loader that they know. A loader of several modules (a zip file's) is asked only once.
    """
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None:  # of a namespace package, or as old as load_module
        return _watch(spec)
    if getattr(spec, "tells_wsfix", False) or getattr(execute, "tells_wsfix", False):
        return

    def exec_module(module: "Any") -> None:
        execute(module)  # theirs: not guarded by us
        spec = _spec(module)
        name = getattr(spec, "name", None)
        if name in WATCHED and is_lazy(module):  # only made ready: another loader executes it when it is used
            _tell(spec, name)
        elif name in WATCHED:
            _loaded(name)

    exec_module.tells_wsfix = True  # type: ignore[attr-defined]
    try:
        # Not setattr(): a loader that is a proxy (wrapt's) would hand it on to the loader that it stands around.
        object.__setattr__(loader, "exec_module", exec_module)
        spec.tells_wsfix = True  # whatever loader another finder puts around this one
    except (AttributeError, TypeError):  # it takes no attributes
        _watch(spec)


def _watch(spec: "Any") -> None:
    """Be told when a module whose loader we cannot ask is done: one that another thread is executing right now.

    The finder was asked before we came. What is left is that importlib sets ``spec._initializing`` to False at the end,
    in the importing thread and under the module's lock: nobody sees the module between that and our guard.
    """
    plain = type(spec)
    if getattr(plain, "tells_wsfix", False):
        return

    class WatchedSpec(plain):  # type: ignore[misc, valid-type]
        tells_wsfix = True

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_initializing" and not value:
                self.__class__ = plain
                if self.name in sys.modules:
                    _loaded(self.name if self.name in WATCHED else GEMM)

    spec.__class__ = WatchedSpec
