"""What must hold when a site is guarded: the twelve points of the contract, on FlashInfer's real code.

The number in a test's name is the point that it shows. A graph's replay is stood in for by a write to the address
that a cuDNN execute was given.
"""

import collections
import contextlib
import copy
import gc
import importlib.util
import inspect
import itertools
import os
import pickle
import random
import subprocess
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from flashinfer_wsfix import allocation, lanes, workspace
from torch.utils._python_dispatch import TorchDispatchMode

import arguments
import fakes
import releases
from memory import Handed

MIB = 1 << 20
# To be quick, FlashInfer's own buffers have 1 MiB here and first generations 2 MiB, where nothing else is said.
OWN, FIRST = MIB, 2 * MIB
MORE = OWN + 256  # more than FlashInfer's buffer has, less than a first generation
NAME = "bmm_fp8_workspace"
CPU, CPU_0 = torch.device("cpu"), torch.device("cpu", 0)  # one device under two keys of FlashInfer's cache
SENTINEL = b"graph\0\0\1"


# `test_presize.py` has what holds on the other releases.
pytestmark = [pytest.mark.affected, pytest.mark.usefixtures("guard")]


@pytest.fixture
def variables():
    return {"FLASHINFER_WSFIX_WORKSPACE_MIB": "2"}


@pytest.fixture
def dirty_memory():
    """What torch.empty() returns is full of ones, as memory that was in use before may be.

    `use_deterministic_algorithms()` does the same and imports torch's compiler, which takes seconds.
    """
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def fp8(sites):
    """One site, for what does not differ between them."""
    return next(site for site in sites if site.kind == "fp8")


def own(name=NAME, nbytes=OWN, device=CPU, late=False):
    """FlashInfer's own buffer of a lane, from its own function. ``late``: it was there before us, so no lane began."""
    if late:
        sys.modules["flashinfer.utils"]._cache_buf.take({(name, device): torch.zeros(nbytes, dtype=torch.uint8)})
    return sys.modules["flashinfer.utils"]._get_cache_buf(name, nbytes, device, zero_init=True)


def call(site, nbytes, tensor, **options):
    """Call a site whose plan asks for ``nbytes``; return its one execution."""
    graph = fakes.Graph(nbytes, look=options.pop("look", True), write=options.pop("write", None))
    arguments.call(site, graph, tensor, **options)
    [execution] = graph.executions
    return execution


def hand(site, nbytes, tensor, **options):
    """The same, keeping of the execution only the address that a graph would."""
    return Handed.of(call(site, nbytes, tensor, look=False, **options).workspace)


def lane(name=NAME, device=CPU):
    return lanes._lanes[name, device]


def same(one, other):
    """Whether two tensors are the same memory in the same shape."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


# --- 1: no address dies -----------------------------------------------------------------------------------------------


def test_1_a_graph_may_replay_on_every_generation_for_ever(site):
    """What is written through the address of an old generation reaches nobody else, and stays there."""
    tensor = own()
    held = [hand(site, size, tensor) for size in (MIB, 2 * MIB + 256, 7 * MIB)]
    assert [buffer.nbytes for buffer in held] == [2 * MIB, 4 * MIB, 8 * MIB]
    gc.collect()
    assert all(buffer.is_alive() for buffer in held)  # else what is written next would break the test's own process
    for number, buffer in enumerate(held):
        buffer.write(bytes([number] * 8))
    strangers = [torch.full((buffer.nbytes,), 9, dtype=torch.uint8) for buffer in held]
    assert [buffer.read() for buffer in held] == [{bytes([number] * 8)} for number in range(3)]
    assert all((stranger == 9).all() for stranger in strangers)


def reset(cache, key, other):
    cache[key] = other


def delete(cache, key, other):
    del cache[key]


def merge(cache, key, other):
    cache |= {key: other}


LEAVING = {
    "setitem": reset,
    "delitem": delete,
    "ior": merge,
    "clear": lambda cache, key, other: cache.clear(),
    "pop": lambda cache, key, other: cache.pop(key),
    "popitem": lambda cache, key, other: cache.popitem(),
    "update": lambda cache, key, other: cache.update({key: other}),
    "update_by_pairs": lambda cache, key, other: cache.update([(key, other)]),
}


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING.keys())
def test_1_flashinfers_own_buffer_lives_on_whichever_way_it_leaves_the_cache(leave, guard):
    cache = sys.modules["flashinfer.utils"]._cache_buf
    held = Handed.of(own(nbytes=MIB))
    held.write(SENTINEL)
    leave(cache, (NAME, CPU), torch.zeros(8, dtype=torch.uint8))
    gc.collect()
    assert held.is_alive()
    assert held.read() == {SENTINEL}
    assert guard.status().displaced_buffers == 1


def test_1_nothing_is_displaced_by_what_keeps_a_buffer(guard):
    """Setting the same tensor again, setdefault, reading, and a pop that finds nothing leave no trace."""
    cache = sys.modules["flashinfer.utils"]._cache_buf
    tensor = own(nbytes=MIB)
    cache[NAME, CPU] = tensor
    cache.setdefault((NAME, CPU), torch.zeros(8))
    assert cache.pop(("other", CPU), None) is None
    with pytest.raises(KeyError):
        cache.pop(("other", CPU))
    assert cache[NAME, CPU] is tensor
    assert guard.status().displaced_buffers == 0
    assert workspace.RetiringCache.retired == []


def test_1_a_larger_request_displaces_under_every_name_that_modules_copied(guard):
    """`_get_cache_buf` is imported by name into nine modules and more; each displaces, and nothing dies."""
    function = sys.modules["flashinfer.utils"]._get_cache_buf
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("flashinfer.") and vars(module).get("_get_cache_buf") is function
    ]
    assert len(modules) >= 9
    held = []
    for size, module in enumerate(modules, start=1):
        held.append(Handed.of(module._get_cache_buf(NAME, size * MIB, CPU, zero_init=True)))
        held[-1].write(bytes([size] * 8))
    gc.collect()
    assert all(buffer.is_alive() for buffer in held)
    assert held[-1].read() == {bytes([len(modules)] * 8)}
    assert len({buffer.address for buffer in held}) == len(lane().generations) > 2  # what a generation has room for
    assert guard.status().displaced_buffers == len(modules) - 1


def test_1_a_displaced_buffer_that_a_graph_ran_on_lives_on(fp8):
    """The own buffer that a captured call ran on (point 7) outlives its displacement."""
    tensor = own(nbytes=MIB, late=True)
    with fakes.capturing():
        held = hand(fp8, MIB, tensor)
    held.write(SENTINEL)
    del tensor
    own(nbytes=2 * MIB)
    gc.collect()
    assert held.is_alive()
    assert held.read() == {SENTINEL}


def fetch(name, mebibytes):
    """A buffer of FlashInfer's that is no lane's, as its attention and MoE kernels ask for it."""
    return sys.modules["flashinfer.utils"]._get_cache_buf(name, mebibytes * MIB, CPU)


def test_1_what_no_graph_can_hold_costs_what_stock_costs(guard):
    """A prefill buffer that grows with the prompt: what was fetched or made under capture is kept, the rest goes."""
    for mebibytes in range(1, 33):
        fetch("gdn_cp_sm90_t", mebibytes)
    assert workspace.RetiringCache.retired == []
    held = [Handed.of(fetch("gdn_cp_sm90_t", 32)), None]
    with fakes.capturing():
        fetch("gdn_cp_sm90_t", 1)  # the one that is there
    for mebibytes in range(33, 40):
        fetch("gdn_cp_sm90_t", mebibytes)
    with fakes.capturing():
        held[1] = Handed.of(fetch("gdn_cp_sm90_t", 40))
    fetch("gdn_cp_sm90_t", 41)
    gc.collect()
    assert all(buffer.is_alive() for buffer in held)
    status = guard.status()  # that of 39 MiB was fetched under capture too, though it was too small
    assert (status.displaced_buffers, status.displaced_nbytes) == (3, (32 + 39 + 40) * MIB)


def test_1_what_was_there_before_us_is_kept(guard):
    guard.deactivate()
    held = Handed.of(fetch("gdn_cp_sm90_t", 1))
    guard.activate()
    fetch("gdn_cp_sm90_t", 2)
    gc.collect()
    assert held.is_alive()


def test_1_a_caller_of_the_cold_cache_compiles_as_on_stock():
    """torch.compile(fullgraph=True) takes FlashInfer's own function whole, cold and warm."""

    def caller(x):
        return x + sys.modules["flashinfer.utils"]._get_cache_buf("compiled", 64, x.device)[:1].sum() * 0

    compiled = torch.compile(caller, fullgraph=True, backend="eager")
    assert [float(compiled(torch.ones(1))) for _ in range(2)] == [1, 1]


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


# --- 3 and 4: what is not ours stays as it is -------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_3_flashinfers_buffer_keeps_object_address_and_size(site, style):
    tensor = own()
    before = (tensor.data_ptr(), tensor.numel(), tensor.untyped_storage().nbytes())
    for size in (0, OWN, MORE, FIRST + 256, 256):
        call(site, size, tensor, style=style, look=False)
    with fakes.capturing():
        call(site, 9 * MIB, tensor, style=style, look=False)
    assert own() is tensor
    assert (tensor.data_ptr(), tensor.numel(), tensor.untyped_storage().nbytes()) == before
    assert not tensor.any()


def test_3_flashinfers_buffer_is_the_beginning_of_generation_1(fp8):
    """So a lane costs what its generation has over stock, and no second buffer; a larger one of an operator's too."""
    tensor = own()
    [generation] = lane().generations
    assert (tensor.data_ptr(), tensor.numel(), generation.numel()) == (generation.data_ptr(), OWN, FIRST)
    assert call(fp8, FIRST, tensor).data_ptr == tensor.data_ptr()
    larger = own("mm_bf16_workspace", 5 * MIB)
    [generation] = lane("mm_bf16_workspace").generations
    assert (larger.data_ptr(), larger.numel(), generation.numel()) == (generation.data_ptr(), 5 * MIB, 6 * MIB)
    with fakes.capturing():
        assert call(fp8, 5 * MIB, larger).data_ptr == larger.data_ptr()


def test_3_flashinfers_own_code_may_still_grow_its_buffer_and_frees_nothing(fp8, guard):
    """Deactivated, or after an error of ours: the buffer moves as in stock, and every generation stays."""
    tensor = own()
    held = [hand(fp8, size, tensor) for size in (MORE, FIRST + 256)]
    guard.deactivate()
    assert call(fp8, OWN, tensor).workspace is tensor
    for size in (3 * FIRST, 9 * FIRST):
        execution = call(fp8, size, tensor, look=False)
        assert (execution.workspace is tensor, execution.numel, tensor.numel()) == (True, size, size)
        held.append(Handed.of(tensor))
        del execution
    gc.collect()
    assert all(buffer.is_alive() for buffer in held)
    assert len({buffer.address for buffer in held}) == 4
    # A storage that was resized is alive as well, at another address.
    assert {buffer.address for buffer in held} <= {buffer.data_ptr() for buffer in lane().generations}


def test_3_a_buffer_that_flashinfer_makes_under_capture_is_not_left_to_others(fp8, dirty_memory):
    """It lives in that graph's pool: kept, zeroed, and made anew by the next who asks."""
    with fakes.capturing():
        tensor = sys.modules["flashinfer.utils"]._get_cache_buf(NAME, OWN, CPU)
        execution = call(fp8, OWN, tensor)
    assert same(execution.workspace, tensor) and execution.zeroed
    held = Handed.of(execution.workspace)
    del tensor, execution
    gc.collect()
    assert held.is_alive()
    assert own().data_ptr() != held.address
    assert call(fp8, OWN, own()).data_ptr == lane().generations[0].data_ptr()


def test_3_a_lane_that_is_first_used_under_capture_costs_no_buffer_a_call(fp8, guard):
    """FlashInfer makes one at each call then, since none is left in its cache: each but the last is a temporary."""
    held = []
    with fakes.capturing():
        for _ in range(5):
            tensor = sys.modules["flashinfer.utils"]._get_cache_buf(NAME, OWN, CPU)
            held.append(Handed.of(call(fp8, OWN, tensor, look=False).workspace))
            del tensor
    gc.collect()
    assert [buffer.is_alive() for buffer in held] == [False] * 4 + [True]
    assert guard.status().displaced_nbytes == 0


def test_3_a_key_of_another_shape_is_not_ours(guard):
    """A build that has a stream in its keys: FlashInfer's cache takes it as ever, and nothing of ours is raised."""
    cache = sys.modules["flashinfer.utils"]._cache_buf
    for key in ((NAME, CPU, 0), 7):
        cache[key] = torch.zeros(8, dtype=torch.uint8)
        assert cache[key].numel() == cache.get(key).numel() == 8
        del cache[key]
    assert guard.status().unguarded_calls == 0


@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_4_the_callers_own_tensor_is_not_touched(site, style):
    """Also one that is in no cache: same address, same size, same bytes, and the kernel never sees it."""
    tensor = torch.full((256,), 7, dtype=torch.uint8)
    before = (tensor.data_ptr(), tensor.numel())
    for size in (16, MORE):
        execution = call(site, size, tensor, style=style, write=1)
        assert execution.workspace is not tensor
        assert execution.data_ptr != before[0]
    assert (tensor.data_ptr(), tensor.numel()) == before
    assert (tensor == 7).all()


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


# --- 7: under capture -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_7_without_a_generation_a_captured_call_that_fits_runs_on_flashinfers_buffer(site, style, guard):
    tensor = own(late=True)
    with fakes.capturing():
        assert same(call(site, OWN, tensor, style=style).workspace, tensor)
        assert same(call(site, OWN, tensor, style=style).workspace, tensor)
    assert (guard.status().lanes[0].generation, guard.status().capture_overflows) == (0, 0)


@pytest.mark.parametrize("style", ["positional", "keyword"])
@pytest.mark.parametrize("generations", [0, 1])
def test_7_an_overflow_under_capture_publishes_nothing(site, style, generations, guard, caplog):
    """It gets a zeroed buffer of its own, which nobody keeps; it is counted each time and logged once."""
    tensor = own(late=not generations)
    before = (lane().current, list(lane().generations)) if generations else (None, [])
    caplog.clear()
    for _ in range(2):
        with fakes.capturing(), fakes.capturing():
            execution = call(site, FIRST + 256, tensor, style=style)
        assert (execution.numel, execution.zeroed, execution.capturing) == (FIRST + 256, True, True)
        held = Handed.of(execution.workspace)
        del execution
        assert not held.is_alive()
    assert (lane().current, lane().generations) == before
    assert guard.status().capture_overflows == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{FIRST + 256} bytes" in caplog.text
    assert "FLASHINFER_WSFIX_WORKSPACE_MIB=4" in caplog.text
    assert guard.status().lanes[0].high_water == FIRST + 256
    assert call(site, FIRST + 256, tensor).numel == 2 * FIRST


def test_7_a_captured_call_that_fits_runs_on_the_generation(site, guard):
    tensor = own()
    address = hand(site, MORE, tensor).address
    with fakes.capturing():
        assert hand(site, FIRST, tensor).address == address
    assert guard.status().capture_overflows == 0


def test_7_a_capture_in_another_thread_does_not_stop_growth(fp8):
    """Only the current stream of the calling thread decides."""
    tensor = own()
    with fakes.capturing(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(call, fp8, MORE, tensor).result().numel == FIRST
        assert call(fp8, MORE, tensor).numel == FIRST  # and the capture may use it


# --- 8: the auto-tuner's scratch --------------------------------------------------------------------------------------


@pytest.fixture
def made():
    """The sizes of the buffers that torch.zeros() has made for a named device, as workspaces are."""
    sizes, zeros = [], torch.zeros

    def counted(*args, **kwargs):
        if "device" in kwargs:
            sizes.append(args[0])
        return zeros(*args, **kwargs)

    with mock.patch.object(torch, "zeros", counted):
        yield sizes


def test_8_scratch_is_zeroed_once_and_freed_with_its_tensor(site, made, guard):
    """A tensor that is in no cache is no lane: one buffer however often it comes, and none when it is gone."""
    scratch = torch.full((256,), 7, dtype=torch.uint8)
    assert call(site, MORE, scratch, write=1).zeroed
    held = hand(site, MORE, scratch)
    for style in ("positional", "keyword"):
        for _ in range(10):
            assert hand(site, MORE, scratch, style=style).address == held.address
    assert made == [FIRST]
    assert guard.status().lanes == ()
    assert held.is_alive()
    del scratch
    gc.collect()
    assert not held.is_alive()


def test_8_scratch_is_not_the_lane_and_not_other_scratch(fp8):
    tensors = [own(), torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)]
    assert len({hand(fp8, MORE, tensor).address for tensor in tensors}) == 3


def test_8_scratch_under_capture_is_zeroed_too(fp8):
    """A small tensor of random bytes never reaches a kernel, even where it would be large enough."""
    scratch = torch.full((MORE,), 7, dtype=torch.uint8)
    with fakes.capturing():
        execution = call(fp8, MORE, scratch)
    assert execution.zeroed
    assert execution.workspace.data_ptr() != scratch.data_ptr()


def bmm_fp8(flashinfer):
    a, b = (torch.zeros(1, rows, 64).to(torch.float8_e4m3fn) for rows in (4, 32))
    scale = torch.ones(1)
    flashinfer.bmm_fp8(a, b.transpose(-2, -1), scale, scale, torch.bfloat16, backend="cudnn")


def mm_bf16(flashinfer):
    a, b = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (4, 32))
    flashinfer.mm_bf16(a, b.t(), backend="cudnn")


@pytest.mark.parametrize("gemm", [bmm_fp8, mm_bf16])
def test_8_tuning_leaks_nothing_and_every_kernel_starts_on_zeros(
    gemm, flashinfer, gemm_base, cudnn, guard, made, monkeypatch
):
    """The real tuner over several profiles of the real dispatch: scratch is zeroed, few, and gone afterwards."""
    monkeypatch.setattr(gemm_base, "DEFAULT_WORKSPACE_SIZE", OWN)
    graph = fakes.Graph(MORE, write=7, cost=0.5)
    cudnn.make_graph = lambda: graph
    with fakes.stub_runners():
        with flashinfer.autotune(True):
            gemm(flashinfer)
        tuned = list(graph.executions)
        gemm(flashinfer)
    seen = set()
    for execution in graph.executions:
        assert execution.zeroed or execution.data_ptr in seen
        seen.add(execution.data_ptr)
    profiles = {tuple(tensor.shape for tensor in execution.variant_pack.values()) for execution in tuned}
    assert len(tuned) > 10
    assert len(profiles) > 1
    # At most one for the clones of each tactic (0.6.16 clones anew for each), and the lane's own.
    assert len([size for size in made if size == FIRST]) <= len(profiles) * graph.plans + 1
    assert guard.status().capture_overflows == 0
    [lane] = guard.status().lanes
    assert (lane.name, lane.address) == (f"{gemm.__name__}_workspace", graph.last.data_ptr)
    del execution
    tuned.clear()
    graph.executions.clear()
    gc.collect()
    assert [value for value in gc.get_objects() if type(value) is workspace.Lane and value.name == "scratch"] == []


def test_8_the_tuners_clones_share_a_buffer_and_its_graphs_are_not_falsified(flashinfer, cudnn, guard, monkeypatch):
    """Profiling with a cold cache captures graphs that run through clones of the workspace: no zero-fill is in them."""
    big = types.SimpleNamespace(**{**vars(fakes._properties()), "L2_cache_size": 64 << 20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: big)
    fakes._clear_caches(flashinfer.utils)
    # The plans ask for more than the lane's first generation: the first to overflow it does so in the tuner's capture.
    graph = fakes.Graph(lambda plan: FIRST + 256 if plan > 0 else MORE, look=False)
    cudnn.make_graph = lambda: graph
    with fakes.stub_runners(), flashinfer.autotune(True):
        mm_bf16(flashinfer)
    fakes._clear_caches(flashinfer.utils)
    if not any(execution.capturing for execution in graph.executions):
        pytest.skip("this release profiles bf16 without capturing")
    captured = [execution for execution in graph.executions if execution.capturing]
    held = {execution.data_ptr for execution in graph.executions if not execution.capturing}
    assert {execution.data_ptr for execution in captured} <= held
    assert guard.status().capture_overflows == 0


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
    """Missing, doubled and unknown arguments, and a workspace that is no tensor."""
    guarded, stock = site.live(), inspect.unwrap(site.live())
    full = [fakes.Graph(1000), *arguments.tensors(site), own()]
    wrong = [(full[:count], {}) for count in range(len(full))]
    wrong += [(full, {site.parameter: full[-1]}), (full, {"unknown": 1}), ([*full[:-1], None], {})]
    wrong += [(full[:-1], {site.parameter: None}), ([*full, None, None, None, None], {})]
    for args, kwargs in wrong:
        errors = []
        for function in (stock, guarded):
            with pytest.raises((TypeError, AttributeError)) as caught:
                function(*args, **kwargs)
            errors.append((type(caught.value), str(caught.value), caught.value.__context__))
        assert errors[0] == errors[1]


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


# --- 10: never coarser than FlashInfer --------------------------------------------------------------------------------


def test_10_lanes_are_apart_by_name_and_by_device(site, guard):
    """Four keys of FlashInfer's cache, four generations; each at its own address, again and again."""
    tensors = [own(name, OWN, device) for name in ("one", "two") for device in (CPU, CPU_0)]
    for size in (1000, FIRST + 256):
        addresses = [hand(site, size, tensor).address for tensor in tensors]
        assert len(set(addresses)) == 4
        assert [hand(site, size, tensor, style="keyword").address for tensor in tensors] == addresses
    assert [(status.name, status.generation) for status in guard.status().lanes] == [
        ("one", 2), ("one", 2), ("two", 2), ("two", 2)
    ]  # fmt: skip


def test_10_sites_that_share_a_workspace_share_the_lane(sites):
    """And not finer: one generation for all sites that are given the same buffer."""
    tensor = own()
    assert len({hand(site, MORE, tensor).address for site in sites}) == 1


# --- 11: threads, devices, inference mode -----------------------------------------------------------------------------


@contextlib.contextmanager
def switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.newest
@pytest.mark.parametrize("lanes", [1, 4])
def test_11_32_threads_grow_lanes_at_once(lanes, guard, fp8):
    """Each gets what its plan asks for, zeroed at first sight; what they got lives on; growth stays geometric."""
    tensors = [own(f"lane {number}", MIB, (CPU, CPU_0)[number % 2]) for number in range(lanes)]
    barrier = threading.Barrier(32)

    def grow(number):
        barrier.wait(30)
        return [hand(fp8, size * MIB, tensors[number % lanes]) for size in (1, number + 1, 2 * number)]

    with switching_often(), ThreadPoolExecutor(32) as pool:
        held = [buffer for buffers in pool.map(grow, range(32), timeout=60) for buffer in buffers]
    assert all(buffer.is_alive() for buffer in held)
    generations = [buffer for found in workspace.lanes() for buffer in found.generations]
    assert {buffer.address for buffer in held} <= {buffer.data_ptr() for buffer in generations}
    for found in workspace.lanes():
        sizes = [buffer.numel() for buffer in found.generations]
        assert all(after >= 2 * before for before, after in itertools.pairwise(sizes))
        assert found.current is found.generations[-1]
        assert not any(buffer.any() for buffer in found.generations)
    assert len(workspace.lanes()) == lanes
    assert guard.status().growths == len(generations) - lanes


@pytest.mark.parametrize("inside_first", [True, False])
def test_11_a_workspace_may_be_made_and_grown_inside_and_outside_of_inference_mode(site, inside_first):
    """A generation is an ordinary tensor wherever it was made."""
    with torch.inference_mode(inside_first):
        tensor = own()
        assert call(site, MORE, tensor, write=7).zeroed
    with torch.inference_mode(not inside_first):
        assert call(site, FIRST + 256, tensor, write=7).zeroed
    assert not any(buffer.is_inference() for buffer in lane().generations)


def test_11_the_stock_site_cannot_grow_an_inference_tensor_outside(fp8):
    with torch.inference_mode():
        tensor = own(nbytes=MIB)
    with (
        mock.patch.object(sys.modules[fp8.module], fp8.function, inspect.unwrap(fp8.live())),
        pytest.raises(RuntimeError, match="InferenceMode"),
    ):
        call(fp8, 2 * MIB, tensor)


FORK = """
import os, sys, threading, time
import fakes
sys.modules["cudnn"], sys.modules["cutlass"] = fakes.cudnn, None
import flashinfer, torch, flashinfer_wsfix, arguments
fakes.install(flashinfer)
from flashinfer_wsfix import allocation, lanes, workspace
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
site = next(site for site in arguments.SITES if site.kind == "fp8")
utils = sys.modules["flashinfer.utils"]
arguments.tensors(site)  # nor does an operation of torch's that is under way for the first time

def grow(prefix, count):
    for number in range(count):
        tensor = utils._get_cache_buf(f"{prefix} {number}", 1 << 20, torch.device("cpu"))
        for mebibytes in (1, 3, 5):
            arguments.call(site, fakes.Graph(mebibytes << 20, look=False), tensor)

stop = threading.Event()
def grow_on():
    number = 0
    while not stop.is_set():
        grow(f"parent {number % 2}", 4)
        lanes._lanes.clear()  # so that they grow again
        utils._cache_buf.clear()
        workspace.RetiringCache.retired.clear()
        number += 1

thread = threading.Thread(target=grow_on)
thread.start()
for child in range(20):
    pid = os.fork()
    if not pid:
        grow("child", 2)
        flashinfer_wsfix.status()
        os._exit(0)
    deadline = time.monotonic() + 20
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            print(f"child {child} hangs", flush=True)
            os._exit(1)
        time.sleep(0.001)
stop.set()
thread.join(20)
print("20 children grew")
"""


@pytest.mark.newest
def test_11_a_child_that_is_forked_while_a_lane_grows_can_grow_lanes(release):
    """No child inherits our lock taken, at 20 forks during growth."""
    path = os.pathsep.join([str(releases.fetch(release)), *filter(None, sys.path)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "FLASHINFER_WSFIX_WORKSPACE_MIB": "2",
        "FLASHINFER_WSFIX_LOG": "ERROR",
    }
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout.splitlines()[-1], done.returncode) == ("20 children grew", 0), done.stderr


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
    test_9_a_wrong_call_fails_as_in_stock(fp8)
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


# --- all of it at random ----------------------------------------------------------------------------------------------


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


def test_5000_random_calls(guard, sites):
    """Sizes up and down over several lanes, captures, displacements: nothing handed out is freed, moved or dirty at
    first sight, retired bytes stay below current ones, and FlashInfer's own buffers keep object, address and size."""
    rng = random.Random(5000)
    keys = [(name, device) for name in ("one", "two", "three") for device in (CPU, CPU_0)]
    owned = {key: MIB for key in keys}
    before: dict = {}
    handed: dict[int, tuple[Handed, bytes]] = {}
    call_local = 0
    for number in range(5000):
        key = rng.choice(keys)
        if rng.random() < 0.01:
            owned[key] += 4096
            before.pop(key, None)
        tensor = own(key[0], owned[key], key[1])
        assert before.setdefault(key, (id(tensor), tensor.data_ptr(), owned[key])) == (
            id(tensor), tensor.data_ptr(), tensor.numel()
        )  # fmt: skip
        size = int(2 ** rng.uniform(0, 21 + 3 * number / 5000))
        with fakes.capturing() if rng.random() < 0.1 else contextlib.nullcontext():
            style = rng.choice(["positional", "keyword"])
            execution = call(rng.choice(sites), size, tensor, style=style, look=False)
        passed = execution.workspace
        if execution.data_ptr not in handed:
            assert not passed.any()
        if passed is lane(*key).current or same(passed, tensor):
            content = number.to_bytes(8, "little")
            handed[execution.data_ptr] = (Handed.of(passed), content)
            handed[execution.data_ptr][0].write(content)
        else:
            assert execution.capturing
            call_local += 1
        del execution, passed, tensor
        if number % 100 == 0:
            assert all(buffer.read() == {content} for buffer, content in handed.values())
        assert all(buffer.is_alive() for buffer, content in handed.values())
        for status in guard.status().lanes:
            assert status.retired_nbytes < max(status.nbytes, 1)
    assert all(buffer.read() == {content} for buffer, content in handed.values())
    assert call_local == guard.status().capture_overflows > 0
    assert guard.status().growths > len(keys)
    assert guard.status().displaced_buffers > 10
