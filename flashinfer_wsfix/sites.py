"""The one table: what is guarded, why, and when it can go. Code, doctor, tests and README all read it."""

from typing import NamedTuple

from .hook import CUTLASS_MLA, GEMM_BASE, GEMM_BF16_FP4, KERNEL_WARMUP


class Site(NamedTuple):
    """A FlashInfer function that may grow a workspace, and its parameter that receives the workspace."""

    module: str
    function: str
    parameter: str


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


SITES = (
    Site(GEMM_BASE, "execute_cudnn_gemm_fp4_graph", "workspace_buffer"),
    Site(GEMM_BASE, "execute_cudnn_gemm_fp4_graph_override_shape", "workspace"),
    Site(GEMM_BASE, "execute_cudnn_gemm_mxfp8_graph", "workspace_buffer"),
    Site(GEMM_BASE, "execute_cudnn_gemm_mxfp8_graph_override_shape", "workspace"),
    Site(GEMM_BASE, "execute_cudnn_gemm_fp8_graph", "workspace"),
    Site(GEMM_BASE, "execute_cudnn_gemm_fp8_graph_override_shape", "workspace"),
    Site(GEMM_BASE, "execute_cudnn_gemm_bf16_graph", "workspace"),
    Site(GEMM_BASE, "execute_cudnn_gemm_bf16_graph_override_shape", "workspace"),
    Site(GEMM_BF16_FP4, "execute_cudnn_bf16_fp4_graph", "workspace_buffer"),
    Site(GEMM_BF16_FP4, "execute_cudnn_bf16_fp4_graph_override_shape", "workspace_buffer"),
)

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
        "cuDNN backend 9.23.1",
    ),
    Defect("D4", "vllm", "SM100Workspace moves under captured CUDA graphs", "nothing upstream yet"),
)
