"""The four defects: what is wrong, in which host, and what ends it."""

from typing import NamedTuple

from ...sites import CUDNN_FIXED


class Defect(NamedTuple):
    """One defect, by the name that all pages use."""

    name: str
    host: str
    what: str
    fixed_by: str


DEFECTS = (
    Defect("D1", "flashinfer", "the workspace moves under captured CUDA graphs", "FlashInfer 0.7.0 (#4666)"),
    Defect("D2", "flashinfer", "the workspace does not start zeroed", "nothing upstream yet"),
    Defect(
        "D3",
        "flashinfer",
        "cuDNN's SM12x kernels read rewritten parameters when replayed",
        f"cuDNN backend {'.'.join(map(str, CUDNN_FIXED))}",
    ),
    Defect("D4", "vllm", "SM100Workspace moves under captured CUDA graphs", "nothing upstream yet"),
)
