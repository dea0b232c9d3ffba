"""FlashInfer's own graph builders on real cuDNN, for a GPU that is not there.

Two things are set: `cudnn.pygraph` gets the GPU's properties where FlashInfer gives a handle, which only a device has,
and torch has no current stream to ask for. The import wants an environment of `backends.environment`.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

# Where it is installed, FlashInfer's import asks for a GPU.
sys.modules["cutlass"] = None  # type: ignore[assignment]

import cudnn  # noqa: E402
from gpus import Gpu  # noqa: E402

gemm_base: Any = importlib.import_module("flashinfer.gemm.gemm_base")
bf16_fp4: Any = importlib.import_module("flashinfer.gemm.gemm_bf16_fp4_cudnn")

DEVICE = torch.device("cpu")
ENGINE_0: tuple[int, tuple[()]] = (0, ())  # FlashInfer's tactic for one engine with its own choice of knobs
ALL = 0  # its tactic that builds every plan which cuDNN lists
DEFAULT = -1  # its tactic that builds the first of them which works
ROWS = 128  # block scales are padded to whole tiles of this many rows and four columns


class Shape(NamedTuple):
    """A GEMM: (batch, m, k) by (batch, k, n), B stored column by column."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def a(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        return (self.batch, self.m, self.k), (self.m * self.k, self.k, 1)

    @property
    def b(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        return (self.batch, self.k, self.n), (self.k * self.n, 1, self.k)

    def scales(self, block: int) -> tuple[Any, ...]:
        """Shape and stride of A's block scales, then of B's."""
        columns = -(-self.k // block // 4) * 4
        m, n = (-(-rows // ROWS) * ROWS for rows in (self.m, self.n))
        return (
            (self.batch, m, columns), (m * columns, columns, 1),
            (self.batch, columns, n), (columns * n, 1, columns),
        )  # fmt: skip


@functools.cache
def _properties(gpu: Gpu) -> Any:
    return cudnn.create_device_properties(gpu.properties())


@contextlib.contextmanager
def on(gpu: Gpu) -> Iterator[None]:
    """Let FlashInfer build its graphs for this GPU, all of them anew: its caches do not know of GPUs."""
    pygraph = cudnn.pygraph

    def described(**arguments: Any) -> Any:
        arguments.pop("handle")
        return pygraph(device_property=_properties(gpu), sm_version=gpu.sm, **arguments)

    forget()
    with (
        mock.patch.object(cudnn, "pygraph", described),
        mock.patch.object(torch.cuda, "current_stream", lambda device=None: None),
        mock.patch.object(gemm_base, "_get_cudnn_handle", lambda device, stream: None),
        mock.patch.object(bf16_fp4, "_get_cudnn_handle", lambda device, stream: None),
    ):
        yield
    forget()


def forget() -> None:
    """Drop the graphs that FlashInfer has built."""
    for module in (gemm_base, bf16_fp4):
        for name, function in vars(module).items():
            if name.startswith("build_cudnn") and hasattr(function, "cache_clear"):
                function.cache_clear()


def has_override_shape() -> bool:
    """Say whether FlashInfer takes its override-shape path on this backend."""
    return bool(gemm_base._is_cudnn_override_shape_available())


def _fp8(shape: Shape, tactic: Any) -> Any:
    types = cudnn.data_type
    a, b = shape.a, shape.b
    return gemm_base.build_cudnn_gemm_fp8_graph(
        *a, *b, types.FP8_E4M3, types.FP8_E4M3, types.BFLOAT16, DEVICE, tactic=tactic
    )


def _fp8_override(shape: Shape, tactic: Any) -> Any:
    types = cudnn.data_type
    return gemm_base.build_cudnn_gemm_fp8_graph_override_shape(
        shape.batch, shape.n, shape.k, types.FP8_E4M3, types.FP8_E4M3, types.BFLOAT16, DEVICE,
        cache_m=shape.m, tactic=tactic,
    )  # fmt: skip


def _bf16(shape: Shape, tactic: Any) -> Any:
    return gemm_base.build_cudnn_gemm_bf16_graph(
        *shape.a, *shape.b, cudnn.data_type.BFLOAT16, DEVICE, False, None, None, tactic=tactic
    )


def _bf16_override(shape: Shape, tactic: Any) -> Any:
    return gemm_base.build_cudnn_gemm_bf16_graph_override_shape(
        shape.batch, shape.n, shape.k, cudnn.data_type.BFLOAT16, DEVICE, False, cache_m=shape.m, tactic=tactic
    )


def _fp4(shape: Shape, tactic: Any, alpha: bool = True) -> Any:
    types = cudnn.data_type
    return gemm_base.build_cudnn_gemm_fp4_graph(
        *shape.a, *shape.b, *shape.scales(16), types.FP4_E2M1, types.BFLOAT16, 16, DEVICE, alpha, True, tactic=tactic
    )


def _fp4_override(shape: Shape, tactic: Any) -> Any:
    types = cudnn.data_type
    return gemm_base.build_cudnn_gemm_fp4_graph_override_shape(
        shape.batch, shape.n, shape.k, types.FP4_E2M1, types.BFLOAT16, 16, DEVICE, True, True,
        cache_m=shape.m, tactic=tactic,
    )  # fmt: skip


def _mxfp8(shape: Shape, tactic: Any) -> Any:
    types = cudnn.data_type
    (a, a_stride), (b, b_stride) = shape.a, shape.b
    return gemm_base.build_cudnn_gemm_mxfp8_graph(
        a, a_stride, types.FP8_E4M3, b, b_stride, types.FP8_E4M3, 32, types.BFLOAT16, DEVICE, tactic=tactic
    )


def _mxfp8_override(shape: Shape, tactic: Any) -> Any:
    types = cudnn.data_type
    return gemm_base.build_cudnn_gemm_mxfp8_graph_override_shape(
        shape.batch, shape.n, shape.k, types.FP8_E4M3, types.FP8_E4M3, types.BFLOAT16, 32, DEVICE,
        cache_m=shape.m, tactic=tactic,
    )  # fmt: skip


def _bf16_fp4(shape: Shape, tactic: Any) -> Any:
    types = cudnn.data_type
    return bf16_fp4.build_cudnn_bf16_fp4_graph(
        shape.batch, shape.m, shape.n, shape.k, types.BFLOAT16, types.BFLOAT16, 16, DEVICE, True, True, tactic=tactic
    )


def _bf16_fp4_override(shape: Shape, tactic: Any) -> Any:
    types = cudnn.data_type
    return bf16_fp4.build_cudnn_bf16_fp4_graph_override_shape(
        shape.batch, shape.n, shape.k, types.BFLOAT16, types.BFLOAT16, 16, DEVICE, True, True,
        cache_m=shape.m, tactic=tactic,
    )  # fmt: skip


# By the kind of their site, as `arguments.Site` names it.
PLAIN: dict[str, Callable[[Shape, Any], Any]] = {
    "fp8": _fp8,
    "bf16": _bf16,
    "fp4": _fp4,
    "mxfp8": _mxfp8,
    "bf16_fp4": _bf16_fp4,
}
OVERRIDE: dict[str, Callable[[Shape, Any], Any]] = {
    "fp8": _fp8_override,
    "bf16": _bf16_override,
    "fp4": _fp4_override,
    "mxfp8": _mxfp8_override,
    "bf16_fp4": _bf16_fp4_override,
}
CUBLASLT = ("fp8", "bf16", "fp4", "mxfp8")  # what engine 0, which stands on cuBLASLt, can do
fp4_without_alpha = functools.partial(_fp4, alpha=False)


class Plan(NamedTuple):
    """What a plan is called by cuDNN (its engine, then its knobs), and the bytes of workspace that it asks for."""

    name: str
    nbytes: int

    @property
    def engine(self) -> str:
        return self.name.partition("_")[0]


def plans(graph: Any) -> list[Plan]:
    """List the plans of a graph that was built with ALL; those that could not be built for its GPU are left out."""
    listed = []
    for index in range(graph.get_execution_plan_count()):
        with contextlib.suppress(RuntimeError):
            nbytes = graph.get_workspace_size_plan_at_index(index)
            listed.append(Plan(graph.get_plan_name_at_index(index), nbytes))
    return listed
