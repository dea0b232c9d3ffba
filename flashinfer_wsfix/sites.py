"""The one table of what is guarded, and how it is known. Code, doctor, tests and README all read it."""

from .names import CUTLASS_MLA, GEMM_BASE, KERNEL_WARMUP

# What the known sites call the parameter that receives their workspace.
PARAMETERS = ("workspace", "workspace_buffer")

# The workspaces that sites share, by their names in FlashInfer's ``_cache_buf``, and the gate that closes each.
LANES = {
    "bmm_fp8_workspace": "fp8",
    "mm_bf16_workspace": "bf16",
    "bmm_bf16_workspace": None,  # the gate cannot close it: on SM12x cuDNN is all that bmm_bf16 has
    "mm_fp4_workspace": None,
    "mm_mxfp8_workspace": None,
    "bmm_mxfp8_workspace": None,
    "mm_bf16_fp4_workspace": None,
}

# By gate: the function that hands a list of runner names to the auto-tuner, all of them as the same parameter.
GATES = {"fp8": (GEMM_BASE, "fp8_gemm_sm100"), "bf16": (GEMM_BASE, "bf16_gemm_sm100")}
RUNNERS = "runner_names"
CUDNN_FIXED = (9, 23, 1)  # the first backend without D3

# vLLM's half: the method that moves the buffer, and the function that runs before the first capture.
SM100_WORKSPACE = (CUTLASS_MLA, "SM100Workspace", "ensure_size", "_workspace_buf")
WARMUP = (KERNEL_WARMUP, "kernel_warmup", "worker")
