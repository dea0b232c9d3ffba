"""On a GPU: real CUDA graphs, streams and memory pools, and FlashInfer's real cuDNN GEMMs. One command: pytest -m gpu.

With the installed FlashInfer, an affected one. Where a plan has to ask for a chosen size, a stand-in takes the place of
cuDNN's graph object and launches real kernels on the workspace.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch

import memory
from arguments import GEMM_BASE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),  # FlashInfer's and torch's own, which depend on the device
]

DEVICE = torch.device("cuda", 0)
LANE = "bmm_fp8_workspace"
CAPTURED, LARGER = 32 << 20, 64 << 20  # bytes; FlashInfer's own workspace has 32 MiB
FIRST = 40 << 20  # bytes of a first generation
SENTINEL = 0xA5


class Gemm:
    """A stand-in for cuDNN's graph object, called through FlashInfer's fp8 site. It adds 1 to each byte asked for."""

    def __init__(self, device: torch.device) -> None:
        self.gemm_base, utils = import_module(GEMM_BASE), import_module("flashinfer.utils")
        self.own = utils._get_cache_buf(LANE, self.gemm_base.DEFAULT_WORKSPACE_SIZE, device)
        self.matrix = torch.zeros(1, 1, 1, device=device)
        self.largest = torch.zeros((), dtype=torch.uint8, device=device)  # byte that the last execute came upon
        self.asked = CAPTURED
        self.execute(None, torch.zeros(CAPTURED, dtype=torch.uint8, device=device), None)  # loads the kernels

    def get_execution_plan_count(self) -> int:
        return 1

    def get_workspace_size(self) -> int:
        return self.asked

    def execute(self, variant_pack: object, workspace: torch.Tensor, handle: object) -> None:
        self.address = workspace.data_ptr()
        self.largest.copy_(workspace[: self.asked].max())
        workspace[: self.asked].add_(1)

    def call(self, asked: int) -> int:
        """Run a plan that asks for so many bytes; the address of its workspace."""
        self.asked = asked
        self.gemm_base.execute_cudnn_gemm_fp8_graph(self, *[self.matrix] * 5, self.own)
        return self.address

    def found(self) -> int:
        torch.cuda.synchronize()
        return int(self.largest)


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def sentinels() -> list[torch.Tensor]:
    """Tensors of another owner, as large as the block that the stock code frees."""
    return [torch.full((CAPTURED,), SENTINEL, dtype=torch.uint8, device=DEVICE) for _ in range(4)]


def unharmed(tensors: list[torch.Tensor]) -> bool:
    torch.cuda.synchronize()
    return all(bool((tensor == SENTINEL).all()) for tensor in tensors)


@pytest.fixture
def wsfix(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package, active on the installed FlashInfer: default settings, no lane, counters at zero."""
    if pytestconfig.getoption("--flashinfer"):
        pytest.skip("--flashinfer puts a fake in place of cuDNN")
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    import_module(GEMM_BASE)
    import flashinfer_wsfix

    for variable in [name for name in os.environ if name.startswith("FLASHINFER_WSFIX")]:
        monkeypatch.delenv(variable)
    flashinfer_wsfix.deactivate()
    flashinfer_wsfix.activate("test")
    verdict = flashinfer_wsfix.status().targets[0]
    if verdict.state in ("not-needed", "not-affected"):
        pytest.skip(verdict.reason)
    assert verdict.state == "guarded", verdict.reason
    memory.forget_lanes()
    torch.cuda.empty_cache()
    yield flashinfer_wsfix
    torch.cuda.synchronize()
    flashinfer_wsfix.deactivate()
    memory.forget_lanes()


@pytest.fixture
def gemm(wsfix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Gemm:
    monkeypatch.setattr(import_module(GEMM_BASE), "_get_cudnn_handle", lambda device, stream: None)
    return Gemm(DEVICE)


@pytest.fixture
def workspace(wsfix: ModuleType) -> ModuleType:
    return import_module("flashinfer_wsfix.workspace")


def test_a_graph_captured_before_growth_replays_on_its_own_memory(gemm: Gemm, workspace: ModuleType) -> None:
    addresses = [gemm.call(CAPTURED)]
    graph = captured(lambda: addresses.append(gemm.call(CAPTURED)))
    addresses += [gemm.call(CAPTURED + 256), gemm.call(LARGER)]
    first, second = workspace.lanes()[0].generations
    assert addresses == [first.data_ptr()] * 3 + [second.data_ptr()]
    others, before, after = sentinels(), first.clone(), second.clone()
    graph.replay()
    assert unharmed(others)
    assert torch.equal(first[:CAPTURED], before[:CAPTURED] + 1)
    assert torch.equal(first[CAPTURED:], before[CAPTURED:])
    assert torch.equal(second, after)


def test_stock_moves_it_and_harms_another_owner(wsfix: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo takes these steps in two processes, stock and guarded, with a real graph where there is a GPU."""
    code = import_module("flashinfer_wsfix.cli.demo").run(True)
    told = json.loads(capsys.readouterr().out)
    assert told["device"] == "cuda:0", told
    assert any(step.get("moved") for step in told["children"]["stock"]["steps"]), told
    assert code == 0, told


def test_overflow_under_capture_publishes_nothing(wsfix: ModuleType, gemm: Gemm, workspace: ModuleType) -> None:
    address = gemm.call(CAPTURED)
    (first,) = workspace.lanes()[0].generations
    before = first.clone()
    graph = captured(lambda: gemm.call(LARGER))
    assert gemm.address != address
    others = sentinels()
    for _ in range(2):
        gemm.largest.fill_(SENTINEL)
        graph.replay()
        assert gemm.found() == 0, "the graph's own buffer is zeroed at each replay"
    assert unharmed(others)
    assert torch.equal(first, before)
    assert wsfix.status().capture_overflows == 1
    assert len(workspace.lanes()[0].generations) == 1
    assert gemm.call(CAPTURED) == address


def test_a_lane_first_used_under_capture_runs_on_flashinfers_own_zeroed_buffer(gemm: Gemm) -> None:
    graph = captured(lambda: gemm.call(CAPTURED))
    assert gemm.address == gemm.own.data_ptr()
    assert not gemm.own.any()
    gemm.call(LARGER)
    others = sentinels()
    graph.replay()
    assert unharmed(others)
    assert bool((gemm.own == 1).all())


@pytest.mark.parametrize("presized", [False, True])
def test_a_generation_is_zeroed_on_whatever_stream_it_is_first_seen(
    wsfix: ModuleType, gemm: Gemm, monkeypatch: pytest.MonkeyPatch, presized: bool
) -> None:
    """Its zero-fill is held up for half a second; the stream that sees it first waits for nothing by itself."""
    zeros, delayed = torch.zeros, []

    def zeros_that_take_their_time(*args: object, **kwargs: object) -> torch.Tensor:
        made = zeros(*args, **kwargs)
        if made.numel() > FIRST:
            made.fill_(SENTINEL)
            torch.cuda._sleep(1_000_000_000)
            delayed.append(made.zero_())
        return made

    monkeypatch.setattr(torch, "zeros", zeros_that_take_their_time)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    if presized:
        wsfix.presize(DEVICE, LARGER, [LANE])
    with torch.cuda.stream(side):
        gemm.call(LARGER)
    assert [made.data_ptr() for made in delayed] == [gemm.address], "no fill was held up, so this would show nothing"
    assert gemm.found() == 0


def test_growth_inside_and_outside_inference_mode(gemm: Gemm, workspace: ModuleType) -> None:
    with torch.inference_mode():
        gemm.call(CAPTURED)
    gemm.call(LARGER)
    with torch.inference_mode():
        gemm.call(4 * LARGER)
    gemm.call(CAPTURED)
    assert [buffer.is_inference() for buffer in workspace.lanes()[0].generations] == [False] * 3


def test_no_generation_is_in_the_callers_memory_pool(gemm: Gemm, workspace: ModuleType) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        gemm.call(CAPTURED)
        gemm.call(LARGER)
        theirs = torch.empty(CAPTURED, dtype=torch.uint8, device=DEVICE)
    segments = [range(one["address"], one["address"] + one["total_size"]) for one in pool.snapshot()]
    assert any(theirs.data_ptr() in segment for segment in segments)
    first, second = workspace.lanes()[0].generations
    assert not any(buffer.data_ptr() in segment for buffer in (first, second) for segment in segments)
    del theirs  # before its pool


MODES = ("thread_local", "global")  # the last one may break, after which nothing more is asked of that process


def grow_while_another_thread_captures() -> None:
    """In a process of its own, since a broken capture leaves torch's streams and allocator in disorder."""
    import_module(GEMM_BASE)._get_cudnn_handle = lambda device, stream: None  # type: ignore[attr-defined]
    gemm = Gemm(DEVICE)
    gemm.call(CAPTURED)
    for turn, mode in enumerate(MODES):
        counter = torch.ones((), device=DEVICE)
        told = {"mode": mode, "capture": "well", "growth": "well"}

        def grow(asked: int = LARGER << turn, told: dict[str, str] = told) -> None:
            try:
                gemm.call(asked)
            except Exception as error:
                told["growth"] = repr(error)

        graph, thread = torch.cuda.CUDAGraph(), threading.Thread(target=grow)
        try:
            with torch.cuda.graph(graph, capture_error_mode=mode):
                counter.add_(1)
                thread.start()
                thread.join()
                counter.add_(1)
            graph.replay()
            told["replayed"] = str(int(counter))
        except Exception as error:
            told["capture"] = repr(error)
        print(json.dumps(told), flush=True)


def test_growth_while_another_thread_captures(wsfix: ModuleType) -> None:
    """Both go well in each mode, also in "global", torch's default, where stock's growth ends the capture."""
    told = {}
    for switch in ("0", "1"):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FLASHINFER_WSFIX": switch}
        done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
        told[switch] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert told[switch], f"ended with {done.returncode}: {done.stderr}"
    stock, guarded = told["0"], told["1"]
    assert guarded == [{"mode": mode, "capture": "well", "growth": "well", "replayed": "3"} for mode in MODES], stock


def test_each_device_has_its_own_lane(gemm: Gemm, workspace: ModuleType) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is only one CUDA device")
    other = Gemm(torch.device("cuda", 1))
    gemm.call(CAPTURED)
    other.call(CAPTURED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
        other.call(CAPTURED)
    other.call(LARGER)
    assert torch.cuda.current_device() == 0
    here, there = workspace.lanes()
    assert [buffer.device.index for buffer in (*here.generations, *there.generations)] == [0, 1, 1]
    before = there.generations[0][:CAPTURED].clone()
    with torch.cuda.device(1):
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(there.generations[0][:CAPTURED], before + 1)


def test_after_warm_up_nothing_is_allocated_and_a_replay_zeroes_nothing(gemm: Gemm) -> None:
    asked = CAPTURED // 32
    gemm.call(asked)
    graph = captured(lambda: gemm.call(asked))
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        gemm.call(asked)
    for calls in (1001, 1002):  # that each byte has seen; the capture itself ran nothing
        graph.replay()
        assert gemm.found() == calls % 256
    assert torch.cuda.memory_allocated() == before


def test_presize(wsfix: ModuleType, workspace: ModuleType) -> None:
    """Each lane gets a first generation, and FlashInfer's own buffer its stock size; all of it zeroed."""
    wsfix.presize()
    assert not workspace.lanes()
    wsfix.presize(DEVICE)
    own = import_module("flashinfer.utils")._cache_buf
    assert [lane.name for lane in workspace.lanes()] == list(workspace.LANES)
    for lane in workspace.lanes():
        (first,) = lane.generations
        assert (first.device, first.numel(), bool(first.any())) == (DEVICE, FIRST, False)
        stock = own[lane.name, DEVICE]
        assert (stock.numel(), bool(stock.any())) == (import_module(GEMM_BASE).DEFAULT_WORKSPACE_SIZE, False)


@pytest.mark.parametrize("data_type", ["fp8", "bf16"])
def test_cudnns_own_results_are_those_of_stock(wsfix: ModuleType, workspace: ModuleType, data_type: str) -> None:
    flashinfer, gemm_base = import_module("flashinfer"), import_module(GEMM_BASE)
    major, minor = torch.cuda.get_device_capability(DEVICE)
    function = flashinfer.bmm_fp8 if data_type == "fp8" else flashinfer.mm_bf16
    if not gemm_base.CUDNN_AVAILABLE or not function.is_backend_supported("cudnn", 10 * major + minor):
        pytest.skip(f"FlashInfer has no cuDNN GEMM for {data_type} here")
    if major == 12 and gemm_base.cudnn.backend_version() < 92301:
        pytest.skip("before 9.23.1, cuDNN's own SM12x kernels cannot be replayed from a graph")
    a, b = (torch.randn(1, rows, 512, device=DEVICE) for rows in (64, 256))
    one = torch.ones(1, device=DEVICE)
    if data_type == "fp8":
        arguments = (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).mT, one, one, torch.bfloat16)
    else:
        arguments = (a[0].bfloat16(), b[0].bfloat16().t())

    def run() -> torch.Tensor:
        return function(*arguments, backend="cudnn")

    wsfix.deactivate()
    stock = run()
    wsfix.activate("test")
    assert torch.equal(run(), stock)
    (lane,) = workspace.lanes()
    replayed: list[torch.Tensor] = []
    graph = captured(lambda: replayed.append(run()))
    lane.grow(lane.current.numel() + 1)
    others = sentinels()
    for _ in range(2):
        replayed[0].zero_()
        graph.replay()
        assert unharmed(others)
        assert torch.equal(replayed[0], stock)


def test_the_gate_is_closed_on_sm12x_alone(wsfix: ModuleType) -> None:
    gate = import_module("flashinfer_wsfix.guards").gate("fp8", 1, "a")
    arguments = (torch.zeros(1, device=DEVICE), ["cublas", "cudnn"])
    left = gate(lambda a, runner_names: runner_names, None, arguments, {})
    sm12x = torch.cuda.get_device_capability(DEVICE)[0] == 12
    assert left == (["cublas"] if sm12x else ["cublas", "cudnn"])
    assert wsfix.status().gated_calls == int(sm12x)


if __name__ == "__main__":
    import_module("flashinfer_wsfix")
    grow_while_another_thread_captures()
