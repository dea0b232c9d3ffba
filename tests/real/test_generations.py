"""Generations: zeroed, made in time, growing, also where memory is short: points 2, 5 and 6 of the contract."""

import contextlib
import copy
import gc
import pickle
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from flashinfer_wsfix import allocation, workspace

import arguments
import fakes
from calls import CPU, FIRST, MIB, MORE, NAME, OWN, SMALL, call, lane, own, same

# `test_presize.py` has what holds on the other releases.
pytestmark = [pytest.mark.affected, pytest.mark.usefixtures("guard")]
VARIABLES = SMALL


# --- 2: always zeroed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_2_every_buffer_is_zeroed_at_first_sight(site, style, dirty_memory):
    """Generations, call-local buffers and scratch, whatever the last kernel left behind and was freed since."""
    tensor, scratch = own(), torch.full((256,), 7, dtype=torch.uint8)
    assert call(site, MIB, tensor, style=style, write=7).zeroed
    assert not call(site, MIB, tensor, style=style).zeroed  # left-overs are the next kernel's to deal with, as in stock
    assert call(site, 3 * MIB, tensor, style=style, write=7).zeroed
    with fakes.capturing():
        assert call(site, 5 * MIB, tensor, style=style, write=7).zeroed
        assert call(site, 5 * MIB, tensor, style=style).zeroed
    with fakes.out_of_memory(0):
        assert call(site, 5 * MIB, tensor, style=style).zeroed
    assert call(site, MIB, scratch, style=style, write=7).zeroed


def test_2_the_first_call_of_a_lane_may_be_a_captured_one(site, dirty_memory):
    """What FlashInfer made with torch.empty was zeroed before anybody got it."""
    tensor = sys.modules["flashinfer.utils"]._get_cache_buf(NAME, OWN, CPU)
    assert not tensor.any()
    with fakes.capturing():
        assert call(site, OWN, tensor).zeroed


def test_2_the_zero_fill_has_finished_before_a_generation_is_published(fp8):
    """While the zeros are made, nobody can see them; another thread then gets all of them."""
    seen = []
    zeros = torch.zeros

    def watched(*args, **kwargs):
        if "device" in kwargs:
            seen.append((lane().current is None, list(lane().generations)))
        return zeros(*args, **kwargs)

    with mock.patch.object(torch, "zeros", watched):
        call(fp8, MORE, own(late=True))
    assert seen == [(True, [])]


# --- 5: the first generation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize(
    "mebibytes, asked, made",
    [
        (None, 0, [40]),
        (None, 32 * MIB + 256, [40]),  # what cuDNN's cuBLASLt-backed plan asks for
        (None, 64 * MIB, [40, 80]),
        (None, 80 * MIB + 1, [40, 82]),
        ("96", 1000, [96]),
        ("3", 1000, [4]),
    ],
)
def test_5_generation_1_is_there_with_flashinfers_buffer(mebibytes, asked, made, late, guard, fp8, monkeypatch):
    """40 MiB, or what the setting says, in steps of 2 MiB; with the first call where the buffer was there before us."""
    monkeypatch.setenv("FLASHINFER_WSFIX_WORKSPACE_MIB", mebibytes or "")
    guard.activate()
    tensor = own(late=late)
    assert [status.nbytes for status in guard.status().lanes] == ([] if late else made[:1] and [made[0] * MIB])
    execution = call(fp8, asked, tensor)
    assert execution.numel == made[-1] * MIB
    [status] = guard.status().lanes
    assert (status.name, status.device, status.generation) == (NAME, "cpu", len(made))
    assert (status.nbytes, status.address) == (made[-1] * MIB, execution.data_ptr)
    assert status.retired_nbytes == sum(made[:-1]) * MIB
    assert status.high_water == (asked if len(made) > 1 else 0)
    assert guard.status().growths == len(made) - 1


def test_5_zero_mebibytes_make_a_generation_on_overflow_only(guard, site, monkeypatch):
    """With the setting at 0, a site runs on FlashInfer's buffer until a plan wants more than that has."""
    monkeypatch.setenv("FLASHINFER_WSFIX_WORKSPACE_MIB", "0")
    guard.activate()
    tensor = own()
    for style in ("positional", "keyword"):
        assert same(call(site, OWN, tensor, style=style).workspace, tensor)
    assert guard.status().lanes[0].generation == 0
    assert call(site, MORE, tensor).numel == 2 * MIB
    assert call(site, 256, tensor).numel == 2 * MIB
    assert (tensor.numel(), guard.status().lanes[0].generation) == (OWN, 1)


# --- 6: growth --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked, made",
    [
        ([1, 2 * MIB, 2 * MIB + 1], [2, 4]),
        ([1, 9 * MIB, 3 * MIB, 10 * MIB + 256], [2, 10, 20]),
        ([32 * MIB, 31 * MIB, 1], [2, 32]),
        ([1, 2 * MIB + 1, 4 * MIB + 1, 8 * MIB + 1], [2, 4, 8, 16]),
    ],
)
def test_6_a_generation_is_twice_the_last_one_or_what_was_asked_for(asked, made, guard, fp8):
    """Never smaller again; retired bytes are counted, and stay below current ones."""
    tensor = own()
    for size in asked:
        call(fp8, size, tensor, look=False)
        [status] = guard.status().lanes
        assert status.retired_nbytes < status.nbytes
    assert [buffer.numel() for buffer in lane().generations] == [size * MIB for size in made]
    assert status.retired_nbytes == sum(made[:-1]) * MIB
    assert status.nbytes == made[-1] * MIB
    assert (status.high_water, guard.status().growths) == (max(asked), len(made) - 1)


# --- out of memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_out_of_memory_comes_out_as_torch_raised_it_and_the_lane_is_as_it_was(site, style, guard):
    """Where not even a call-local buffer can be had: FlashInfer's own behaviour, nothing executed, and later growth."""
    tensor = own()
    call(site, MORE, tensor)
    before = (lane().current, list(lane().generations))
    graph = fakes.Graph(FIRST + 256)
    with fakes.out_of_memory(0, 1, 2, 3), pytest.raises(torch.OutOfMemoryError) as caught:
        arguments.call(site, graph, tensor, style)
    assert (caught.value.__context__, graph.executions) == (None, [])
    assert (lane().current, lane().generations) == before
    assert guard.status().growths == 0
    for _ in range(4):  # not at once again: who asks meanwhile gets what there is
        assert call(site, FIRST + 256, tensor).numel == FIRST + 256
    assert call(site, FIRST + 256, tensor).numel == 2 * FIRST


def test_where_only_the_doubled_size_fails_less_is_published(site, guard):
    """Half as much again, else what was asked for: then the next calls of that size need no memory."""
    tensor = own(nbytes=16 * MIB)
    for refused, asked, made in ((1, 17, 24), (2, 26, 26), (2, 28, 28)):
        with fakes.out_of_memory(*range(refused)):
            assert call(site, asked * MIB - 256, tensor, look=False).numel == made * MIB
        with fakes.out_of_memory(*range(9)):
            assert call(site, asked * MIB, tensor, look=False).numel == made * MIB
    assert (guard.status().growths, guard.status().lanes[0].generation) == (3, 4)


def test_a_growth_that_fails_is_tried_again_seldom_and_keeps_nothing_alive(fp8, guard):
    """A thousand calls ask the allocator for the lane a handful of times; no exception of ours is left over."""
    tensor, tried = own(), []
    real = allocation.zeroed

    def scarce(nbytes, device):
        tried.append(nbytes)
        with fakes.out_of_memory(0):
            return real(nbytes, device)

    class Held:
        pass

    def host():
        held = Held()
        call(fp8, FIRST + 256, tensor, look=False)
        return weakref.ref(held)

    gc.disable()
    try:
        with mock.patch.object(allocation, "zeroed", scarce):
            assert [host()() for _ in range(1000)] == [None] * 1000
    finally:
        gc.enable()
    assert len(tried) <= 3 * 6 and len(lane().generations) == 1
    assert call(fp8, FIRST + 257, own("mm_bf16_workspace")).numel == 2 * FIRST


# --- lanes by themselves ----------------------------------------------------------------------------------------------


CUDA_1 = torch.device("cuda", 1)


def test_whether_a_stream_is_captured_is_asked_for_the_tensors_device(monkeypatch):
    """-1 is torch's word for leaving the device as it is. Where torch does not answer, nothing is captured."""
    asked = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(asked.append(device)))
    with fakes.capturing():
        assert allocation.is_capturing(CUDA_1) and allocation.is_capturing(CPU)
    assert asked == [CUDA_1, -1]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", mock.Mock(side_effect=RuntimeError))
    assert allocation.is_capturing(CPU) is False


def test_what_another_thread_has_made_meanwhile_is_used(fp8):
    tensor = own()
    for size in (MORE, FIRST + 256, 2 * FIRST + 256):
        call(fp8, size, tensor, look=False)
    last = lane().generations[-1]
    assert (len(lane().generations), last.numel()) == (3, 4 * FIRST)
    lane().current = lane().generations[0]
    assert lane().grow(4 * FIRST) is last
    assert lane().buffer_for(4 * FIRST, tensor) is last
    assert lane().current is last
    assert len(lane().generations) == 3


def test_each_generation_is_logged_with_both_addresses(fp8, caplog):
    caplog.clear()
    for size in (MORE, FIRST + 256):
        call(fp8, size, own(), look=False)
    one = f"{FIRST} bytes at {lane().generations[0].data_ptr():#x}"
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert f"generation 1: lane {NAME} on cpu, 0 bytes at 0x0 -> {one}, capturing no" in caplog.messages[0]
    assert f"generation 2: lane {NAME} on cpu, {one} -> {2 * FIRST} bytes" in caplog.messages[1]
    assert caplog.messages[1].endswith(tuple("0123456789"))  # whose line called


def test_what_avoids_an_overflow_depends_on_whose_lane_it_is(caplog):
    """presize() knows FlashInfer's lanes alone."""
    for name in (NAME, "SM100Workspace"):
        caplog.clear()
        with fakes.capturing():
            workspace.Lane(name, CPU).buffer_for(MORE, torch.zeros(1))
        assert ("presize()" in caplog.text, "Run that shape once" in caplog.text) == (name == NAME, name != NAME)
        assert "WORKSPACE_MIB" not in caplog.text  # what is in force would have done


def test_a_lane_that_was_asked_for_nothing_has_no_high_water_mark():
    assert workspace.Lane(NAME, CPU).high_water == 0


def test_presizing_to_the_setting_is_no_request(guard):
    with fakes.available():
        guard.presize(CPU, lanes=[NAME])
    assert (guard.status().lanes[0].high_water, guard.status().lanes[0].nbytes) == (0, 32 * MIB)


def test_a_growth_that_failed_is_tried_seldom_whatever_the_sizes(fp8):
    """Also for less than what failed last: calls of many sizes do not make it forget the least that failed."""
    tensor, largest = own(), mock.Mock(side_effect=torch.OutOfMemoryError("none"))
    with mock.patch.object(workspace.Lane, "_largest", largest):
        for number in range(300):
            call(fp8, FIRST + (8 * MIB, 1, 4 * MIB)[number % 3], tensor, look=False)
    assert largest.call_count == 2 + 3  # each new least size, and the 5th, 25th and 125th call after that


def test_a_first_generation_that_does_not_fit_is_not_tried_again_at_each_call(fp8):
    """FlashInfer's own buffer serves until a plan overflows it, though there would be memory by then."""
    tensor = own(late=True)
    with fakes.out_of_memory(*range(2)):
        for _ in range(20):
            assert same(call(fp8, 1000, tensor).workspace, tensor)
    assert [call(fp8, MORE, tensor).numel for _ in range(5)][-1] == FIRST


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda tensor: pickle.loads(pickle.dumps(tensor))])
def test_a_copy_of_a_workspace_is_no_lane(copied, fp8):
    """The lane stays with the original: a copy starts on zeros of its own, and what is saved does not name us."""
    tensor = own()
    call(fp8, MORE, tensor, write=7)
    other = copied(tensor)
    assert getattr(other, workspace.ATTRIBUTE) is None
    assert call(fp8, MORE, other).zeroed
    before = tensor.data_ptr()
    assert other.resize_(9 * MIB).numel() == 9 * MIB  # it has memory of its own, and torch's own way to resize
    assert (tensor.data_ptr(), tensor.numel()) == (before, OWN)


def test_growing_holds_up_nobody_else(fp8, guard, monkeypatch):
    """While a lane's allocation waits, status() answers and another lane makes its first generation."""
    waiting, go = threading.Event(), threading.Event()
    zeroed = allocation.zeroed

    def slowly(nbytes, device):
        if not waiting.is_set():
            waiting.set()
            assert go.wait(20)
        return zeroed(nbytes, device)

    slow, other = own(late=True), own("mm_bf16_workspace", late=True)
    monkeypatch.setattr(allocation, "zeroed", slowly)
    with ThreadPoolExecutor(3) as pool:
        growing = pool.submit(call, fp8, MORE, slow)
        assert waiting.wait(20)
        try:
            assert pool.submit(guard.status).result(20).growths == 0
            assert pool.submit(call, fp8, MORE, other).result(20).numel == FIRST
        finally:
            go.set()
        assert growing.result(20).numel == FIRST


def test_a_plan_that_asks_for_less_than_nothing_does_not_run_on_the_probe(fp8):
    assert call(fp8, -1, own()).numel == FIRST
