"""Other import hooks, loaders, lazy modules and kinds of packages beside ours: each goes on as it was."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import zipfile
from pathlib import Path

import pytest

import fresh
from activated import GATE, GEMM, GEMM_BASE, LATE, SITE, UTILS, assert_guarded, guards_on, lines, state


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
