"""What a call of a site does, and what it costs: points 9 and 12 of the contract, on FlashInfer's real code."""

import contextlib
import inspect
import sys
import threading
from unittest import mock

import pytest
import torch
from flashinfer_wsfix import allocation
from torch.utils._python_dispatch import TorchDispatchMode

import arguments
import fakes
from calls import FIRST, MIB, MORE, SMALL, call, lane, own, same, wrong_calls_fail_as_in_stock

# `test_presize.py` has what holds on the other releases.
pytestmark = [pytest.mark.affected, pytest.mark.usefixtures("guard")]
VARIABLES = SMALL


# --- 9: one execute per call ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tactic", [None, 2])
@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_9_a_plan_runs_once_with_what_the_caller_gave(site, style, tactic, gemm_base):
    """But for the workspace, cuDNN gets what it would get from the stock site: first use, ordinary use, growth."""
    inputs, tensor = arguments.tensors(site), own()
    stock = fakes.Graph(0)
    with mock.patch.object(arguments, "tensors", lambda site: inputs):
        with mock.patch.object(sys.modules[site.module], site.function, inspect.unwrap(site.live())):
            arguments.call(site, stock, tensor, style, tactic)
        for size in (1000, 1000, FIRST + 256):
            graph = fakes.Graph(size)
            arguments.call(site, graph, tensor, style, tactic)
            [execution] = graph.executions
            assert (execution.kind, execution.plan) == (stock.last.kind, stock.last.plan)
            assert execution.kwargs == stock.last.kwargs
            assert execution.variant_pack.keys() == stock.last.variant_pack.keys()
            for uid, given in execution.variant_pack.items():
                expected = stock.last.variant_pack[uid]
                assert given is expected or same(given, expected)


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [ValueError("plan"), torch.OutOfMemoryError("plan"), Interrupt(), SystemExit(3)], ids=repr
)
@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_9_an_exception_of_the_site_comes_out_unchanged(site, style, error):
    """From the execute or the size query, on first use, ordinary use and growth: it, with no context of ours."""

    def refuse(plan):
        raise error

    tensor = own()
    for size in (1000, 1000, FIRST + 256, refuse):
        graph = fakes.Graph(size, error=error, look=False)
        error.__traceback__ = None
        with pytest.raises(type(error)) as caught:
            arguments.call(site, graph, tensor, style)
        assert caught.value is error
        assert (error.__context__, error.__cause__) == (None, None)
        assert len(graph.executions) == (size is not refuse)


def test_9_a_wrong_call_fails_as_in_stock(site):
    wrong_calls_fail_as_in_stock(site)


RUNNERS = {"fp8": "_cudnn_gemm_fp8_runner", "bf16": "_cudnn_gemm_bf16_runner", "mxfp8": "_cudnn_gemm_mxfp8_runner"}


@pytest.mark.parametrize("backend", [92000, 92301], ids=["fixed-shape", "override-shape"])
@pytest.mark.parametrize("kind", RUNNERS)
def test_9_the_runners_never_retry_because_of_us(kind, backend, gemm_base, cudnn, sites):
    """A real runner's forward() executes once, on first use and while the lane grows; its retry would warn."""
    cudnn.backend = backend
    inputs = arguments.tensors(next(site for site in sites if site.kind == kind))
    if kind == "bf16":
        inputs.insert(3, None)
    tensor = own()
    for size in (MORE, FIRST + 256, 5 * MIB):
        graph = fakes.Graph(size)
        cudnn.make_graph = lambda graph=graph: graph
        fakes.forget()
        getattr(gemm_base, RUNNERS[kind])().forward([*inputs, tensor])
        assert len(graph.executions) == 1
        assert graph.last.zeroed


def test_9_what_a_site_is_handed_says_how_large_it_is_with_an_integer(site):
    """At every question that the plan's size is compared with: a site that formats it in a log line must not fail."""
    seen = []

    def size(plan):
        frame = sys._getframe()
        while not {"workspace", "workspace_buffer"} & frame.f_locals.keys():
            frame = frame.f_back
        handed = frame.f_locals.get("workspace", frame.f_locals.get("workspace_buffer"))
        seen.append(f"{handed.numel():,d} bytes")
        return FIRST + 256

    arguments.call(site, fakes.Graph(size, look=False), own())
    assert f"{FIRST:,d} bytes" in seen and f"{2 * FIRST:,d} bytes" in seen


def test_9_an_overflow_is_no_exception():
    """So no `except Exception` between a site and its guard can take it for a failed tactic."""
    assert not issubclass(allocation.Overflow, Exception)


# --- 12: no cost after warm-up ----------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts what this thread asks of torch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_12_a_thousand_calls_after_warm_up_do_what_stock_does(site, captured):
    """No memset, no allocation, no thread: torch is asked for what stock asks for; so a graph holds nothing of ours."""
    tensor, graph = own(), fakes.Graph(MORE, look=False)
    full = [graph, *arguments.tensors(site)]
    guarded, stock = site.live(), inspect.unwrap(site.live())
    guarded(*full, tensor)
    with fakes.capturing() if captured else contextlib.nullcontext():
        with Operations() as expected:
            stock(*full, lane().current)
        with (
            Operations() as done,
            mock.patch.object(torch, "zeros") as zeros,
            mock.patch.object(torch, "empty") as empty,
            mock.patch.object(threading, "Thread") as thread,
        ):
            for _ in range(1000):
                guarded(*full, tensor)
    assert done.names == 1000 * expected.names
    assert (zeros.called, empty.called, thread.called) == (False, False, False)
    assert {execution.data_ptr for execution in graph.executions} == {lane().current.data_ptr()}


def test_12_what_is_passed_is_exactly_a_tensor(site):
    """Of class torch.Tensor itself: generations, FlashInfer's own buffer, call-local ones and scratch."""
    tensor = own()
    with fakes.capturing():
        passed = [call(site, size, tensor, look=False) for size in (MIB, MORE)]
    passed += [call(site, size, tensor, look=False) for size in (MORE, FIRST + 256)]
    passed += [call(site, MORE, torch.zeros(256, dtype=torch.uint8), look=False)]
    assert {type(execution.workspace) for execution in passed} == {torch.Tensor}
    assert {(execution.workspace.dtype, execution.workspace.dim()) for execution in passed} == {(torch.uint8, 1)}
