"""presize(), and what holds on the releases that have no site: nothing is wrapped, and presize() still zeroes."""

import sys
import types

import pytest
import torch
from flashinfer_wsfix import guards, workspace
from flashinfer_wsfix.sites import LANES

import arguments
import fakes
import releases

MIB = 1 << 20
STOCK = 32 * MIB
CPU = torch.device("cpu")
NAME = "bmm_fp8_workspace"


@pytest.fixture(autouse=True)
def ground(guard):
    """The guard is active; torch says that there is a device, and what is empty is full of ones."""
    torch.set_deterministic_debug_mode("error")
    with fakes.available():
        yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def affected(release):
    return release in releases.AFFECTED


def cache():
    return sys.modules["flashinfer.utils"]._cache_buf


def sizes(guard):
    return {status.name: status.nbytes // MIB for status in guard.status().lanes}


def test_releases_without_a_site_are_left_alone(guard, release, affected, sites):
    """Nothing of FlashInfer is wrapped or replaced there, and the verdict says so."""
    verdict = guard.status().targets[0]
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "flashinfer"]
    wrapped = [value for module in modules for value in vars(module).values() if guards.is_guarded(value)]
    assert bool(wrapped) == affected
    assert (type(cache()) is workspace.RetiringCache) == affected
    state = "guarded" if affected else "not-needed" if release.startswith("0.7") else "not-affected"
    assert (verdict.name, verdict.version, verdict.state) == ("flashinfer", release, state)
    assert all(guards.is_guarded(site.live()) == affected for site in sites)


def test_presize_makes_generation_1_of_every_lane_and_zeroes_flashinfers_own_buffer(guard, affected):
    """40 MiB each where there are sites; FlashInfer's own buffer is born zeroed at stock size on every release."""
    guard.presize("cpu")
    names = list(LANES)
    stock = sys.modules[arguments.GEMM_BASE].DEFAULT_WORKSPACE_SIZE
    assert sizes(guard) == (dict.fromkeys(names, 40) if affected else {})
    assert {key: buffer.numel() for key, buffer in cache().items()} == {(name, CPU): stock for name in names}
    assert not any(buffer.any() for buffer in cache().values())
    assert not any(lane.current.any() for lane in workspace.lanes())
    assert guard.status().growths == 0


@pytest.mark.affected
def test_a_presized_lane_serves_captured_calls(guard, site):
    """The first call may be a captured one: it runs on the zeroed generation, and nothing overflows."""
    guard.presize(CPU, lanes=[NAME])
    graph = fakes.Graph(STOCK + 256)
    with fakes.capturing():
        arguments.call(site, graph, cache()[NAME, CPU])
    assert (graph.last.numel, graph.last.zeroed) == (40 * MIB, True)
    assert (graph.last.data_ptr, guard.status().capture_overflows) == (guard.status().lanes[0].address, 0)


def test_presize_by_size_and_by_lane(guard, affected):
    """`nbytes` and `lanes` say how much and where; a lane that is large enough is left alone; growth is geometric."""
    for nbytes, made in ((64 * MIB, 64), (1, 64), (64 * MIB + 1, 128)):
        guard.presize(CPU, nbytes, [NAME])
        assert sizes(guard) == ({NAME: made} if affected else {})
    assert list(cache()) == [(NAME, CPU)]
    assert [status.high_water for status in guard.status().lanes] == ([64 * MIB + 1] if affected else [])


def test_presize_takes_its_size_from_the_setting(guard, affected, monkeypatch):
    """FLASHINFER_WSFIX_WORKSPACE_MIB; 0 makes FlashInfer's own buffer only."""
    for mebibytes, made in (("0", 0), ("48", 48)):
        monkeypatch.setenv("FLASHINFER_WSFIX_WORKSPACE_MIB", mebibytes)
        guard.activate()
        guard.presize(CPU, lanes=[NAME])
        assert sizes(guard) == ({NAME: made} if affected else {})
        assert list(cache()) == [(NAME, CPU)]


def test_presize_leaves_a_buffer_of_flashinfers_that_exists(guard):
    """Same object, same address, same bytes."""
    own = cache()[NAME, CPU] = torch.zeros(STOCK, dtype=torch.uint8)
    address = own.fill_(7).data_ptr()
    guard.presize(CPU, lanes=[NAME])
    assert cache()[NAME, CPU] is own
    assert (own.data_ptr(), own.numel()) == (address, STOCK)
    assert (own == 7).all()


def test_presize_wipes_nothing_that_is_in_use(guard, affected):
    """A lane whose buffer left FlashInfer's cache: the new one is the beginning of the same generation."""
    if not affected:
        pytest.skip("this release has no site")
    guard.presize(CPU, lanes=[NAME])
    lane = workspace.lanes()[0]
    lane.current.fill_(7)
    cache().clear()
    guard.presize(CPU, lanes=[NAME])
    begins, untouched = cache()[NAME, CPU].data_ptr(), bool((lane.current == 7).all())
    assert (begins, untouched) == (lane.current.data_ptr(), True)


def test_presize_without_a_device_is_a_no_op(guard, monkeypatch):
    """None for a device, and a process without CUDA."""
    guard.presize()
    guard.presize(None, 64 * MIB, ["no such lane"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    guard.presize("cuda")
    guard.presize(0, 64 * MIB)
    assert (guard.status().lanes, dict(cache())) == ((), {})


def test_presize_wants_a_lane_that_flashinfer_has(guard):
    with pytest.raises(ValueError, match="no workspace 'fp8'; the lanes are bmm_fp8_workspace"):
        guard.presize(CPU, lanes=["fp8"])
    with pytest.raises(ValueError, match="-1 bytes"):
        guard.presize(CPU, -1, [NAME])
    assert (guard.status().lanes, dict(cache())) == ((), {})


@pytest.mark.parametrize("early", [False, True])
def test_presize_at_a_wrong_time_warns_once_and_does_nothing(early, guard, caplog, monkeypatch):
    """Before FlashInfer is imported, and while a graph is being captured."""
    if early:
        monkeypatch.delitem(sys.modules, arguments.GEMM_BASE)
    caplog.clear()
    with fakes.capturing():
        guard.presize(CPU)
        guard.presize(CPU)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert ("not imported yet" if early else "being captured") in caplog.text
    assert (guard.status().lanes, dict(cache())) == ((), {})


def test_presize_on_cuda_means_the_current_device(guard, monkeypatch):
    """`cuda` without an index is the key that FlashInfer's tensors will have."""
    asked = []

    def get_cache_buf(name, nbytes, device):
        asked.append(device)
        return torch.zeros(1)

    monkeypatch.setattr(sys.modules["flashinfer.utils"], "_get_cache_buf", get_cache_buf)
    guard.presize("cuda", 0, lanes=[NAME])
    guard.presize(torch.device("cuda", 1), 0, lanes=[NAME])
    assert asked == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.affected
def test_out_of_memory_in_presize_comes_out_with_the_lane_as_it_was(guard):
    guard.presize(CPU, lanes=[NAME])
    before = guard.status().lanes[0]
    with fakes.out_of_memory(0, 1, 2), pytest.raises(torch.OutOfMemoryError):
        guard.presize(CPU, 64 * MIB, lanes=[NAME])
    after = guard.status().lanes[0]
    assert (after.generation, after.nbytes, after.address) == (before.generation, before.nbytes, before.address)


def test_presize_zeroes_through_the_signature_without_zero_init(guard, affected, monkeypatch):
    """`_get_cache_buf(name, bytes, device)` of 0.5.3, its real source: it makes an empty buffer, and gets it zeroed."""
    source = (releases.fetch("0.5.3") / "flashinfer" / "utils.py").read_text()
    start = source.index("def _get_cache_buf(")
    old = {"torch": torch, "_cache_buf": cache()}
    exec(source[start : source.index("\n\n\n", start)], old)
    assert old["_get_cache_buf"](NAME, 8, CPU).any() != affected  # there, whoever makes it
    cache().clear()
    monkeypatch.setattr(sys.modules["flashinfer.utils"], "_get_cache_buf", old["_get_cache_buf"])
    guard.presize(CPU, lanes=[NAME])
    assert cache()[NAME, CPU].numel() == sys.modules[arguments.GEMM_BASE].DEFAULT_WORKSPACE_SIZE
    assert not cache()[NAME, CPU].any()


def test_the_second_parameter_has_two_spellings(release, gemm_base: types.ModuleType):
    """`bytes` up to 0.6.x, `num_bytes` from 0.7.0 on: the reason why presize() passes it by position."""
    names = sys.modules["flashinfer.utils"]._get_cache_buf.__code__.co_varnames
    assert names[1] == ("num_bytes" if release.startswith("0.7") else "bytes")
