"""The one table: what is guarded, why, and when it can go. Code, doctor, tests and README all read it."""

from typing import NamedTuple

from .names import CUTLASS_MLA, GEMM_BASE, KERNEL_WARMUP


class Lane(NamedTuple):
    """A workspace that sites share, by its name in FlashInfer's ``_cache_buf``, and the gate that closes it."""

    name: str
    gate: str | None


class Gate(NamedTuple):
    """A FlashInfer function that hands a list of runner names to the auto-tuner."""

    name: str
    module: str
    function: str
    parameter: str


class Defect(NamedTuple):
    """What is wrong, in which host, and what ends it."""

    name: str
    host: str
    what: str
    fixed_by: str


# What the known sites call the parameter that receives their workspace.
PARAMETERS = ("workspace", "workspace_buffer")

LANES = (
    Lane("bmm_fp8_workspace", "fp8"),
    Lane("mm_bf16_workspace", "bf16"),
    Lane("bmm_bf16_workspace", None),  # the gate cannot close it: on SM12x cuDNN is all that bmm_bf16 has
    Lane("mm_fp4_workspace", None),
    Lane("mm_mxfp8_workspace", None),
    Lane("bmm_mxfp8_workspace", None),
    Lane("mm_bf16_fp4_workspace", None),
)

GATES = (
    Gate("fp8", GEMM_BASE, "fp8_gemm_sm100", "runner_names"),
    Gate("bf16", GEMM_BASE, "bf16_gemm_sm100", "runner_names"),
)
CUDNN_FIXED = (9, 23, 1)  # the first backend without D3

# vLLM's half: the method that moves the buffer, and the function that runs before the first capture.
SM100_WORKSPACE = (CUTLASS_MLA, "SM100Workspace", "ensure_size", "_workspace_buf")
WARMUP = (KERNEL_WARMUP, "kernel_warmup", "worker")

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
