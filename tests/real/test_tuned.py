"""What the real auto-tuner found survives the growth of a lane; the stock code loses it, silently."""

import contextlib
from unittest import mock

import pytest

import fakes
import gemms
import releases

MIB = 1 << 20
# FlashInfer's own buffer has 1 MiB here: the tuner fills its copies of it with random numbers.
OWN = MIB
FLAT = OWN + 256  # as cuDNN's cuBLASLt-backed plan asks for 256 bytes more than it has
ROWS = (1, 2)

pytestmark = pytest.mark.affected

# For each lane: its entry point, the first release that runs cuDNN there, and the last one where the size of the
# workspace is part of the tuner's keys.
LANES = {
    "bmm_fp8_workspace": (gemms.bmm_fp8, "0.6.12", "0.6.12"),
    "mm_bf16_workspace": (gemms.mm_bf16, "0.6.12", "0.6.18.post1"),
    "bmm_mxfp8_workspace": (gemms.bmm_mxfp8, "0.6.12", "0.6.12"),
    "mm_mxfp8_workspace": (gemms.mm_mxfp8, "0.6.13", "0.6.18.post1"),
    "mm_fp4_workspace": (gemms.mm_fp4, "0.6.12", "0.6.12"),
}


@pytest.fixture(params=LANES, ids=lambda name: name.removesuffix("_workspace"))
def lane(request, release):
    """A lane, its entry point, and whether this release's tuner looks at the size of its workspace."""
    gemm, first, last = LANES[request.param]
    order = releases.AFFECTED.index
    if order(release) < order(first):
        pytest.skip("no cuDNN here yet")
    return request.param, gemm, order(release) <= order(last)


@pytest.fixture
def tuned(lane, flashinfer, gemm_base, cudnn, monkeypatch):
    """Tune the lane for several sizes on SM100, where cuDNN wins; return what looks each of them up again."""
    gemm = lane[1]
    monkeypatch.setattr(gemm_base, "DEFAULT_WORKSPACE_SIZE", OWN)
    graph = fakes.Graph(OWN, cost=0.5, look=False)
    cudnn.make_graph = lambda: graph
    tuner = gemm_base.AutoTuner.get()

    def look_up():
        """Call the lane once for each size that was tuned; return which of them hit, and which plans cuDNN ran."""
        hits, graph.executions[:] = [], []
        real = tuner.search_cache

        def search_cache(*args, **kwargs):
            hits.append(real(*args, **kwargs)[0])
            return real(*args, **kwargs)

        with mock.patch.object(tuner, "search_cache", search_cache):
            for rows in ROWS:
                gemm(flashinfer, rows)
        return hits, [execution.plan for execution in graph.executions]

    with contextlib.ExitStack() as undo:
        undo.enter_context(fakes.capability(10, 0))
        undo.enter_context(fakes.stub_runners())
        with flashinfer.autotune(True):
            for rows in ROWS:
                gemm(flashinfer, rows)
        assert len(tuner.profiling_cache) >= len(ROWS)
        look_up.graph = graph
        yield look_up


def test_every_tuned_key_still_hits_after_growth(guard, tuned, lane, gemm_base):
    """Growing twice, to 40 MiB and beyond, leaves FlashInfer's own buffer and so the tuner's keys as they are."""
    name = lane[0]
    before = tuned()
    assert before[0] == [True, True]
    for size in (FLAT, 100 * MIB):
        tuned.graph.workspace_bytes = size
        assert tuned() == before
    [status] = [status for status in guard.status().lanes if status.name == name]
    assert (status.generation, status.nbytes) == (2, 100 * MIB)
    [own] = [buffer for key, buffer in gemm_base._get_cache_buf.__globals__["_cache_buf"].items() if key[0] == name]
    assert own.numel() == OWN


def test_stock_loses_them(gemm_base, guard, request, lane):
    """256 bytes more, and every tuned choice of a lane whose size the tuner looks at is forgotten: tactic -1."""
    guard.deactivate()
    tuned = request.getfixturevalue("tuned")
    assert tuned()[0] == [True, True]
    tuned.graph.workspace_bytes = FLAT
    tuned()
    hits, plans = tuned()
    assert hits == ([False, False] if lane[2] else [True, True])
    assert (plans == [-1, -1]) <= lane[2]
