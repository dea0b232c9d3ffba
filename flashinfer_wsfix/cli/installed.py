"""The FlashInfer and the vLLM that this interpreter would import, read from their files: nothing of them runs."""

from contextlib import suppress
from importlib import metadata
from importlib.util import decode_source, find_spec
from pathlib import Path

from ..detection import Function, Verdict, judge, source_functions
from ..installed import gemm_functions
from ..names import GEMM


def source_of(module: str) -> str | None:
    """Read the source of a module of an installed package, which is not imported; None where there is none.

    Raises OSError, SyntaxError and UnicodeDecodeError where it cannot be read.
    """
    package, *rest = module.split(".")
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        place = Path(folder, *rest)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return decode_source(file.read_bytes())
    return None


def version_of(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed and says so."""
    for distribution in distributions:
        with suppress(Exception):
            return metadata.version(distribution) or None  # type: ignore[redundant-expr,unused-ignore]
    return None


def read_flashinfer() -> tuple[Verdict | None, list[Function]]:
    """Judge the FlashInfer that this interpreter would import, without importing it; None where it would find none.

    With it the functions that it was judged by. Raises OSError, UnicodeDecodeError and SyntaxError where its code
    cannot be read.
    """
    spec = find_spec("flashinfer")
    if spec is None or not spec.origin:  # a mere folder has no origin
        return None, []
    folders = [Path(folder, *GEMM.split(".")[1:]) for folder in spec.submodule_search_locations or ()]
    functions = list(gemm_functions([str(folder) for folder in folders if folder.is_dir()]))
    functions = functions or list(source_functions(GEMM, source_of(GEMM) or ""))  # once it was a module
    return judge(functions, version_of("flashinfer-python") or "of unknown version"), functions
