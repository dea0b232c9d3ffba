"""Lanes are apart, and grow in threads, in children and at random: points 10 and 11 of the contract."""

import contextlib
import inspect
import itertools
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from flashinfer_wsfix import workspace

import fakes
import releases
from calls import CPU, CPU_0, FIRST, MIB, MORE, OWN, SMALL, call, hand, lane, own, same, switching_often
from memory import Handed

# `test_presize.py` has what holds on the other releases.
pytestmark = [pytest.mark.affected, pytest.mark.usefixtures("guard")]
VARIABLES = SMALL


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
