"""Captures: growth beside another thread's, growth within one's own, and graphs that share a pool."""

import threading

import gemm
import pytest
import torch
from children import Ended, guarded, stock
from gemm import MIB, Gemm, captured

WELL = {"growth": "well", "capture": "well", "replayed": 5}


def growth_while_another_thread_captures(mode: str, cached: bool) -> dict[str, object]:
    """Let a thread grow a lane. `cached`: the allocator has a block for it, so that nothing is asked of the driver."""
    plan = Gemm()
    plan.call(32)
    counter = torch.ones((), device="cuda")
    counter.add_(1)
    # Let go of while the other thread captures: a capture begins by emptying the allocator's cache.
    spare = [torch.empty(80 * MIB, dtype=torch.uint8, device="cuda")] * cached
    torch.cuda.synchronize()
    told: dict[str, object] = {}

    def grow() -> None:
        spare.clear()
        try:
            plan.call(64)
            told["growth"] = "well"
        except Exception as error:
            told["growth"] = str(error).splitlines()[0]

    graph, thread = torch.cuda.CUDAGraph(), threading.Thread(target=grow)
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            counter.add_(1)
            thread.start()
            thread.join()
            counter.add_(2)
        graph.replay()
        told["capture"] = "well"
        told["replayed"] = int(counter)
    except Exception as error:
        told["capture"] = str(error).splitlines()[0]
    return told


@pytest.mark.parametrize("segments", ["False", "True"])
@pytest.mark.parametrize("cached", [False, True], ids=["nothing-cached", "block-cached"])
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_growth_while_another_thread_captures(mode: str, cached: bool, segments: str) -> None:
    """The growth and the capture both go well, also where stock's own growth ends a capture of mode global."""

    def question() -> dict[str, object]:
        return growth_while_another_thread_captures(mode, cached)

    settings = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{segments}"}
    of_stock = stock(question, **settings)
    if mode != "global" or cached:
        assert of_stock == WELL
    for unsafe in ("0", "1"):
        assert guarded(question, FAKECUDA_UNSAFE_SYNC=unsafe, **settings) == WELL, f"stock {of_stock}"


def test_stocks_growth_ends_a_capture_of_mode_global() -> None:
    told = stock(lambda: growth_while_another_thread_captures("global", False))
    assert "not permitted when stream is capturing" in told["growth"]
    assert "previous error during capture" in told["capture"]


def test_two_graphs_that_overflow_in_one_pool() -> None:
    """Each has a zeroed buffer of its own at every replay, and neither harms other memory."""

    def question() -> list[object]:
        plan = Gemm()
        plan.call(32)
        pool, graphs, found = torch.cuda.graph_pool_handle(), [], []
        for mib in (64, 96):
            graphs.append(captured(lambda mib=mib: (plan.call(mib), found.append(plan.largest.clone())), pool=pool))
        others = [gemm.sentinel(32) for _ in range(6)]
        seen = []
        for which in (0, 1, 0, 1, 1, 0):
            graphs[which].replay()
            torch.cuda.synchronize()
            seen += found[which].tolist()
        return [seen, gemm.unharmed(others), gemm.generations()]

    with pytest.raises(Ended):
        stock(question)
    assert guarded(question) == [[0] * 12, True, [40]]
