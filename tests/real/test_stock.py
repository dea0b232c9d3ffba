"""The ground is right: without the guard, the affected releases move their workspace and the others do not."""

import inspect
import sys

import flashinfer_wsfix
import pytest
import torch

import arguments
import fakes
import gemms
import releases

MIB_32 = 32 << 20
FLAT = MIB_32 + 256  # what cuDNN's cuBLASLt-backed plan asks for


@pytest.fixture(autouse=True)
def stock(gemm_base):
    """FlashInfer as it was released, also where the guard was active before."""
    flashinfer_wsfix.deactivate()


def growing(name: str) -> set[str]:
    """The functions of a module that resize something."""
    functions = {name: inspect.unwrap(value) for name, value in vars(sys.modules[name]).items() if callable(value)}
    codes = {name: value.__code__ for name, value in functions.items() if inspect.isfunction(value)}
    return {name for name, code in codes.items() if "resize_" in code.co_names}


def test_the_sites_are_those_of_the_table(sites, release):
    """8 sites up to 0.6.13, 10 up to 0.6.18.post1, none before and after; no other function resizes anything."""
    count = 8 if release in releases.EIGHT_SITES else 10 if release in releases.TEN_SITES else 0
    modules = {site.module for site in sites}
    assert set().union(*map(growing, modules)) == {site.function for site in arguments.SITES[:count]}


def test_parameter_and_position(site, release):
    """The workspace is where the table says; before 0.6.12 two were named otherwise."""
    names = list(inspect.signature(site.live()).parameters)
    assert names[site.position] in ("workspace", "workspace_buffer")
    assert names[site.position] == site.parameter or release not in releases.AFFECTED


@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_a_fitting_workspace_reaches_cudnn_as_it_is(site, style):
    """A site runs its plan once, on the tensor that it was given."""
    graph, workspace = fakes.Graph(MIB_32), torch.zeros(MIB_32, dtype=torch.uint8)
    arguments.call(site, graph, workspace, style)
    [execution] = graph.executions
    assert execution.workspace is workspace
    assert execution.zeroed
    assert (execution.plan < 0) == (execution.kind == "execute")


def test_256_bytes_more_move_the_workspace(site, release):
    """32 MiB, then 32 MiB + 256 B: the affected releases move the caller's tensor, the others leave it alone."""
    graph, workspace = fakes.Graph(MIB_32, look=False), torch.zeros(MIB_32, dtype=torch.uint8)
    arguments.call(site, graph, workspace)
    before = graph.last.data_ptr
    graph.workspace_bytes = FLAT
    arguments.call(site, graph, workspace)
    assert graph.last.data_ptr != before
    moved = release in releases.AFFECTED
    assert (graph.last.workspace is workspace) == moved
    assert (workspace.data_ptr() != before) == moved
    assert workspace.numel() == (FLAT if moved else MIB_32)


@pytest.mark.affected  # only their dispatch is needed
@pytest.mark.parametrize("cudnn_ms, cudnn_wins", [(0.5, True), (2.0, False)], ids=["cudnn", "other"])
@pytest.mark.parametrize("capability", [(10, 0), (12, 0)], ids=["sm100", "sm120"])
@pytest.mark.parametrize("gemm", [gemms.bmm_fp8, gemms.mm_bf16], ids=["fp8", "bf16"])
def test_the_tuner_times_the_runners_and_takes_the_fastest(
    gemm, capability, cudnn_ms, cudnn_wins, flashinfer, gemm_base, cudnn, monkeypatch
):
    """The real dispatch and the real AutoTuner run on the fakes, and tuning finds what is cheaper there: one row of A
    makes a single profile.
    """
    monkeypatch.setattr(gemm_base, "DEFAULT_WORKSPACE_SIZE", 1 << 20)  # the tuner fills its copies with random numbers
    graph = fakes.Graph(1 << 20, cost=cudnn_ms, look=False)
    cudnn.make_graph = lambda: graph
    with fakes.capability(*capability), fakes.stub_runners() as kernels:
        with flashinfer.autotune(True):
            gemm(flashinfer)
        graph.executions.clear()
        kernels.launches.clear()
        gemm(flashinfer)
    assert (len(graph.executions), len(kernels.launches)) == ((1, 0) if cudnn_wins else (0, 1))
