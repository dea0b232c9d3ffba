"""FlashInfer's own entry points above the sites, called with small valid CPU arguments."""

import types

import torch

N, K = 128, 256


def _fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape).to(torch.float8_e4m3fn)


def _swizzled(rows: int) -> torch.Tensor:
    """Block scales of `rows` rows, in whole tiles of 128 rows and 4 scales."""
    return torch.zeros(-(-rows // 128) * 128 * (K // 32), dtype=torch.uint8)


def bmm_fp8(flashinfer: types.ModuleType, rows: int = 1, backend: str = "auto") -> None:
    scale = torch.ones(1)
    flashinfer.bmm_fp8(_fp8(1, rows, K), _fp8(1, N, K).mT, scale, scale, torch.bfloat16, backend=backend)


def mm_bf16(flashinfer: types.ModuleType, rows: int = 1, backend: str = "auto") -> None:
    """On SM10x with fp16 results: for bf16 ones, 0.6.18 wants nvidia-cutlass-dsl there."""
    a, b = (torch.zeros(size, K, dtype=torch.bfloat16) for size in (rows, N))
    out_dtype = torch.float16 if torch.cuda.get_device_capability()[0] == 10 else torch.bfloat16
    flashinfer.mm_bf16(a, b.t(), out_dtype=out_dtype, backend=backend)


def bmm_bf16(flashinfer: types.ModuleType, rows: int = 1, backend: str = "auto") -> None:
    """With fp16 results: for bf16 ones, some releases want nvidia-cutlass-dsl."""
    a, b = (torch.zeros(1, size, K, dtype=torch.bfloat16) for size in (rows, N))
    flashinfer.bmm_bf16(a, b.mT, out_dtype=torch.float16, backend=backend)


def bmm_mxfp8(flashinfer: types.ModuleType, rows: int = 1, backend: str = "cudnn") -> None:
    a, b = _fp8(1, rows, K), _fp8(1, N, K).mT
    flashinfer.bmm_mxfp8(a, b, _swizzled(rows), _swizzled(N), torch.bfloat16, backend=backend)


def mm_mxfp8(flashinfer: types.ModuleType, rows: int = 1, backend: str = "cudnn") -> None:
    """With cuDNN from 0.6.13 on."""
    flashinfer.mm_mxfp8(_fp8(rows, K), _fp8(N, K).t(), _swizzled(rows), _swizzled(N), backend=backend)


def mm_fp4(flashinfer: types.ModuleType, rows: int = 1, backend: str = "cudnn") -> None:
    a, b = (torch.zeros(size, K // 2, dtype=torch.uint8) for size in (rows, N))
    a_scales, b_scales = (_fp8(-(-size // 128) * 128, K // 16) for size in (rows, N))
    flashinfer.mm_fp4(a, b.t(), a_scales, b_scales.t(), torch.ones(1), torch.bfloat16, backend=backend)
