"""What a process shows of itself that was activated, or not."""

import sys

GEMM, UTILS, LATE = ("flashinfer.gemm", "flashinfer.utils", "flashinfer.gemm.gemm_bf16_fp4_cudnn")
GEMM_BASE = "flashinfer.gemm.gemm_base"
SITE, GATE = "execute_cudnn_gemm_fp8_graph", "fp8_gemm_sm100"
RELEASES = ("0.6.12", "0.6.18.post1")


def state(target=0):
    import flashinfer_wsfix

    return flashinfer_wsfix.status().targets[target].state


def guards_on(name):
    """How many of our wrappers, of whichever copy of the package, lie over one another at the site."""
    value, count = vars(sys.modules[GEMM_BASE])[name], 0
    while value is not None:
        count += getattr(type(value), "is_wsfix_guard", False)
        value = getattr(value, "__wrapped__", None)
    return count


def assert_guarded(sites=8, lane="workspace"):
    """Every site has one guard, the gate and the cache have theirs, and a call runs on a generation of ours.

    Of one lane, unless its name has a {} for the site.
    """
    import flashinfer_wsfix
    import torch
    from flashinfer_wsfix import workspace

    import arguments
    import fakes

    status = flashinfer_wsfix.status()
    assert (status.targets[0].state, len(status.targets[0].sites)) == ("guarded", sites)
    assert [guards_on(site.function) for site in arguments.SITES[:8]] == [1] * 8
    assert guards_on(GATE) == guards_on("bf16_gemm_sm100") == 1
    assert type(sys.modules[UTILS]._cache_buf) is workspace.RetiringCache
    # A second import of a package binds no submodule that it finds.
    sys.modules["flashinfer"].utils = sys.modules[UTILS]
    with fakes.install(sys.modules["flashinfer"]):
        for site in arguments.SITES[:sites]:
            own = sys.modules[UTILS]._get_cache_buf(lane.format(site), 1 << 20, torch.device("cpu"))
            graph = fakes.Graph(2 << 20, look=False)
            arguments.call(site, graph, own)
            assert graph.last.numel == 40 << 20 and own.numel() == 1 << 20


def lines(said):
    """What was logged of activation: not the lines about lanes, which come of the calls that `assert_guarded` makes."""
    return [line for line in said.getvalue().splitlines() if "]: generation " not in line]


def assert_stock():
    import flashinfer_wsfix

    assert flashinfer_wsfix.status().targets[0].state == "disabled"
    assert guards_on(SITE) == guards_on(GATE) == 0
    assert type(sys.modules[UTILS]._cache_buf) is dict
