"""Activation before, after and in the middle of FlashInfer's import, and the way back; each case in a fresh process."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path

import pytest

import fresh

GEMM, UTILS, LATE = ("flashinfer.gemm", "flashinfer.utils", "flashinfer.gemm.gemm_bf16_fp4_cudnn")
GEMM_BASE = "flashinfer.gemm.gemm_base"
SITE, GATE = "execute_cudnn_gemm_fp8_graph", "fp8_gemm_sm100"
RELEASES = ("0.6.12", "0.6.18.post1")


def state(target=0):
    import flashinfer_wsfix

    return flashinfer_wsfix.status().targets[target].state


def guards_on(name):
    """How many of our wrappers, of whichever copy of the package, lie over one another at the site."""
    value, count = vars(sys.modules[GEMM_BASE])[name], 0
    while value is not None:
        count += getattr(type(value), "is_wsfix_guard", False)
        value = getattr(value, "__wrapped__", None)
    return count


def assert_guarded(sites=8, lane="workspace"):
    """Every site has one guard, the gate and the cache have theirs, and a call runs on a generation of ours.

    Of one lane, unless its name has a {} for the site.
    """
    import flashinfer_wsfix
    import torch
    from flashinfer_wsfix import workspace

    import arguments
    import fakes

    status = flashinfer_wsfix.status()
    assert (status.targets[0].state, len(status.targets[0].sites)) == ("guarded", sites)
    assert [guards_on(site.function) for site in arguments.SITES[:8]] == [1] * 8
    assert guards_on(GATE) == guards_on("bf16_gemm_sm100") == 1
    assert type(sys.modules[UTILS]._cache_buf) is workspace.RetiringCache
    sys.modules["flashinfer"].utils = sys.modules[
        UTILS
    ]  # a second import of a package binds no submodule that it finds
    with fakes.install(sys.modules["flashinfer"]):
        for site in arguments.SITES[:sites]:
            own = sys.modules[UTILS]._get_cache_buf(lane.format(site), 1 << 20, torch.device("cpu"))
            graph = fakes.Graph(2 << 20, look=False)
            arguments.call(site, graph, own)
            assert graph.last.numel == 40 << 20 and own.numel() == 1 << 20


def lines(said):
    """What was logged of activation: not the lines about lanes, which come of the calls that `assert_guarded` makes."""
    return [line for line in said.getvalue().splitlines() if "]: generation " not in line]


def assert_stock():
    import flashinfer_wsfix

    assert flashinfer_wsfix.status().targets[0].state == "disabled"
    assert guards_on(SITE) == guards_on(GATE) == 0
    assert type(sys.modules[UTILS]._cache_buf) is dict


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


# --- in the middle of an import ---------------------------------------------------------------------------------------

POINTS = (
    "flashinfer", "flashinfer.version", "flashinfer.jit", "flashinfer.utils", "flashinfer.autotuner",
    "flashinfer.gemm", "flashinfer.gemm.gemm_base", "flashinfer.gemm.gemm_bf16_fp4", "flashinfer.gemm.routergemm",
    "flashinfer.mla", "flashinfer.norm", "flashinfer.sampling",
)  # fmt: skip


class Pause(importlib.abc.MetaPathFinder):
    """Calls `at` before the module that a finder `found` is in sys.modules, or once its body has `run`."""

    def __init__(self, name, when, at):
        self.name, self.when, self.at = name, when, at

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def found(spec):
            self.at()

        def run(module):
            execute(module)
            self.at()

        if self.when == "found":
            spec.loader.create_module = found
        else:
            spec.loader.exec_module = run
        return spec


@pytest.mark.parametrize("when", ["found", "run"])
@pytest.mark.parametrize("name", POINTS)
@fresh.process
def test_while_another_thread_imports(name, when):
    """Activated while another thread is at one point of `import flashinfer`: guarded when that import returns."""
    fresh.flashinfer("0.6.14")
    half_way, go_on = threading.Event(), threading.Event()

    def at():
        half_way.set()
        assert go_on.wait(60)

    sys.meta_path.insert(0, Pause(name, when, at))
    seen = []

    def import_it():
        importlib.import_module("flashinfer")
        seen.append((state(), guards_on(SITE)))

    said = fresh.listen()
    thread = threading.Thread(target=import_it)
    thread.start()
    assert half_way.wait(60)
    importlib.import_module("flashinfer_wsfix")  # must not wait for the other thread
    assert thread.is_alive()
    go_on.set()
    thread.join(60)
    assert seen == [("guarded", 1)]
    assert_guarded()
    assert len(lines(said)) == 1 and "guarded: all" in lines(said)[0], said.getvalue()


@pytest.mark.parametrize("when", ["found", "run"])
@pytest.mark.parametrize("name", POINTS)
@fresh.process
def test_from_inside_the_import(name, when):
    """Activated by a module that FlashInfer's import runs, in the same thread."""
    fresh.flashinfer("0.6.14")
    said = fresh.listen()
    sys.meta_path.insert(0, Pause(name, when, lambda: importlib.import_module("flashinfer_wsfix")))
    importlib.import_module("flashinfer")
    assert_guarded()
    assert len(lines(said)) == 1 and "guarded: all" in lines(said)[0], said.getvalue()


@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_after_an_import_that_failed(tmp_path, when):
    failing = "gemm/routergemm.py"
    failed_import(folder=tmp_path, failing=failing, when=when)


@fresh.process
def failed_import(folder, failing, when):
    """FlashInfer's own error comes out as it is, and the import that works later is guarded."""
    middle = "import flashinfer_wsfix; flashinfer_wsfix.activate('again'); " if when == "in the middle" else ""
    fails = {failing: lambda text: f"{middle}raise OSError('theirs')\n" + text}
    fresh.flashinfer("0.6.14", fresh.copy("0.6.14", folder, fails))
    if when == "before":
        importlib.import_module("flashinfer_wsfix")
    with pytest.raises(OSError, match="theirs"):
        importlib.import_module("flashinfer")
    (folder / "flashinfer" / failing).write_text((folder / "flashinfer" / failing).read_text().split("\n", 1)[1])
    importlib.invalidate_caches()
    importlib.import_module("flashinfer")
    assert_guarded()


@fresh.process
def test_where_not_even_our_log_can_be_had():
    """One sentence of what it means, and FlashInfer works. At its end the interpreter takes `sys.meta_path` away."""
    fresh.flashinfer("0.6.14")
    said = fresh.listen()
    flashinfer_wsfix = importlib.import_module("flashinfer_wsfix")
    sys.modules["flashinfer_wsfix.report"] = None
    importlib.import_module("flashinfer")
    assert said.getvalue().startswith("flashinfer-wsfix: NOT guarded (flashinfer), because of an error of ours (")
    finders, sys.meta_path = sys.meta_path, None
    flashinfer_wsfix.activate()
    sys.meta_path = finders
    assert said.getvalue().splitlines()[-1].startswith("flashinfer-wsfix: NOT guarded (activation), because of")


@fresh.process
def test_deactivated_while_a_module_is_imported():
    """Nothing is wrapped behind the back of who has switched us off."""
    fresh.flashinfer("0.6.14")
    flashinfer_wsfix = importlib.import_module("flashinfer_wsfix")
    sys.meta_path.insert(0, Pause(GEMM_BASE, "run", flashinfer_wsfix.deactivate))
    importlib.import_module("flashinfer")
    assert (state(), guards_on(SITE)) == ("disabled", 0)
    flashinfer_wsfix.activate()
    assert_guarded()


@fresh.process
def test_many_threads_import_activate_and_ask():
    """32 threads import FlashInfer, activate, deactivate and ask for the status at once: no deadlock, and it works."""
    fresh.flashinfer("0.6.14")
    fresh.listen()
    import flashinfer_wsfix

    errors = []
    start = threading.Barrier(32)
    names = itertools.cycle(["flashinfer", GEMM, UTILS, LATE])

    def work(number, name):
        try:
            start.wait(60)
            if number % 4 == 0:
                importlib.import_module(name)
            for _ in range(20):
                if number % 4 == 1:
                    flashinfer_wsfix.activate()
                elif number % 4 == 2:
                    flashinfer_wsfix.status()
                elif number % 8 == 3:
                    flashinfer_wsfix.deactivate()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number, next(names))) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    flashinfer_wsfix.activate()
    importlib.import_module(LATE)
    assert_guarded(10)


@fresh.process
def test_no_lock_of_ours_is_held_while_an_import_runs():
    """While a module is being imported, by FlashInfer or by us, another thread can take our lock."""
    fresh.flashinfer("0.6.14")
    import flashinfer_wsfix
    from flashinfer_wsfix import state

    imported = []

    class Watch(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            taken = []
            thread = threading.Thread(
                target=lambda: taken.append(state.lock.acquire(timeout=5) and state.lock.release())
            )
            thread.start()
            thread.join()
            imported.append((name, taken == [None]))

    sys.meta_path.insert(0, Watch())
    importlib.import_module("flashinfer")
    importlib.import_module(LATE)
    flashinfer_wsfix.activate()
    assert {GEMM, "wrapt", "flashinfer_wsfix.patching"} <= {name for name, _ in imported}
    assert all(free for _, free in imported)


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


# --- other import hooks -----------------------------------------------------------------------------------------------


class Legacy:
    """A finder of Python 2's time, without find_spec."""

    def find_module(self, name, path=None):
        return None


class Delegating(importlib.abc.MetaPathFinder):
    """Asks the finders after it, as ddtrace and coverage do, and puts a loader of its own around what they find."""

    def __init__(self):
        self.seen = []

    def find_spec(self, name, path=None, target=None):
        after = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in after if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None and name.startswith("flashinfer."):
            spec.loader = Around(spec.loader, self.seen)
        return spec


class Around(importlib.abc.Loader):
    def __init__(self, loader, seen):
        self.loader, self.seen = loader, seen

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.seen.append(module.__name__)


class Slots:  # not of importlib.abc.Loader, whose instances take attributes
    """A loader whose instances take no attributes."""

    __slots__ = ("loader",)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)


class SlotsFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not name.startswith("flashinfer."):
            return None
        loader = Slots()
        loader.loader, spec.loader = spec.loader, loader
        return spec


def legacy():
    sys.meta_path.insert(0, Legacy())


def delegating():
    sys.meta_path.insert(0, Delegating())


def slots():
    sys.meta_path.insert(1, SlotsFinder())


def wrapts():
    import wrapt

    wrapt.register_post_import_hook(lambda module: setattr(module, "hooked", True), GEMM_BASE)


HOOKS = {function.__name__: function for function in (legacy, delegating, slots, wrapts)}


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("hook", HOOKS)
@fresh.process
def test_other_import_hooks(hook, first):
    """Another tool's import hook, put in before ours or after: both do their work."""
    fresh.flashinfer("0.6.14")
    said = fresh.listen()
    if first == "theirs":
        HOOKS[hook]()
    importlib.import_module("flashinfer_wsfix")
    if first == "ours":
        HOOKS[hook]()
    importlib.import_module("flashinfer")
    assert_guarded()
    assert len(lines(said)) == 1, said.getvalue()
    if hook == "wrapts":
        assert sys.modules[GEMM_BASE].hooked
    if hook == "delegating":
        (finder,) = (finder for finder in sys.meta_path if isinstance(finder, Delegating))
        assert {GEMM, GEMM_BASE, UTILS} <= set(finder.seen)
    importlib.reload(sys.modules[GEMM_BASE])
    if hook != "slots":  # nothing tells us of a reload there
        assert_guarded()
    sys.modules["flashinfer_wsfix"].activate()
    assert_guarded()


@fresh.process
def test_a_loader_as_old_as_load_module():
    """It cannot be asked to tell us. The package's own turn comes, and no false alarm before."""
    fresh.flashinfer("0.6.14")
    said = fresh.listen()
    importlib.import_module("flashinfer_wsfix")

    class Old:
        def __init__(self, loader):
            self.load_module = loader.load_module

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if name == GEMM_BASE:
                spec.loader = Old(spec.loader)
            return spec

    sys.meta_path.insert(1, Finder())
    importlib.import_module("flashinfer")
    assert_guarded()
    assert len(lines(said)) == 1 and "guarded: all" in lines(said)[0], said.getvalue()


@pytest.mark.parametrize("name", [GEMM, "flashinfer", LATE])
@pytest.mark.parametrize("first", ["ours", "theirs"])
@fresh.process
def test_lazy_loader(name, first):
    """A module that importlib.util.LazyLoader has only prepared is not loaded by us, and guarded once it is."""
    fresh.flashinfer("0.6.14")

    class Lazy(importlib.abc.MetaPathFinder):
        def find_spec(self, asked, path=None, target=None):
            if asked != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(asked)
            spec.loader = importlib.util.LazyLoader(spec.loader)
            return spec

    if first == "ours":
        importlib.import_module("flashinfer_wsfix")
    if name == LATE:
        importlib.import_module("flashinfer")
    if name == GEMM:  # without the package's own __init__, which uses what it imports
        package = sys.modules["flashinfer"] = types.ModuleType("flashinfer")
        package.__path__ = [str(Path(sys.path[0]) / "flashinfer")]
    sys.meta_path.insert(0, Lazy())
    module = importlib.import_module(name)
    flashinfer_wsfix = importlib.import_module("flashinfer_wsfix")
    flashinfer_wsfix.activate()
    assert flashinfer_wsfix.status().targets[0].state == ("guarded" if name == LATE else "pending")
    assert type(module) is not types.ModuleType
    assert module.__doc__ is None or module.__doc__  # now it is loaded
    assert type(module) is types.ModuleType
    if first == "theirs" and name != "flashinfer":  # nobody told us: the next activation sees it
        flashinfer_wsfix.activate()
    assert state() == "guarded" and guards_on(SITE) == 1
    assert len(flashinfer_wsfix.status().targets[0].sites) == (10 if name == LATE else 8)


@fresh.process
def test_an_error_of_ours_does_not_reach_who_loads_a_lazy_module():
    """We are told of it twice: when it is made ready, and when it is loaded."""
    fresh.flashinfer("0.6.14")
    said = fresh.listen()
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    asked = []

    finder = next(finder for finder in sys.meta_path if type(finder).__module__ == "flashinfer_wsfix.importer")

    def ask_once(spec, ask=finder._ask):
        asked.append(spec)
        if len(asked) == 2:
            raise LookupError("ours")
        ask(spec)

    class Lazy(importlib.abc.MetaPathFinder):
        def find_spec(self, asked, path=None, target=None):
            spec = importlib.machinery.PathFinder.find_spec(asked, path, target)
            if asked == LATE:
                spec.loader = importlib.util.LazyLoader(spec.loader)
            return spec

    finder._ask = ask_once
    sys.meta_path.insert(1, Lazy())
    module = importlib.import_module(LATE)
    assert module.__name__ == LATE and callable(module.execute_cudnn_bf16_fp4_graph)
    assert len(asked) == 2
    assert said.getvalue().count("LookupError") == 1


@fresh.process
def test_lazy_modules_of_others_stay_lazy():
    """Looking for copied names in all modules loads none that only waits to be loaded."""
    fresh.flashinfer("0.6.14")
    importlib.import_module("flashinfer")  # before, since torch itself looks at every module while that runs
    spec = importlib.util.find_spec("wave")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = sys.modules["wave"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    flashinfer_wsfix = importlib.import_module("flashinfer_wsfix")
    assert state() == "guarded"
    assert type(lazy) is not types.ModuleType  # `type` looks at no attribute
    assert flashinfer_wsfix.deactivate() == ()
    assert type(lazy) is not types.ModuleType


@fresh.process
def test_names_that_gemm_base_holds_are_not_loaded_by_looking():
    """A lazy module among its names, or an object that loads something when it is asked for an attribute."""
    fresh.flashinfer("0.6.14")
    importlib.import_module("flashinfer")
    spec = importlib.util.find_spec("wave")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    asked = []

    class Loads:
        def __getattr__(self, name):
            asked.append(name)
            raise AttributeError(name)

    sys.modules[GEMM_BASE].wave, sys.modules[GEMM_BASE].loads = lazy, Loads()
    importlib.import_module("flashinfer_wsfix")
    assert state() == "guarded"
    assert type(lazy) is not types.ModuleType and asked == []


@pytest.mark.parametrize("change", ["del __spec__", "__spec__ = None"])
@fresh.process
def test_a_module_that_does_away_with_its_spec(change, tmp_path):
    """Its import works as it does without us, and the package is looked at in its turn."""
    copy = fresh.copy("0.6.14", tmp_path, {"gemm/gemm_base.py": lambda text: f"{text}\n{change}\n"})
    fresh.flashinfer("0.6.14", copy)
    said = fresh.listen()
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    assert_guarded()
    assert len(lines(said)) == 1, said.getvalue()


@fresh.process
def test_wrappers_without_an_end():
    """A function that names itself as what it wraps, and an object that answers to every name."""
    import signal

    fresh.flashinfer("0.6.14")
    importlib.import_module("flashinfer")

    def cyclic():
        pass

    class Anything:
        __module__ = GEMM_BASE

        def __getattr__(self, name):
            return Anything()

    cyclic.__module__, cyclic.__wrapped__ = GEMM_BASE, cyclic
    vars(sys.modules[GEMM_BASE]).update(cyclic=cyclic, anything=Anything())
    signal.alarm(30)
    importlib.import_module("flashinfer_wsfix")
    assert_guarded()


@fresh.process
def test_a_second_copy_of_the_package():
    """Imported anew, as some tools do, it finds the first one's guards and adds none; what comes later is told once."""
    from unittest import mock

    import torch

    import arguments
    import fakes

    fresh.flashinfer("0.6.14")
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    cache, site = sys.modules[UTILS]._cache_buf, vars(sys.modules[GEMM_BASE])[SITE]
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer_wsfix"]:
        del sys.modules[name]
    said = fresh.listen()
    package = importlib.import_module("flashinfer_wsfix")
    assert sys.modules[UTILS]._cache_buf is cache and vars(sys.modules[GEMM_BASE])[SITE] is site
    assert state() == "guarded" and len(package.status().targets[0].sites) == 8
    with mock.patch.object(package.patching, "refresh", wraps=package.patching.refresh) as refresh:
        importlib.import_module(LATE)
    assert refresh.call_count == 1
    assert len(package.status().targets[0].sites) == 10
    assert guards_on(SITE) == guards_on(GATE) == 1
    assert "WARNING" not in said.getvalue()
    with fakes.install(sys.modules["flashinfer"]):
        for number, row in enumerate(arguments.SITES):
            own = sys.modules[UTILS]._get_cache_buf(f"{number}", 1 << 20, torch.device("cpu"))
            graph = fakes.Graph(2 << 20, look=False)
            arguments.call(row, graph, own)
            assert graph.last.numel == 40 << 20 and own.numel() == 1 << 20


MEANS = {
    "getattr": 'getattr(WORKSPACE, "resize_")(workspace_size)',
    "set_": "WORKSPACE.set_(torch.empty(workspace_size, dtype=torch.uint8))",
    "resize_as_": "WORKSPACE.resize_as_(torch.empty(workspace_size, dtype=torch.uint8))",
    "storage": "WORKSPACE.untyped_storage().resize_(workspace_size)",
    "a function of its own": "_fit(WORKSPACE, workspace_size)",
}


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("sites", ["all", "one"])
def test_a_workspace_that_is_moved_by_other_means_is_unsupported(means, sites):
    """Never not-affected, nor guarded but for one site."""
    from test_detection import GROWTH, in_fp8, judged

    grow = "    if WORKSPACE.numel() < workspace_size:\n        " + MEANS[means] + "\n"

    def change(source):
        return GROWTH.sub(lambda found: grow.replace("WORKSPACE", found[1]), source)

    verdict = judged("0.6.14", change if sites == "all" else lambda source: in_fp8(source, change))
    assert (verdict.state, verdict.sites) == ("unsupported", ())


@fresh.process
def test_strange_things_in_sys_modules():
    """Objects without names, and modules whose attributes raise, are passed over."""
    fresh.flashinfer("0.6.14")
    importlib.import_module("flashinfer")

    class Hostile:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    strange = {"none": None, "number": 7, "slots": object(), "hostile": Hostile()}
    sys.modules.update(strange)
    said = fresh.listen()
    flashinfer_wsfix = importlib.import_module("flashinfer_wsfix")
    assert (state(), guards_on(SITE)) == ("guarded", 1)
    assert "WARNING" not in said.getvalue()
    assert flashinfer_wsfix.deactivate() == ()


FAKE = {
    "flashinfer/__init__.py": "from . import gemm\n__version__ = '0.6.14'\n",
    "flashinfer/utils.py": "_cache_buf = {}\n",
    "flashinfer/gemm/__init__.py": "from .gemm_base import execute_cudnn_gemm_fp8_graph\n",
    "flashinfer/gemm/gemm_base.py": """
from ..utils import _cache_buf

def execute_cudnn_gemm_fp8_graph(graph, workspace):
    size = graph.get_workspace_size()
    if workspace.numel() < size:
        workspace.resize_(size)
    graph.execute({}, workspace)
""",
}


@pytest.mark.parametrize("kind", ["zip", "namespace"])
def test_other_kinds_of_packages(kind, tmp_path):
    other_kind(kind=kind, folder=tmp_path)


@fresh.process
def other_kind(kind, folder):
    """FlashInfer in a zip file, or without its own __init__."""
    if kind == "zip":
        with zipfile.ZipFile(folder / "flashinfer.zip", "w") as archive:
            for name, text in FAKE.items():
                archive.writestr(name, text)
        sys.path.insert(0, str(folder / "flashinfer.zip"))
    else:
        for name, text in FAKE.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "flashinfer/__init__.py").unlink()
        sys.path.insert(0, str(folder))
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module(GEMM)
    assert (state(), guards_on(SITE)) == ("guarded", 1)
    assert sys.modules[GEMM].execute_cudnn_gemm_fp8_graph is sys.modules[GEMM_BASE].execute_cudnn_gemm_fp8_graph
    importlib.reload(sys.modules[GEMM_BASE])
    assert (state(), guards_on(SITE)) == ("guarded", 1)


@fresh.process
def test_the_loader_that_others_see_is_the_one_they_know():
    """inspect.getsource, pkgutil and importlib.resources work on the guarded modules as before."""
    fresh.flashinfer("0.6.14")
    import importlib.resources
    import inspect

    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    import pkgutil

    module = sys.modules[GEMM_BASE]
    assert type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    assert inspect.getsource(module) == Path(module.__file__).read_text()
    assert inspect.getsource(getattr(module, SITE)).startswith(f"def {SITE}(")
    assert "gemm_base" in [found.name for found in pkgutil.iter_modules(sys.modules[GEMM].__path__)]
    assert importlib.resources.files(GEMM).joinpath("gemm_base.py").is_file()
