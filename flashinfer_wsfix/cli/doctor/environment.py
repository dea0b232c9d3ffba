"""Which versions and which GPUs are here, from metadata and from children."""

import platform
import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from ... import __version__
from ..installed import version_of
from .children import CUDNN, LIBCUDNN, NoAnswer, python, run

# Each by its name for people and the distribution that brings it, where one does.
ENVIRONMENT = {
    "flashinfer": ("FlashInfer", "flashinfer-python"),
    "flashinfer_cubin": ("flashinfer-cubin", "flashinfer-cubin"),
    "flashinfer_jit_cache": ("flashinfer-jit-cache", "flashinfer-jit-cache"),
    "torch": ("torch", "torch"),
    "cudnn": ("cuDNN backend",),
    "vllm": ("vLLM", "vllm"),
    "sglang": ("SGLang", "sglang"),
    "tensorrt_llm": ("TensorRT-LLM", "tensorrt-llm"),
    "wrapt": ("wrapt", "wrapt"),
    "python": ("Python",),
    "executable": ("",),
    "flashinfer_wsfix": ("flashinfer-wsfix",),
}
CUDNN_WHEELS = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
NVIDIA_SMI = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
NVIDIA_SMI_SECONDS = 10  # a machine with eight GPUs may take some; after an Xid it may never answer
NOTHING = dict.fromkeys(ENVIRONMENT) | {"cudnn_asked": False, "cudnn_wheels": {}, "gpus": [], "gpus_unknown": None}


def parsed(version: str | None) -> tuple[int, ...]:
    """Return the first three numbers of a version, empty where it has none."""
    return tuple(map(int, re.findall(r"\d+", version or "")[:3]))


def _cudnn() -> dict[str, Any]:
    """Say which cuDNN FlashInfer gets: what the frontend loads counts, and the wheel's metadata only without one."""
    wheels = {wheel: version for wheel in CUDNN_WHEELS if (version := version_of(wheel)) is not None}
    found = {"cudnn": next(iter(wheels.values()), None), "cudnn_asked": False, "cudnn_wheels": wheels}
    has_frontend = find_spec("cudnn") is not None
    with suppress(NoAnswer):
        if has_frontend:
            found.update(cudnn=_version(python(CUDNN, seconds=60)), cudnn_asked=True)
        elif not wheels:
            found["cudnn"] = _version(python(LIBCUDNN))
    return found


def _version(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"  # 92301 for 9.23.1


def _gpus() -> dict[str, Any]:
    """List the GPUs that nvidia-smi tells of, or say why they are unknown: no answer is not "none"."""
    try:
        listed = run(NVIDIA_SMI, NVIDIA_SMI_SECONDS)
    except NoAnswer as why:
        return {"gpus": [], "gpus_unknown": None if why.missing else f"nvidia-smi: {why}"}
    rows = [line.split(", ") for line in listed.splitlines()]
    names = ("name", "capability", "driver")
    return {"gpus": [dict(zip(names, row, strict=True)) for row in rows if len(row) == 3], "gpus_unknown": None}


def read_environment() -> dict[str, Any]:
    """Read what ``--json`` prints as ``environment``."""
    found: dict[str, Any] = {key: version_of(*brought_by) for key, (_, *brought_by) in ENVIRONMENT.items()}
    found.update(python=platform.python_version(), executable=sys.executable, flashinfer_wsfix=__version__)
    return found | _cudnn() | _gpus()


def cudnn_versions(environment: dict[str, Any]) -> list[str]:
    """List the versions that FlashInfer may get: one where the frontend was asked, else that of each wheel."""
    wheels = environment["cudnn_wheels"].values()
    known = [environment["cudnn"]] if environment["cudnn_asked"] or not wheels else wheels
    return [version for version in known if parsed(version)]


def has_gpu(environment: dict[str, Any], major: str) -> bool | None:
    """Say whether a GPU of this major compute capability is here; None where no GPU is found that says its own."""
    majors = [gpu["capability"].split(".")[0] for gpu in environment["gpus"]]
    return major in majors if any(map(str.isdigit, majors)) else None
