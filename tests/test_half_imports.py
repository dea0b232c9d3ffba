"""Activated, deactivated or failing in the middle of an import, and by many threads at once."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import sys
import threading

import pytest

import fresh
from activated import GEMM, GEMM_BASE, LATE, SITE, UTILS, assert_guarded, guards_on, lines, state

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
