"""No address dies, and what is not ours stays as it is: points 1, 3 and 4 of the contract."""

import contextlib
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from flashinfer_wsfix import workspace

import fakes
from calls import CPU, FIRST, MIB, MORE, NAME, OWN, SENTINEL, SMALL, call, hand, lane, own, same, switching_often
from memory import Handed

# `test_presize.py` has what holds on the other releases.
pytestmark = [pytest.mark.affected, pytest.mark.usefixtures("guard")]
VARIABLES = SMALL


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


def test_1_what_is_fetched_is_what_is_held(monkeypatch):
    """Another thread replaces an entry while it is being fetched under capture: what the graph gets is kept."""
    cache, key = sys.modules["flashinfer.utils"]._cache_buf, ("gdn_cp_sm90_t", CPU)
    fetch(key[0], 1)

    def overtaken(device, replaced=[]):  # noqa: B006
        if not replaced:
            replaced.append(device)
            thread = threading.Thread(target=cache.__setitem__, args=(key, torch.zeros(2 * MIB, dtype=torch.uint8)))
            thread.start()
            thread.join()
        return threading.current_thread() is threading.main_thread()

    monkeypatch.setattr(workspace, "is_capturing", overtaken)
    held = Handed.of(cache[key])
    monkeypatch.undo()
    fetch(key[0], 3)
    gc.collect()
    assert held.is_alive()


@pytest.mark.parametrize(
    "replaced", ["fetched", pytest.param("compiled", marks=pytest.mark.newest), "called", "deactivated"]
)
def test_1_what_was_held_is_kept_whoever_comes_after_it(replaced, fp8, guard):
    """A buffer that a graph may hold leaves by update(), and the next under its key is taken in, in each way."""
    name = NAME if replaced == "called" else "gdn_cp_sm90_t"
    cache, key = sys.modules["flashinfer.utils"]._cache_buf, (name, CPU)
    cache.take({key: torch.zeros(MIB, dtype=torch.uint8)})  # it was there before us
    held = Handed.of(cache[key])
    cache.update({key: torch.zeros(2 * MIB, dtype=torch.uint8)})
    if replaced == "fetched":
        with fakes.capturing():
            fetch(name, 2)
    elif replaced == "compiled":
        torch.compile(lambda: fetch(name, 2) + 1, fullgraph=True, backend="eager")()
    elif replaced == "called":
        call(fp8, 8, dict.get(cache, key), look=False)
    else:
        guard.deactivate()
    gc.collect()
    assert held.is_alive()
    assert guard.status().displaced_buffers == (replaced != "compiled")


@pytest.mark.parametrize("leave", ["setitem", "pop"])
def test_1_the_log_tells_the_bytes_that_are_kept(leave, guard, caplog):
    """At once where FlashInfer replaces a buffer, else when somebody asks."""
    cache, key = sys.modules["flashinfer.utils"]._cache_buf, ("gdn_cp_sm90_t", CPU)
    with fakes.capturing():
        fetch(key[0], 3)
    caplog.clear()
    LEAVING[leave](cache, key, torch.zeros(8, dtype=torch.uint8))
    assert len(caplog.records) == (leave == "setitem")
    for _ in range(2):
        assert guard.status().displaced_nbytes == 3 * MIB
    [record] = caplog.records
    assert record.levelname == "INFO" and f"kept {3 * MIB} bytes of {key[0]} on cpu" in record.getMessage()


def test_1_each_displaced_buffer_is_counted_once(guard):
    """Threads that replace a held entry at once, and entries that leave in between, raise nothing and lose no count."""
    cache, key = sys.modules["flashinfer.utils"]._cache_buf, ("gdn_cp_sm90_t", CPU)
    barrier = threading.Barrier(2)

    def replace():
        for _ in range(500):
            barrier.wait(20)
            cache[key] = torch.zeros(1, dtype=torch.uint8)
            barrier.wait(20)

    with switching_often(), ThreadPoolExecutor(1) as pool:
        other = pool.submit(replace)
        for _ in range(500):
            with fakes.capturing():
                cache[key] = torch.zeros(1, dtype=torch.uint8)
            barrier.wait(20)
            cache[key] = torch.zeros(1, dtype=torch.uint8)
            barrier.wait(20)
        other.result(20)
    status = guard.status()
    assert (status.displaced_buffers, status.unguarded_calls) == (500, 0)


def test_1_what_is_no_tensor_is_let_be(guard):
    """A build that keeps something else in FlashInfer's cache: it comes and goes, and status() answers."""
    guard.deactivate()
    sys.modules["flashinfer.utils"]._cache_buf["other"] = object()
    guard.activate()
    cache = sys.modules["flashinfer.utils"]._cache_buf
    with fakes.capturing():
        assert type(cache["other"]) is object
    del cache["other"]
    assert (guard.status().displaced_buffers, guard.status().unguarded_calls) == (0, 0)


@pytest.mark.newest
@pytest.mark.parametrize("name", [NAME, "compiled"])
def test_1_a_caller_of_the_cold_cache_compiles_as_on_stock(name):
    """torch.compile(fullgraph=True) takes FlashInfer's own function whole, cold and warm."""

    def caller(x):
        return x + sys.modules["flashinfer.utils"]._get_cache_buf(name, 64, x.device)[:1].sum() * 0

    compiled = torch.compile(caller, fullgraph=True, backend="eager")
    assert [float(compiled(torch.ones(1))) for _ in range(2)] == [1, 1]


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


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_3_a_buffer_is_born_zeroed_after_an_error_of_ours_too(captured, guard, monkeypatch):
    """And what is born under capture is not left to others."""
    cache = sys.modules["flashinfer.utils"]._cache_buf
    monkeypatch.setattr(workspace, "lane", mock.Mock(side_effect=LookupError("ours")))
    buffer = torch.full((OWN,), 7, dtype=torch.uint8)
    with fakes.capturing() if captured else contextlib.nullcontext():
        cache[NAME, CPU] = buffer
    assert not buffer.any()
    assert ((NAME, CPU) in cache) == (not captured)
    assert guard.status().unguarded_calls == 1


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
