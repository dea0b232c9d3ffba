"""``activate`` and ``deactivate``, on top of the import hook. A start-up file runs this in every interpreter.

So nothing is imported here beyond what every interpreter has, until one of the watched modules has been executed; then
patching and all that it needs, torch and wrapt, is imported late.
"""

import sys

from . import state
from .importer import Finder, is_complete
from .names import CUTLASS_MLA, GEMM, KERNEL_WARMUP, WATCHED


def activate(route: str = "call") -> None:
    """Guard FlashInfer and vLLM in this process: now where they are imported, else as soon as they are.

    ``route`` is a word for the log and for ``status()``. Idempotent, thread-safe, never raises unless
    ``FLASHINFER_WSFIX_STRICT=1``.
    """
    try:
        if route not in state.routes and not (state.routes and route == "import"):
            # Whoever has a route of its own may have imported the package as well: that one counts alone only.
            state.routes[:] = [known for known in state.routes if known != "import"] + [route]
        _FINDER.install()
        _look()
    except Exception as error:
        _failed("activation", error)


def deactivate() -> "tuple[str, ...]":
    """Take the hook and every wrapper out again, freeing no buffer.

    Returns a sentence for each place that could not be restored because another tool has wrapped it since.
    """
    _FINDER.remove()
    state.routes.clear()
    patching = sys.modules.get(f"{__package__}.patching")
    return patching.undo_all() if patching else ()


def _look() -> None:
    """Look at what is imported by now; the turn of everything else comes."""
    for name in (GEMM, CUTLASS_MLA, KERNEL_WARMUP):
        if is_complete(name):
            _loaded(name)


def _loaded(name: str) -> None:
    """Look at the target of ``name`` again, now that this module has been executed."""
    if _FINDER not in sys.meta_path:
        return
    target = WATCHED.get(name)
    if target is None:  # a package, which stands for the modules of it that are watched
        return _look()
    if target == "flashinfer" and name != GEMM and not is_complete(GEMM):
        return  # the package is still being imported; its own turn comes last
    try:
        # Imported before patching takes its lock: no lock of ours is held while an import runs.
        from . import patching

        patching.refresh(target)
    except Exception as error:
        _failed(target, error)


def _failed(target: str, error: Exception) -> None:
    """Hand an error of ours to the one policy for them, or say on standard error that not even that can be had."""
    try:
        from . import report
    except Exception:
        why = f"NOT guarded ({target}), because of an error of ours ({error!r})"
        if sys.stderr is not None:
            sys.stderr.write(f"flashinfer-wsfix: {why}: FlashInfer and vLLM run as if it were not installed.\n")
    else:
        report.failed(target, error)


_FINDER = Finder(WATCHED, _loaded, lambda name, error: _failed(WATCHED[name], error))
