"""The FlashInfer and the vLLM that this interpreter would import, read from their files: nothing of them runs."""

from contextlib import suppress
from importlib import metadata
from importlib.util import decode_source, find_spec
from pathlib import Path

from ..detection import Verdict, judge
from ..installed import gemm_functions


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


def judge_installed() -> Verdict | None:
    """Judge the FlashInfer that this interpreter would import, without importing it; None where it would find none.

    Raises OSError, UnicodeDecodeError and SyntaxError where its source cannot be read.
    """
    spec = find_spec("flashinfer")
    if spec is None or not spec.origin:  # a mere folder has no origin
        return None
    path = [str(Path(folder, "gemm")) for folder in spec.submodule_search_locations or ()]
    version = None
    with suppress(Exception):  # without metadata, or with broken ones, it is judged all the same
        version = metadata.version("flashinfer-python")
    return judge(list(gemm_functions(path)), version or "of unknown version")
