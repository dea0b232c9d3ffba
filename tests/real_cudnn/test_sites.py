"""FlashInfer's own sites over real cuDNN plans: what becomes of their workspace, and what the frontend reads of it."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import builders
import cudnn
import flashinfer
import flashinfer_wsfix
import pytest
import torch
from backends import first_generation
from flashinfer_wsfix.sites import LANES
from gpus import GPUS

import arguments
import memory

STOCK = builders.gemm_base.DEFAULT_WORKSPACE_SIZE
SHAPE = builders.Shape(arguments.M, arguments.N, arguments.K)
LATE = builders.bf16_fp4.__name__

PRO_6000 = next(gpu for gpu in GPUS if gpu.name == "RTX PRO 6000")
# Those of the late module have no plan that is large enough: see test_plans.py.
SITES = [site for site in arguments.present() if site.kind != "bf16_fp4"]
if not builders.has_override_shape():
    SITES = [site for site in SITES if not site.function.endswith("override_shape")]


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashInfer as it comes, on a GPU of SM120, with nothing in its cache."""
    for variable in [name for name in os.environ if name.startswith("FLASHINFER_WSFIX")]:
        monkeypatch.delenv(variable)
    flashinfer_wsfix.deactivate()
    memory.forget_lanes()
    with builders.on(PRO_6000):
        yield
    flashinfer_wsfix.deactivate()


@pytest.fixture(params=["all that it does", "the sites alone"])
def guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package: with its defaults and the late module there, or with no gate and before that module is imported."""
    if request.param == "the sites alone":
        monkeypatch.setenv("FLASHINFER_WSFIX_GATE", "off")
        monkeypatch.delitem(sys.modules, LATE)
    flashinfer_wsfix.activate("test")
    (target,) = [target for target in flashinfer_wsfix.status().targets if target.name == "flashinfer"]
    assert target.state == "guarded"


class Watched:
    """A real graph that keeps address and size of each workspace that it is given to execute with.

    For other shapes than its own it would want a handle to say what it asks for: these are its own.
    """

    def __init__(self, built: Any) -> None:
        self.built = built
        self.given: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.built, name)

    def get_workspace_size(self, *override: Any) -> int:
        return int(self.built.get_workspace_size())

    def execute(self, variant_pack: Any, workspace: torch.Tensor, **keywords: Any) -> None:
        self.given.append((workspace.data_ptr(), workspace.numel()))
        self.built.execute(variant_pack, workspace, **keywords)


def graph(site: arguments.Site) -> Watched:
    """Build the graph of a site with its default plan."""
    builds = builders.OVERRIDE if site.function.endswith("override_shape") else builders.PLAIN
    return Watched(builds[site.kind](SHAPE, builders.DEFAULT))


def own_workspace(site: arguments.Site) -> torch.Tensor:
    """Fetch FlashInfer's workspace for a site, as its callers do."""
    name = next(lane for lane in LANES if lane.removeprefix("b") == f"mm_{site.kind}_workspace")
    buffer = flashinfer.utils._get_cache_buf(name, STOCK, builders.DEVICE)
    assert isinstance(buffer, torch.Tensor)
    return buffer


def call(site: arguments.Site, built: Watched, buffer: torch.Tensor) -> None:
    """Call the site. All goes well until its execute wants cuDNN's handle, which only a device has."""
    with pytest.raises(RuntimeError, match="handle"):
        arguments.call(site, built, buffer)


@pytest.mark.parametrize("site", SITES, ids=str)
def test_stock_moves_its_workspace_at_the_first_call(site: arguments.Site) -> None:
    built, buffer = graph(site), own_workspace(site)
    before = buffer.data_ptr()
    call(site, built, buffer)
    assert buffer.data_ptr() != before
    assert buffer.numel() == built.get_workspace_size() > STOCK
    assert built.given == [(buffer.data_ptr(), buffer.numel())]


@pytest.mark.usefixtures("guard")
@pytest.mark.parametrize("site", SITES, ids=str)
def test_guarded_it_stays_and_cudnn_gets_a_first_generation(site: arguments.Site) -> None:
    built, buffer = graph(site), own_workspace(site)
    before = buffer.data_ptr()
    for _ in range(2):
        call(site, built, buffer)
    assert (buffer.data_ptr(), buffer.numel()) == (before, STOCK)
    (lane,) = flashinfer_wsfix.status().lanes
    assert built.given == [(lane.address, lane.nbytes)] * 2
    assert built.get_workspace_size() <= lane.nbytes == first_generation()


def test_the_frontend_reads_an_armed_buffer_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `resize_` that is set on the one tensor, as the guard does, hides neither its address nor its size."""
    read = []
    original = (
        cudnn._pybind_module.read_buffer_extent
    )  # what `execute` reads its workspace with: the binding's own code

    def recorded(buffer: torch.Tensor) -> Any:
        read.append(original(buffer))
        return read[-1]

    monkeypatch.setattr(cudnn._pybind_module, "read_buffer_extent", recorded)
    site = SITES[0]
    built = graph(site)
    armed = torch.zeros(built.get_workspace_size(), dtype=torch.uint8)
    armed.resize_ = pytest.fail
    call(site, built, armed)
    assert read == built.given == [(armed.data_ptr(), armed.numel())]
