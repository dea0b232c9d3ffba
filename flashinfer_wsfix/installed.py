"""The code of FlashInfer's modules as it is installed: read, never run."""

from collections.abc import Collection, Iterable, Iterator
from importlib.machinery import PathFinder
from pkgutil import iter_modules
from types import CodeType

from .detection import Function, code_functions
from .names import GEMM, SITE_MODULES


def gemm_functions(path: Iterable[str], besides: Collection[str] = (), package: str = GEMM) -> Iterator[Function]:
    """Read the functions of ``flashinfer.gemm``, a package with this ``path``, from its modules' code.

    Of the modules that hold sites, and of any other that says ``resize_``; not of those named in ``besides``. Raises
    what their loaders raise: OSError, SyntaxError, UnicodeDecodeError.
    """
    path = list(path)
    for found in iter_modules(path, f"{package}."):
        if found.name in besides:
            continue
        if found.ispkg:
            leaf = found.name.rpartition(".")[2]
            yield from gemm_functions([f"{folder}/{leaf}" for folder in path], besides, found.name)
        # Not importlib.util.find_spec, which would ask everybody's finders and import the package.
        spec = PathFinder.find_spec(found.name, path)
        loader = spec.loader if spec else None
        if not hasattr(loader, "get_code") or spec is None or not spec.origin:
            continue
        if found.name in SITE_MODULES or b"resize_" in loader.get_data(spec.origin):  # type: ignore[union-attr]
            code = loader.get_code(found.name)  # type: ignore[union-attr]
            if isinstance(code, CodeType):
                yield from code_functions(found.name, code)
