"""Memory: what harms stock, what is kept, what it costs, where it runs out, and on which device it is."""

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
import warnings

import gemm
import pytest
import torch
from children import Ended, guarded, stock
from gemm import DIRT, MIB, Gemm, captured

ILLEGAL = "illegal memory access"


def replay_after_growth() -> None:
    plan = Gemm()
    plan.call(32)
    graph = captured(lambda: plan.call(32))
    plan.call(64)
    torch.cuda.empty_cache()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("segments", ["False", "True"])
def test_after_empty_cache_a_replay_of_stock_is_an_illegal_access(segments: str) -> None:
    settings = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{segments}"}
    with pytest.raises(Ended, match=ILLEGAL):
        stock(replay_after_growth, **settings)
    guarded(replay_after_growth, **settings)


def test_the_memory_of_no_call_is_handed_out_again() -> None:
    """Other tensors fill the device to the last byte, and none lies where a call had its workspace."""

    def question() -> int:
        plan, spans = Gemm(), []
        for mib in (32, 41, 90, 200):
            address = plan.call(mib)
            spans.append((address, address + mib * MIB))
        others: list[torch.Tensor] = []
        for nbytes in (32 * MIB, 2 * MIB, MIB, 512):
            while True:
                try:
                    others.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        assert torch.cuda.mem_get_info()[0] == 0
        ends = [(other.data_ptr(), other.data_ptr() + other.numel()) for other in others]
        return sum(a < end and start < b for start, end in ends for a, b in spans)

    settings = {"FAKECUDA_MIB": 640, "FAKECUDA_REUSE": 1}
    assert stock(question, **settings) > 0
    assert guarded(question, **settings) == 0


@pytest.mark.parametrize("segments", ["False", "True"])
def test_a_lane_costs_8_mib_over_stock(segments: str) -> None:
    """As upstream's own fix: a first generation of 40 MiB, whose first 32 MiB are FlashInfer's own buffer."""

    def question() -> int:
        before, plan = torch.cuda.memory_allocated(), Gemm()
        for _ in range(2):
            plan.call(32)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before

    settings = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{segments}"}
    assert guarded(question, **settings) - stock(question, **settings) == 8 * MIB


def test_deactivate_frees_nothing_that_a_graph_holds() -> None:
    def question() -> None:
        import flashinfer_wsfix

        plan = Gemm()
        plan.call(32)
        first = captured(lambda: plan.call(32))
        flashinfer_wsfix.deactivate()
        second = captured(lambda: plan.call(32))
        plan.call(64)
        torch.cuda.empty_cache()
        first.replay()
        torch.cuda.synchronize()
        flashinfer_wsfix.activate("test")
        plan.call(64)
        second.replay()
        torch.cuda.synchronize()

    guarded(question)


def test_the_tuners_scratch_is_zeroed_and_freed_with_it() -> None:
    """A workspace that is not in FlashInfer's cache, such as the tuner's clone."""

    def question() -> list[int]:
        plan = Gemm()
        plan.call(32)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        plan.own = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        plan.call(64)
        found = plan.found()
        plan.own = None
        torch.cuda.synchronize()
        return [found, torch.cuda.memory_allocated() - before]

    assert stock(question) == [DIRT, 0]
    assert guarded(question) == [0, 0]


def test_a_lane_whose_first_call_is_captured_is_zeroed() -> None:
    def question() -> int:
        plan = Gemm()
        graph = captured(lambda: plan.call(32))
        graph.replay()
        return plan.found()

    assert stock(question) == DIRT
    assert guarded(question) == 0


def test_a_lane_that_is_born_under_capture_is_zeroed_and_no_others() -> None:
    """Its buffer lives in that graph's pool: what is done outside gets memory of its own."""

    def question() -> list[object]:
        born: list[Gemm] = []
        matrix = torch.zeros(9, device="cuda")

        def call() -> None:
            matrix.add_(1)
            born.append(Gemm())
            born[0].call(32)

        graph = captured(call)
        inside = [born[0].own.data_ptr(), born[0].address]
        graph.replay()
        first, outside = born[0].found(), Gemm()
        return [first, *(a == b for a, b in zip(inside, (outside.own.data_ptr(), outside.call(32)), strict=True))]

    assert stock(question) == [DIRT, True, True]
    assert guarded(question) == [0, False, False]


def growth_while_a_stream_is_held_up(held_up: str) -> dict[str, object]:
    """Grow, and use the new memory at once on a stream that waits for nothing; tell how long it took, too."""
    plan = Gemm()
    plan.call(32)
    torch.cuda.synchronize()
    streams = {"default": torch.cuda.default_stream(), "callers": torch.cuda.Stream()}
    let_go, let_go_in_time, other = threading.Event(), [], torch.cuda.Stream()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def wait(_: object) -> None:
        let_go_in_time.append(let_go.wait(10))

    ctypes.CDLL("libcudart.so.13").cudaLaunchHostFunc(ctypes.c_void_p(streams[held_up].cuda_stream), wait, None)
    start = time.perf_counter()
    with torch.cuda.stream(streams["callers"]):
        plan.call(64)
    with torch.cuda.stream(other):
        plan.call(64)
        other.synchronize()
    seconds = time.perf_counter() - start
    found = max(largest.item() for largest in plan.largest) if held_up == "callers" else 0
    let_go.set()
    torch.cuda.synchronize()
    return {"waited for it": not let_go_in_time[0], "found": found, "seconds": seconds}


@pytest.mark.parametrize("held_up", ["default", "callers"])
def test_growth_waits_for_nothing_else_on_the_device(held_up: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither for the default stream nor for the caller's own; and what it hands out is zeroed by then."""
    of_stock, of_guard = (ask(lambda: growth_while_a_stream_is_held_up(held_up)) for ask in (stock, guarded))
    with capsys.disabled():
        took = [f"{which} {told.pop('seconds'):.2f} s" for which, told in (("stock", of_stock), ("guarded", of_guard))]
        print(f" growth while the {held_up} stream is held up: {', '.join(took)} ", end="")
    assert not of_stock["waited for it"]
    assert of_guard == {"waited for it": False, "found": 0}


def test_growth_in_a_process_that_forbids_synchronization() -> None:
    def question() -> list[int]:
        plan = Gemm()
        warnings.simplefilter("ignore")  # of torch's own: that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        for mib in (32, 64):
            plan.call(mib)
        torch.cuda.set_sync_debug_mode("default")
        return [plan.found(), *gemm.generations()]

    assert guarded(question) == [0, 40, 80]


@pytest.mark.skipif(os.environ.get("FAKECUDA_DEVICES") == "1", reason="there is one device")
def test_no_context_on_a_device_that_is_not_used() -> None:
    def question() -> list[object]:
        import flashinfer_wsfix

        torch.cuda.set_device(1)
        plan = Gemm("cuda:1")
        plan.call(32)
        graph = captured(lambda: plan.call(32))
        plan.call(64)
        graph.replay()
        torch.cuda.synchronize()
        flashinfer_wsfix.presize("cuda:1")
        contexts = [torch._C._cuda_hasPrimaryContext(device) for device in (0, 1)]
        return [*contexts, torch.cuda.current_device()]

    assert stock(question) == guarded(question) == [False, True, 1]


def calls(*sizes: int) -> list[int]:
    plan = Gemm()
    for mib in sizes:
        plan.call(mib)
    torch.cuda.synchronize()
    return [plan.found()]


def test_a_lane_that_cannot_double_fails_no_call_that_stock_can_make() -> None:
    """On 120 MiB, twice 40 MiB do not fit, and in the end nor do 60 beside what is kept."""
    stock(lambda: calls(32, 41, 60, 32), FAKECUDA_MIB=120)
    guarded(lambda: calls(32, 41, 60, 32), FAKECUDA_MIB=120)


def test_where_stock_runs_out_of_memory_so_does_the_guard_in_the_same_words() -> None:
    for ask in (stock, guarded):
        with pytest.raises(Ended, match="OutOfMemoryError: CUDA out of memory"):
            ask(lambda: calls(32, 200), FAKECUDA_MIB=120)


def test_growth_gets_what_the_allocator_only_caches() -> None:
    def question() -> None:
        plan = Gemm()
        plan.call(32)
        torch.cuda.synchronize()
        blocks = [torch.empty(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        del blocks
        plan.call(50)

    stock(question, FAKECUDA_MIB=190)
    guarded(question, FAKECUDA_MIB=190)


def retries_of_20_calls(mib: int) -> tuple[int, list[int]]:
    """Count how often the allocator let go of all that it caches and tried anew, with 56 MiB left on the device.

    Returns the sizes of the lane's generations, too.
    """
    plan = Gemm()
    plan.call(32)
    torch.cuda.empty_cache()
    other = torch.empty(torch.cuda.mem_get_info()[0] - 56 * MIB, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    for _ in range(20):
        with contextlib.suppress(torch.OutOfMemoryError):
            plan.call(mib)
    assert other.is_cuda
    return torch.cuda.memory_stats()["num_alloc_retries"] - before, gemm.generations()


def test_scratch_goes_back_to_the_callers_memory() -> None:
    """What a tensor that is no lane's is given is no generation later, and calls with new ones pile nothing up."""

    def question() -> tuple[int, bool]:
        plan = Gemm()
        plan.call(32)
        before, places = torch.cuda.memory_reserved(), set()
        for _ in range(20):
            plan.own = torch.empty(MIB, dtype=torch.uint8, device="cuda")
            places.add(plan.call(30))
        del plan.own
        grown = torch.cuda.memory_reserved() - before
        torch.cuda.synchronize()
        utils = sys.modules["flashinfer.utils"]
        born = utils._get_cache_buf("mm_fp4_workspace", 32 * MIB, torch.device("cuda:0"))
        return grown // MIB, born.data_ptr() in places

    grown, taken = guarded(question)
    assert (grown <= 2 * 40 + 2, taken) == (True, False)


def test_a_growth_that_failed_is_not_tried_at_each_call() -> None:
    """What was asked for is published where twice does not fit; where it does not, each call asks for it once."""
    retries, sizes = guarded(lambda: retries_of_20_calls(48), FAKECUDA_MIB=400)
    assert (retries <= 4, sizes) == (True, [40, 48])
    retries, sizes = guarded(lambda: retries_of_20_calls(70), FAKECUDA_MIB=400)
    assert (retries <= 20 + 4, sizes) == (True, [40])


def test_a_growth_that_failed_keeps_nothing_alive() -> None:
    """No frame of the host's, and so none of its activations, until the garbage is collected."""

    def question() -> int:
        plan = Gemm()
        plan.call(32)
        gc.disable()

        def host(mib: int) -> int:
            activations = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
            with contextlib.suppress(torch.OutOfMemoryError):
                plan.call(mib)
            return activations.numel()

        before = torch.cuda.memory_allocated()
        for _ in range(3):
            host(100)
        return torch.cuda.memory_allocated() - before

    assert guarded(question, FAKECUDA_MIB=120) == 0
