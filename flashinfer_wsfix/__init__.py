"""Keep FlashInfer's cuDNN GEMM workspace where CUDA graphs expect it.

``import flashinfer_wsfix`` activates the guard, before or after FlashInfer is imported. This module and
``flashinfer_wsfix.hook`` load nothing but ``sys``: a process that never imports FlashInfer does not notice them.
"""

from .hook import activate, deactivate

__version__ = "0.1.0"
__all__ = ["__version__", "activate", "deactivate", "presize", "status"]

_LAZY = {"presize": "workspace", "status": "report"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> "list[str]":
    return sorted({*globals(), *_LAZY})


activate("import")
