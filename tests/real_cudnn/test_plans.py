"""What real cuDNN's plans ask for, on FlashInfer's own graphs."""

import os

import builders
import cudnn
import pytest
from backends import NAMED, VERSIONS, first_generation
from builders import Shape
from gpus import GPUS, Gpu

MIB = 1 << 20
STOCK = builders.gemm_base.DEFAULT_WORKSPACE_SIZE
FLAT = {True: 32 * MIB + 256, False: 4 * MIB + 256}  # engine 0's, on SM90 and newer and before
ALPHA = 4  # bytes more: fp4's alpha

# Decoding one token, a prefill, a batch of small ones, and a vocabulary: engine 0 asks the same for each.
SHAPES = (Shape(1, 4096, 4096), Shape(16384, 28672, 8192), Shape(128, 4096, 4096, batch=16), Shape(8, 151936, 4096))
SWEEP = (*SHAPES, Shape(16, 2048, 2048), Shape(256, 14336, 4096), Shape(1024, 4096, 14336), Shape(4096, 8192, 8192))
# The newest cuDNN compiles each plan that it builds, for a second or so: there, one shape on two GPUs.
NEWEST = os.environ[NAMED] == VERSIONS[-1]
SWEPT_GPUS = [gpu for gpu in GPUS if gpu.name in ("B200", "RTX PRO 6000")] if NEWEST else GPUS
SWEPT_KINDS = ("fp8", "fp4") if NEWEST else tuple(builders.PLAIN)
SWEPT_SHAPES = SWEEP[4:5] if NEWEST else SWEEP


def flat(gpu: Gpu, kind: str) -> int:
    return FLAT[gpu.sm >= 90] + ALPHA * (kind == "fp4")


@pytest.mark.parametrize("kind", builders.CUBLASLT)
@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_engine_0_asks_for_a_flat_size_whatever_the_shape(gpu: Gpu, kind: str) -> None:
    """33,554,688 B on SM90, SM100, SM103, SM120, SM121, and 4 MiB + 256 B on SM80, SM89; with fp4's alpha 4 B more."""
    with builders.on(gpu):
        asked = {builders.PLAIN[kind](shape, builders.ENGINE_0).get_workspace_size() for shape in SHAPES}
    assert asked == {flat(gpu, kind)}


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_without_alpha_fp4_asks_for_what_the_others_do(gpu: Gpu) -> None:
    with builders.on(gpu):
        graph = builders.fp4_without_alpha(SHAPES[0], builders.ENGINE_0)
    assert graph.get_workspace_size() == FLAT[gpu.sm >= 90]


@pytest.mark.parametrize("kind", builders.CUBLASLT)
@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu.sm >= 90], ids=str)
def test_the_default_plan_is_engine_0(gpu: Gpu, kind: str) -> None:
    """So from SM90 on the first call of an untuned GEMM asks for more than the 32 MiB that FlashInfer has."""
    build = (builders.OVERRIDE if builders.has_override_shape() else builders.PLAIN)[kind]
    with builders.on(gpu):
        asked = {build(shape, builders.DEFAULT).get_workspace_size() for shape in SHAPES}
    assert asked == {flat(gpu, kind)}
    assert STOCK < flat(gpu, kind) <= first_generation()


@pytest.mark.parametrize("gpu", SWEPT_GPUS, ids=str)
def test_no_plan_asks_for_more_than_a_first_generation(gpu: Gpu) -> None:
    """And of those that ask for more than stock has, each is engine 0."""
    with builders.on(gpu):
        listed = [
            plan
            for kind in SWEPT_KINDS
            for shape in SWEPT_SHAPES
            for plan in builders.plans(builders.PLAIN[kind](shape, builders.ALL))
        ]
    assert max(plan.nbytes for plan in listed) <= first_generation()
    assert {plan.engine for plan in listed if plan.nbytes > STOCK} == ({"eng0"} if gpu.sm >= 90 else set())
    assert {"eng0", "eng7"} <= {plan.engine for plan in listed}, "what needs a compiler was not built"


def test_bf16_by_fp4_has_no_engine_0() -> None:
    """cuDNN's own no: the cuBLASLt under it takes all. What the late module's sites are asked for fits into 32 MiB."""
    with builders.on(GPUS[-1]), pytest.raises(cudnn.cudnnGraphNotSupportedError):
        builders.PLAIN["bf16_fp4"](SHAPES[0], builders.ENGINE_0)
