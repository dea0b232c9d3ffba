"""Observing, errors of ours, and what is guarded, on FlashInfer's real code."""

import collections
import contextlib
import importlib.util
import sys
import types

import pytest
import torch
from flashinfer_wsfix import workspace

import arguments
import fakes
from calls import CPU, MORE, NAME, OWN, SMALL, call, own, wrong_calls_fail_as_in_stock

# `test_presize.py` has what holds on the other releases.
pytestmark = [pytest.mark.affected, pytest.mark.usefixtures("guard")]
VARIABLES = SMALL


# --- observing, and errors of ours ------------------------------------------------------------------------------------


@pytest.fixture
def observing(guard, monkeypatch, caplog):
    monkeypatch.setenv("FLASHINFER_WSFIX", "observe")
    guard.activate()
    caplog.clear()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_observing_logs_each_move_and_changes_nothing(site, style, captured, observing, caplog):
    tensor = own()
    old = tensor.data_ptr()
    assert call(site, OWN, tensor, style=style).workspace is tensor
    assert caplog.messages == []
    with fakes.capturing() if captured else contextlib.nullcontext():
        assert call(site, MORE, tensor, style=style, look=False).workspace is tensor
    [record] = caplog.records
    assert record.levelname == "WARNING"
    moved = f"{NAME} on cpu, {OWN} bytes at {old:#x} -> {MORE} bytes at {tensor.data_ptr():#x}"
    assert f"MOVED by FlashInfer: lane {moved}, capturing {'yes' if captured else 'no'}," in record.getMessage()
    assert workspace.lanes() == ()


def test_observing_wraps_the_sites_and_looks_at_the_cache(guard, gemm_base, sites, observing, caplog):
    from flashinfer_wsfix import guards

    assert guard.status().targets[0].state == "observing"
    assert all(guards.is_guarded(site.live()) for site in sites)
    assert not guards.is_guarded(gemm_base.fp8_gemm_sm100)
    tensor, larger = own(), own(nbytes=3 * OWN)
    assert (larger is tensor, own(nbytes=3 * OWN) is larger, "resize_" in vars(larger)) == (False, True, False)
    [record] = caplog.records
    assert f"MOVED by FlashInfer: lane {NAME} on cpu, {OWN} bytes at" in record.getMessage()
    assert (guard.status().displaced_buffers, workspace.RetiringCache.retired) == (0, [])


def test_observing_names_what_is_in_no_cache_scratch(fp8, observing, caplog):
    call(fp8, MORE, torch.zeros(256, dtype=torch.uint8), look=False)
    assert "lane scratch on cpu, 256 bytes" in caplog.text


def test_observing_lets_a_wrong_call_and_an_exception_of_the_site_be(fp8, observing, caplog):
    wrong_calls_fail_as_in_stock(fp8)
    error = ValueError("plan")
    with pytest.raises(ValueError) as caught:
        arguments.call(fp8, fakes.Graph(MORE, error=error, look=False), own())
    assert (caught.value, error.__context__) == (error, None)
    assert "MOVED by FlashInfer" in caplog.text


def fail(*unused):
    raise LookupError("ours")


def test_an_error_of_ours_while_observing_hides_where_it_was_and_no_more(fp8, observing, caplog, monkeypatch):
    monkeypatch.setattr(workspace, "cache_key", fail)
    assert call(fp8, MORE, own(), look=False).numel == MORE
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the log of a workspace that moved ran UNGUARDED" in caplog.text and "LookupError: ours" in caplog.text


@pytest.mark.parametrize("style", ["positional", "keyword"])
@pytest.mark.parametrize("place", ["lane_of", "buffer_for"])
def test_where_we_fail_flashinfers_own_code_runs_and_that_is_said_once(site, style, place, guard, caplog, monkeypatch):
    """Once per call, on the caller's own tensor; status() shows it, and STRICT raises it."""
    monkeypatch.setattr(workspace if place == "lane_of" else workspace.Lane, place, fail)
    tensor = own(late=True)
    for size in (1000, OWN):
        execution = call(site, size, tensor, style=style)
        assert (execution.workspace is tensor, execution.numel) == (True, OWN)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a cuDNN GEMM ran UNGUARDED" in caplog.text and "LookupError: ours" in caplog.text
    status = guard.status()
    assert status.unguarded_calls == 2
    assert "; but a cuDNN GEMM ran UNGUARDED" in status.targets[0].reason
    assert "LookupError: ours" in status.targets[0].reason
    monkeypatch.setenv("FLASHINFER_WSFIX_STRICT", "1")
    with pytest.raises(LookupError, match="ours"):
        call(site, OWN, tensor, style=style)


def test_what_a_guard_runs_is_not_compiled_where_torch_compile_is_in_use(monkeypatch):
    from flashinfer_wsfix import guards

    monkeypatch.setitem(sys.modules, "torch._dynamo", types.SimpleNamespace(disable=lambda function: [function]))
    assert guards.uncompiled(fail) == [fail]
    half = types.SimpleNamespace(__spec__=types.SimpleNamespace(_initializing=True), disable=fail)
    for incomplete in (half, types.ModuleType("torch._dynamo")):  # while another thread imports it
        monkeypatch.setitem(sys.modules, "torch._dynamo", incomplete)
        assert guards.uncompiled(fail) is fail
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert guards.uncompiled(fail) is fail


# --- what is guarded --------------------------------------------------------------------------------------------------


def test_a_second_activation_puts_nothing_around_a_guard(guard, gemm_base, sites):
    def guarded():
        return [*(site.live() for site in sites), gemm_base.fp8_gemm_sm100, gemm_base.bf16_gemm_sm100]

    before, cache = guarded(), sys.modules["flashinfer.utils"]._cache_buf
    guard.activate()
    assert all(one is other for one, other in zip(before, guarded(), strict=True))
    assert {type(function.__wrapped__) for function in before} == {types.FunctionType}
    assert sys.modules["flashinfer.utils"]._cache_buf is cache


def test_a_cache_that_is_no_plain_dictionary_leaves_all_as_it_is(guard, sites, monkeypatch):
    from flashinfer_wsfix import guards

    guard.deactivate()
    monkeypatch.setattr(sys.modules["flashinfer.utils"], "_cache_buf", collections.OrderedDict())
    guard.activate()
    [verdict] = [target for target in guard.status().targets if target.name == "flashinfer"]
    assert (verdict.state, "keeps its workspaces in a way" in verdict.reason) == ("unsupported", True)
    assert not any(guards.is_guarded(site.live()) for site in sites)


def test_a_cache_that_could_not_be_replaced_keeps_what_came_meanwhile(guard, monkeypatch):
    """What FlashInfer puts into its own dictionary while our setting fails is still there."""
    from flashinfer_wsfix import patching

    def fail_at_the_cache(owner, name, value):
        if name == "_cache_buf":
            cache["late", CPU] = torch.zeros(8)
            raise LookupError("ours")
        setattr(owner, name, value)

    guard.deactivate()
    cache = sys.modules["flashinfer.utils"]._cache_buf
    monkeypatch.setattr(patching, "setattr", fail_at_the_cache, raising=False)
    guard.activate()
    assert (guard.status().targets[0].state, [*cache]) == ("failed", [("late", CPU)])


def test_the_verdict_names_the_version_where_flashinfer_does(guard, flashinfer, release, monkeypatch):
    assert f" sites of FlashInfer {release} " in guard.status().targets[0].reason
    monkeypatch.delattr(flashinfer, "__version__")
    guard.activate()
    assert " sites of FlashInfer of unknown version " in guard.status().targets[0].reason


def test_a_module_that_is_only_made_ready_is_not_loaded_by_our_reading(guard, monkeypatch):
    """importlib.util.LazyLoader executes it at the first look into it; its own turn comes then."""
    spec = importlib.util.find_spec(arguments.BF16_FP4)
    if spec is None:
        pytest.skip("this release has no such module")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, arguments.BF16_FP4, lazy)
    guard.activate()
    assert type(lazy) is not types.ModuleType
    assert guard.status().targets[0].state == "guarded"
