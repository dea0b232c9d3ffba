"""Keep FlashInfer's cuDNN GEMM workspace where CUDA graphs expect it.

``import flashinfer_wsfix`` activates the guard, before or after FlashInfer is imported. What that runs is
``activation``, ``importer``, ``names`` and ``state``, which load nothing but ``os`` and ``sys``: a process that never
imports FlashInfer does not notice them.
"""

import sys

from .activation import activate, deactivate

__version__ = "0.2.0"
__all__ = ["__version__", "activate", "deactivate", "presize", "status"]

_LAZY = {"presize": "presizing", "status": "report"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> "list[str]":
    return sorted({*globals(), *_LAZY})


def _is_asked_for() -> bool:
    """Say whether somebody imports this package itself, not one of its modules, which brings it along.

    A plugin names its own route right after; and who imports ``report`` to look at a process must find it unchanged.
    Nothing but importlib's own frames tell the two apart.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_back.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
        if str(frame.f_locals.get("name")).startswith(f"{__name__}."):
            return False
    return True


if _is_asked_for():
    activate("import")
