"""Activation before, after and in the middle of FlashInfer's import, and the way back; each case in a fresh process."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import fresh
from activated import (
    GATE,
    GEMM,
    GEMM_BASE,
    LATE,
    RELEASES,
    SITE,
    UTILS,
    assert_guarded,
    assert_stock,
    guards_on,
    lines,
    state,
)

# --- before, after, between -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
@fresh.process
def test_before(release):
    fresh.flashinfer(release)
    said = fresh.listen()
    importlib.import_module("flashinfer_wsfix")
    assert state() == "pending" and not said.getvalue()
    importlib.import_module("flashinfer")
    assert_guarded()
    assert [line.split()[0] for line in lines(said)] == ["INFO"]


@pytest.mark.parametrize("release", RELEASES)
@fresh.process
def test_after(release):
    fresh.flashinfer(release)
    said = fresh.listen()
    importlib.import_module("flashinfer")
    importlib.import_module("flashinfer_wsfix")
    assert_guarded()
    assert len(lines(said)) == 1


@pytest.mark.parametrize("first", ["flashinfer.jit", "flashinfer.utils", "flashinfer.gemm.gemm_base"])
@fresh.process
def test_between_two_imports(first):
    """A part of FlashInfer was imported before us, the rest after."""
    fresh.flashinfer("0.6.14")
    with pytest.MonkeyPatch.context() as patch:
        # Only as a stand-in for a process that imports a part: the package's own __init__ would import the whole.
        package = types.ModuleType("flashinfer")
        package.__path__ = [str(Path(sys.path[0]) / "flashinfer")]
        patch.setitem(sys.modules, "flashinfer", package)
        importlib.import_module(first)
    said = fresh.listen()
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    assert_guarded()
    assert "WARNING" not in said.getvalue()


@fresh.process
def test_twice_is_once():
    """Neither a second activation nor many by each route wrap twice or say anything again."""
    fresh.flashinfer("0.6.14")
    said = fresh.listen()
    import flashinfer_wsfix

    flashinfer_wsfix.activate("a")
    importlib.import_module("flashinfer")
    for route in ("a", "b", "call", "a"):
        flashinfer_wsfix.activate(route)
    assert_guarded()
    assert sum(type(finder).__module__.startswith("flashinfer_wsfix") for finder in sys.meta_path) == 1
    assert len(lines(said)) == 1
    assert flashinfer_wsfix.status().routes == ("a", "b", "call")


@fresh.process
def test_vllms_and_sglangs_routes_and_the_import_are_one():
    fresh.flashinfer("0.6.14")
    from flashinfer_wsfix import startup

    startup.vllm_plugin()
    startup.sglang_plugin()
    assert not {"flashinfer", "wrapt"} & set(sys.modules)
    importlib.import_module("flashinfer")
    startup.vllm_plugin()
    assert_guarded()
    assert len(sys.modules["flashinfer_wsfix"].status().routes) == 2


def bare(code, *options, path=()):
    """What a new interpreter printed, with nothing but the package on its path."""
    import flashinfer_wsfix

    paths = [str(Path(flashinfer_wsfix.__file__).parents[1]), *map(str, path)]
    ran = subprocess.run(
        [sys.executable, *options, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=fresh.SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, ran.stderr


def test_the_import_of_the_package_loads_four_small_modules():
    """`import flashinfer_wsfix` alone loads what the import hook needs, nothing else: neither torch nor any other."""
    printed, said = bare(
        "import sys; before = set(sys.modules); import flashinfer_wsfix; print(sorted(set(sys.modules) - before))"
    )
    needed = ("", ".activation", ".importer", ".names", ".state")
    assert printed == f"{[f'flashinfer_wsfix{name}' for name in needed]}\n"
    assert said == ""


def test_status_loads_only_the_standard_library():
    code = """
import sys
before = set(sys.modules)
import flashinfer_wsfix
flashinfer_wsfix.activate("call"), flashinfer_wsfix.status().as_dict(), flashinfer_wsfix.deactivate()
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names)))
"""
    assert bare(code) == ("['flashinfer_wsfix']\n", "")


# --- again ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [GEMM_BASE, UTILS, LATE, GEMM])
@fresh.process
def test_reload(name):
    fresh.flashinfer("0.6.14")
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    importlib.import_module(LATE)
    assert_guarded(10)
    retired = dict(sys.modules[UTILS]._cache_buf)
    importlib.reload(sys.modules[name])
    assert_guarded(10)
    assert retired  # a reload of utils starts a new cache; the old buffers are kept by whom they were given to


@pytest.mark.parametrize("deactivates", [False, True])
@fresh.process
def test_a_reload_of_utils_frees_no_buffer(deactivates):
    """`importlib.reload(flashinfer.utils)` drops the whole cache, whose buffers captured graphs may hold.

    Nor does `deactivate()`, which lets go of the guarded cache of before the reload.
    """
    import gc
    import weakref

    import torch

    fresh.flashinfer("0.6.14")
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    alive = weakref.ref(sys.modules[UTILS]._get_cache_buf("bmm_fp8_workspace", 1 << 20, torch.device("cpu")))
    importlib.reload(sys.modules[UTILS])
    assert_guarded()
    if deactivates:
        assert sys.modules["flashinfer_wsfix"].deactivate() == ()
        assert_stock()
    gc.collect()
    assert alive() is not None


@pytest.mark.parametrize("prefix", ["flashinfer", "flashinfer.gemm", "flashinfer.utils"])
@fresh.process
def test_a_fresh_import(prefix):
    """Deleted from sys.modules and imported again, the new module is guarded too."""
    fresh.flashinfer("0.6.14")
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    old = sys.modules[GEMM_BASE]
    for name in [name for name in sys.modules if name == prefix or name.startswith(prefix + ".")]:
        del sys.modules[name]
    importlib.import_module("flashinfer")
    importlib.import_module(GEMM)
    importlib.import_module(UTILS)
    assert_guarded()
    assert (sys.modules[GEMM_BASE] is old) == (prefix == "flashinfer.utils")


@fresh.process
def test_the_two_late_sites():
    """gemm_bf16_fp4_cudnn is loaded on demand: 8 sites become 10."""
    fresh.flashinfer("0.6.14")
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    assert LATE not in sys.modules
    assert_guarded(8)
    importlib.import_module(LATE)
    assert_guarded(10)


# --- the way back -----------------------------------------------------------------------------------------------------


@fresh.process
def test_deactivate_restores_the_very_objects():
    """Copies that other modules made by name are rebound and restored as well; no buffer is freed."""
    fresh.flashinfer("0.6.14")
    said = fresh.listen()
    import torch

    importlib.import_module("flashinfer")
    importlib.import_module(LATE)
    base, utils = sys.modules[GEMM_BASE], sys.modules[UTILS]
    copies = sys.modules["copies"] = types.ModuleType("copies")
    copies.site, copies.cache = getattr(base, SITE), utils._cache_buf
    own = utils._get_cache_buf("mm_bf16_workspace", 1 << 20, torch.device("cpu"))
    watched = [sys.modules[name] for name in sys.modules if name.startswith("flashinfer")] + [copies]
    before = [dict(vars(module)) for module in watched]

    import flashinfer_wsfix

    assert_guarded(10, lane="{}")
    assert copies.site is getattr(base, SITE) and copies.cache is utils._cache_buf
    displaced = utils._get_cache_buf("mm_bf16_workspace", 2 << 20, torch.device("cpu"))
    addresses = [lane.address for lane in flashinfer_wsfix.status().lanes]

    for _ in range(2):
        assert flashinfer_wsfix.deactivate() == ()
    assert_stock()
    assert {target.state for target in flashinfer_wsfix.status().targets} == {"disabled"}
    assert said.getvalue().count("is not active in this process: nothing is guarded") == 1
    for module, names in zip(watched, before, strict=True):
        assert all(vars(module)[name] is value for name, value in names.items() if not name.startswith("__"))
    assert utils._cache_buf["mm_bf16_workspace", torch.device("cpu")] is displaced
    assert [lane.address for lane in flashinfer_wsfix.status().lanes] == addresses and len(addresses) == 11
    from flashinfer_wsfix import workspace

    assert any(buffer is own for buffer in workspace.RetiringCache.retired)
    importlib.reload(base)
    assert_stock()
    flashinfer_wsfix.activate()
    assert_guarded(10)


@fresh.process
def test_deactivate_before_the_import():
    fresh.flashinfer("0.6.14")
    import flashinfer_wsfix

    assert flashinfer_wsfix.deactivate() == ()
    importlib.import_module("flashinfer")
    assert_stock()
    assert flashinfer_wsfix.status().routes == ()


@fresh.process
def test_a_finder_that_is_there_twice_is_taken_out_wholly():
    """A tool that saves and restores sys.meta_path may leave two of it."""
    fresh.flashinfer("0.6.14")
    import flashinfer_wsfix

    finder = sys.meta_path[0]
    sys.meta_path.append(finder)
    importlib.import_module("flashinfer")
    assert_guarded()
    assert flashinfer_wsfix.deactivate() == () and finder not in sys.meta_path
    importlib.import_module(LATE)
    assert_stock()


# --- settings ---------------------------------------------------------------------------------------------------------


@fresh.process
def test_off(monkeypatch=None):
    fresh.flashinfer("0.6.14")
    said = fresh.listen()
    os.environ["FLASHINFER_WSFIX"] = "0"
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    assert state() == "disabled" and guards_on(SITE) == guards_on(GATE) == 0
    assert type(sys.modules[UTILS]._cache_buf) is dict
    assert "WARNING" not in said.getvalue()


@fresh.process
def test_observe():
    """Moves are logged with both addresses, and nothing is changed: the stock code's buffer moves."""
    fresh.flashinfer("0.6.14")
    os.environ["FLASHINFER_WSFIX"] = "observe"
    said = fresh.listen()
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    assert state() == "observing" and guards_on(GATE) == 0
    assert not sys.modules[UTILS]._cache_buf.keeps
    import torch

    import arguments
    import fakes

    with fakes.install(sys.modules["flashinfer"]):
        own = sys.modules[UTILS]._get_cache_buf("bmm_fp8_workspace", 1 << 20, torch.device("cpu"))
        old = own.data_ptr()
        arguments.call(arguments.SITES[4], fakes.Graph((1 << 20) + 256), own)
    assert own.data_ptr() != old
    assert f"{old:#x}" in said.getvalue() and f"{own.data_ptr():#x}" in said.getvalue()
    assert "bmm_fp8_workspace" in said.getvalue()


@fresh.process
def test_nonsense_is_named_once_and_the_default_used():
    fresh.flashinfer("0.6.14")
    os.environ["FLASHINFER_WSFIX"] = "perhaps"
    os.environ["FLASHINFER_WSFIX_WORKSPACE"] = "64"
    said = fresh.listen()
    import flashinfer_wsfix

    importlib.import_module("flashinfer")
    flashinfer_wsfix.activate()
    assert_guarded()
    warnings = [line for line in said.getvalue().splitlines() if line.startswith("WARNING ")]
    assert len(warnings) == 2
    assert "FLASHINFER_WSFIX='perhaps'" in warnings[0] and "FLASHINFER_WSFIX_WORKSPACE is not" in warnings[1]


@fresh.process
def test_the_mode_may_change_between_activations():
    """Settings are read when the patch is applied, each time."""
    fresh.flashinfer("0.6.14")
    import flashinfer_wsfix

    importlib.import_module("flashinfer")
    seen = []
    for mode in ("1", "0", "observe", "1", "observe", "0", "1"):
        os.environ["FLASHINFER_WSFIX"] = mode
        flashinfer_wsfix.activate()
        seen.append((state(), guards_on(SITE), guards_on(GATE)))
    on, off, observe = ("guarded", 1, 1), ("disabled", 0, 0), ("observing", 1, 0)
    assert seen == [on, off, observe, on, observe, off, on]
    assert_guarded()


@fresh.process
def test_strict_lets_our_errors_out():
    """With FLASHINFER_WSFIX_STRICT=1 an error of ours breaks the import; without it the import works, stock."""
    fresh.flashinfer("0.6.14")
    from flashinfer_wsfix import guards

    guards.judge = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_WSFIX_STRICT", "1")
        with pytest.raises(TypeError):
            importlib.import_module("flashinfer")
        with pytest.raises(TypeError):
            sys.modules["flashinfer_wsfix"].activate() or importlib.import_module("flashinfer")
    importlib.import_module("flashinfer")
    assert state() == "failed"
