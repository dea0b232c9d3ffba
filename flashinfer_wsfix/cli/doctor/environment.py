"""Which versions and which GPUs are here, from metadata and from children."""

import platform
import sys
from contextlib import suppress
from importlib import metadata
from typing import Any

from ... import __version__
from .children import CUDNN, NoAnswer, python, run

# Each by its name for people and the distributions that bring it, where some do.
ENVIRONMENT = {
    "flashinfer": ("FlashInfer", "flashinfer-python"),
    "torch": ("torch", "torch"),
    "cudnn": ("cuDNN backend", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "vllm": ("vLLM", "vllm"),
    "sglang": ("SGLang", "sglang"),
    "wrapt": ("wrapt", "wrapt"),
    "python": ("Python",),
    "executable": ("",),
    "flashinfer_wsfix": ("flashinfer-wsfix",),
}


def version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed and says so."""
    for distribution in distributions:
        with suppress(Exception):
            return metadata.version(distribution) or None  # type: ignore[redundant-expr,unused-ignore]
    return None


def _cudnn() -> str | None:
    try:
        number = python(CUDNN)  # 92301 for 9.23.1
    except NoAnswer:
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _gpus() -> list[dict[str, str]]:
    try:
        listed = run(["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"])
    except NoAnswer:
        return []
    rows = [line.split(", ") for line in listed.splitlines()]
    return [dict(zip(("name", "capability", "driver"), row, strict=True)) for row in rows if len(row) == 3]


def read_environment() -> dict[str, Any]:
    found: dict[str, Any] = {key: version(*brought_by) for key, (_, *brought_by) in ENVIRONMENT.items()}
    found.update(python=platform.python_version(), executable=sys.executable, flashinfer_wsfix=__version__)
    return found | {"cudnn": found["cudnn"] or _cudnn(), "gpus": _gpus()}


def has_gpu(environment: dict[str, Any], major: str) -> bool | None:
    """Say whether a GPU of this major compute capability is here; None where no GPU is found that says its own."""
    majors = [gpu["capability"].split(".")[0] for gpu in environment["gpus"]]
    return major in majors if any(map(str.isdigit, majors)) else None
