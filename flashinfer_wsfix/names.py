"""The hosts' modules that matter here, by name. Imports nothing."""

GEMM = "flashinfer.gemm"
GEMM_BASE = "flashinfer.gemm.gemm_base"
UTILS = "flashinfer.utils"
AUTOTUNER = "flashinfer.autotuner"
CUTLASS_MLA = "vllm.v1.attention.backends.mla.cutlass_mla"
KERNEL_WARMUP = "vllm.model_executor.warmup.kernel_warmup"

# The modules of FlashInfer that hold sites. A new one is a row here; which of its functions are sites is read from it.
SITE_MODULES = (GEMM_BASE, "flashinfer.gemm.gemm_bf16_fp4_cudnn")

# Module that was executed -> the host that has to be looked at again.
WATCHED = {
    **dict.fromkeys((GEMM, UTILS, *SITE_MODULES), "flashinfer"),
    **dict.fromkeys((CUTLASS_MLA, KERNEL_WARMUP), "vllm"),
}
