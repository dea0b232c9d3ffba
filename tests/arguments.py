"""FlashInfer's sites, as read from its releases, and valid CPU arguments for each of them."""

import importlib.util
import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch

import fakes

GEMM_BASE = "flashinfer.gemm.gemm_base"
BF16_FP4 = "flashinfer.gemm.gemm_bf16_fp4_cudnn"


@dataclass(frozen=True)
class Site:
    """A FlashInfer function that may grow a workspace, and where its workspace is among its parameters."""

    module: str
    function: str
    parameter: str
    position: int
    bias: bool = False  # call it with a bias

    def __str__(self) -> str:
        name = self.function.removeprefix("execute_cudnn_").replace("gemm_", "").replace("_graph", "")
        return name + "_bias" * self.bias

    @property
    def kind(self) -> str:
        """The data type that the function is for: what its arguments depend on."""
        return self.function.removeprefix("execute_cudnn_").removeprefix("gemm_").partition("_graph")[0]

    def live(self) -> Any:
        """Look the function up, as FlashInfer does at each call: guarded or not."""
        return getattr(importlib.import_module(self.module), self.function)


SITES = (
    Site(GEMM_BASE, "execute_cudnn_gemm_fp4_graph", "workspace_buffer", 7),
    Site(GEMM_BASE, "execute_cudnn_gemm_fp4_graph_override_shape", "workspace", 7),
    Site(GEMM_BASE, "execute_cudnn_gemm_mxfp8_graph", "workspace_buffer", 6),
    Site(GEMM_BASE, "execute_cudnn_gemm_mxfp8_graph_override_shape", "workspace", 6),
    Site(GEMM_BASE, "execute_cudnn_gemm_fp8_graph", "workspace", 6),
    Site(GEMM_BASE, "execute_cudnn_gemm_fp8_graph_override_shape", "workspace", 6),
    Site(GEMM_BASE, "execute_cudnn_gemm_bf16_graph", "workspace", 5),
    Site(GEMM_BASE, "execute_cudnn_gemm_bf16_graph_override_shape", "workspace", 5),
    Site(BF16_FP4, "execute_cudnn_bf16_fp4_graph", "workspace_buffer", 6),  # from 0.6.14 on
    Site(BF16_FP4, "execute_cudnn_bf16_fp4_graph_override_shape", "workspace_buffer", 6),
)
# Up to 0.6.11.post3 the fp8 functions had other names.
OLDER = (
    Site(GEMM_BASE, "execute_cudnn_gemm_with_per_tensor_q_graph", "workspace", 6),
    Site(GEMM_BASE, "execute_cudnn_gemm_with_per_tensor_q_graph_override_shape", "workspace", 6),
)


def present() -> list[Site]:
    """The functions of this table that the imported FlashInfer has; those of 0.6.11 and 0.7 are no sites."""
    rows = [site for site in (*SITES, *OLDER) if importlib.util.find_spec(site.module)]
    return [site for site in rows if hasattr(importlib.import_module(site.module), site.function)]


def with_bias(sites: list[Site]) -> list[Site]:
    """The sites, and those for bf16 once more with a bias."""
    return sites + [replace(site, bias=True) for site in sites if site.kind == "bf16"]


M, N, K = 16, 32, 64


def tensors(site: Site) -> list[torch.Tensor | None]:
    """The arguments between the graph and the workspace; B is column-major, as FlashInfer wants it."""
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    out = torch.zeros(M, N, dtype=bf16)
    alpha = torch.ones(1)
    scale = torch.ones(1, 1, 1)
    if site.kind == "fp4":  # two values in a byte
        a, b = torch.zeros(M, K // 2, dtype=torch.uint8), torch.zeros(N, K // 2, dtype=torch.uint8).t()
        return [a, b, torch.zeros(128, 4).to(fp8), torch.zeros(128, 4).to(fp8).t(), alpha, out]
    if site.kind == "bf16_fp4":
        b = torch.zeros(N, K // 2, dtype=torch.uint8)
        return [torch.zeros(M, K, dtype=bf16), b, torch.zeros(N, K // 16).to(fp8), alpha, out]
    if site.kind == "bf16":
        bias = torch.zeros(N, dtype=bf16) if site.bias else None
        return [torch.zeros(M, K, dtype=bf16), torch.zeros(N, K, dtype=bf16).t(), bias, out]
    a, b = torch.zeros(1, M, K).to(fp8), torch.zeros(1, N, K).to(fp8).transpose(-2, -1)
    if site.kind == "mxfp8":
        scale = torch.zeros(128 * 4, dtype=torch.uint8)
    return [a, b, scale, scale.clone(), out[None]]


def call(
    site: Site, graph: fakes.Graph, workspace: torch.Tensor, style: str = "positional", tactic: int | None = None
) -> None:
    """Call the site as it stands now: all by position, or all by keyword, as FlashInfer's mxfp8 runner does."""
    function = site.live()
    arguments = [graph, *tensors(site), workspace]
    if tactic is not None:
        arguments.append(tactic)
    if style == "positional":
        function(*arguments)
    else:
        function(**dict(zip(inspect.signature(function).parameters, arguments, strict=False)))
