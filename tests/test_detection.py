"""Detection reads what a FlashInfer does from its code: live and from source, of known releases and unknown shapes."""

import ast
import functools
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from flashinfer_wsfix import activation, detection, names
from flashinfer_wsfix.cli import installed

import arguments
import fresh
import releases

EIGHT = [f"{site.module}.{site.function}" for site in arguments.SITES if site.module == names.GEMM_BASE]
TEN = [f"{site.module}.{site.function}" for site in arguments.SITES]
FACTS = {
    "0.5.3": ("not-affected", []),
    "0.6.11.post3": ("not-affected", []),
    **{release: ("guarded", EIGHT) for release in releases.EIGHT_SITES},
    **{release: ("guarded", TEN) for release in releases.TEN_SITES},
    "0.7.0": ("not-needed", []),
    "0.7.4": ("not-needed", []),
}
PUBLISHED = Path(__file__).parents[2] / "shared" / "flashinfer_releases.json"
STATES = {"call-local": "not-affected", "move": "guarded", "fixed": "not-needed"}
MODULES = (names.GEMM_BASE, names.SITE_MODULES[1])


def folder(release):
    """Where a release is: the default ones and 0.5.3 are fetched, others are read where they have been."""
    made = releases.FOLDER / release
    if release not in (*releases.DEFAULT, *releases.STATIC) and not made.exists():
        pytest.skip(f"{release} is not fetched")
    return releases.fetch(release)


def source_of(release, module=names.GEMM_BASE):
    return (folder(release) / (module.replace(".", "/") + ".py")).read_text()


def judged(release, change=lambda source: source):
    """The verdict on a release's source, changed by `change`; never run."""
    functions = []
    for module in MODULES:
        if (folder(release) / (module.replace(".", "/") + ".py")).exists():
            source = source_of(release, module)
            functions += detection.source_functions(module, change(source) if module == names.GEMM_BASE else source)
    return detection.judge(functions, release)


# --- one property at a time, on sources of a few lines ----------------------------------------------------------------

SITE = """
def run(graph, workspace, size):
    if workspace.numel() < size:
        workspace.resize_(size)
    graph.execute({}, workspace)
"""
GRAPH = "def plain(graph):\n    graph.execute({})\n"  # where nothing at all executes one, nothing is known
GATE = "def fp8_gemm_sm100(a, runner_names): pass\n"
GATE_RENAMED = GATE.replace("runner_names", "names")


def judged_lines(source, module=names.GEMM_BASE):
    return detection.judge(list(detection.source_functions(module, source)), "1.0")


def growing(statement):
    """A function that executes a graph, and does this where its workspace is too small."""
    return SITE.replace("workspace.resize_(size)", statement)


SHAPES = {
    "a site": (SITE, "guarded"),
    "an execute by plan": (SITE.replace("execute", "execute_plan_at_index"), "guarded"),
    "a generator": (SITE + "    yield\n", "unsupported"),
    "a coroutine": (SITE.replace("def", "async def"), "unsupported"),
    "an asynchronous generator": (SITE.replace("def", "async def") + "    yield\n", "unsupported"),
    "a site in a function": ("def make():" + SITE.replace("\n", "\n    "), "unsupported"),
    "no comparison of sizes": (SITE.replace("workspace.numel()", "len(workspace)"), "unsupported"),
    "no graph": (SITE.replace("execute", "replay"), "unsupported"),
    "another parameter that is resized": (SITE.replace("workspace.resize_", "graph.resize_"), "unsupported"),
    "a gate": (SITE + GATE, "guarded"),
    "a gate without its parameter": (SITE + GATE_RENAMED, "unsupported"),
    "a gate that is decorated": (f"{SITE}@cache\n{GATE}", "unsupported"),
    "a gate of an unknown shape and no site": (GRAPH + GATE_RENAMED, "not-affected"),
    "growth by other means": (growing("workspace = torch.ones(size)"), "unsupported"),
    "growth by set_": (growing("workspace.set_(torch.empty(size))"), "unsupported"),
    "growth by resize_as_": (growing("workspace.resize_as_(torch.empty(size))"), "unsupported"),
    "a move that compares no sizes": (growing("workspace.set_(buffer)").replace("numel", "size"), "unsupported"),
    "a move where no graph is executed": (
        GRAPH + "def run(workspace, size):\n    workspace.set_(size)\n",
        "not-affected",
    ),
    "a call-local buffer": (growing("workspace = torch.empty(size)"), "not-affected"),
    "a comparison of sizes alone": (GRAPH + growing("raise ValueError").replace("execute", "check"), "not-affected"),
    "a comparison with nothing of ours": (growing("pass").replace("workspace", "scratchpad"), "not-affected"),
    "a graph alone": ("def run(graph, workspace):\n    graph.execute({}, workspace)\n", "not-affected"),
    "a fix where no graph is executed": (GRAPH + "def make(size):\n    return torch.zeros(size)\n", "not-affected"),
    "nothing that executes a graph": ("def make(size):\n    return torch.empty(size)\n", "unsupported"),
    "nothing": ("", "unsupported"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_source_with(shape):
    source, state = SHAPES[shape]
    verdict = judged_lines(source)
    assert (verdict.state, verdict.sites) == (state, (f"{names.GEMM_BASE}.run",) if state == "guarded" else ())


@pytest.mark.parametrize("shape", SHAPES)
def test_live_module_with(shape):
    """It is judged as its source is."""
    source, _ = SHAPES[shape]
    module = types.ModuleType(names.GEMM_BASE)
    module.cache = functools.cache
    exec(source, vars(module))
    assert detection.judge(list(detection.live_functions(module)), "1.0") == judged_lines(source)


def test_a_site_in_another_module_is_unsupported():
    """A sibling that took the sites over, whatever is left of the modules that had them: never an all-clear."""
    functions = list(detection.source_functions("flashinfer.gemm.cudnn_executors", SITE))
    assert detection.judge(functions, "1.0").state == "unsupported"
    functions += detection.source_functions(names.GEMM_BASE, GRAPH)
    verdict = detection.judge(functions, "1.0")
    assert (verdict.state, "cudnn_executors.run is in another module" in verdict.reason) == ("unsupported", True)


def test_a_function_with_the_name_of_a_gate_elsewhere_is_no_gate():
    assert judged_lines(SITE + GATE_RENAMED, names.SITE_MODULES[1]).state == "guarded"


def test_of_two_problems_the_first_is_named():
    source = SITE.replace("def", "async def") + SITE.replace("run", "other").replace("numel", "size")
    assert f"({names.GEMM_BASE}.run is decorated" in judged_lines(source).reason


LIVE = """
from json import dumps
import functools

def plain():
    def inner(): pass

@functools.wraps(plain)
def around(): pass

class Class:
    attribute = 1
    def method(self): pass

def last(): pass
"""


def test_live_functions_are_a_modules_own_with_what_they_hold():
    """A guard of ours, and what was put around it, does not show."""
    from flashinfer_wsfix import guards

    module = types.ModuleType("live")
    exec(LIVE, vars(module))
    plain = module.plain
    guarded = guards.Guard(plain, lambda wrapped, instance, args, kwargs: None)
    for module.plain in (plain, guarded, functools.wraps(guarded)(lambda: None)):
        assert [(function.name, function.direct) for function in detection.live_functions(module)] == [
            ("plain", True), ("plain.inner", False), ("around", False), ("around.inner", False), ("Class", False),
            ("last", True),
        ]  # fmt: skip
        assert all(function.module == "live" for function in detection.live_functions(module))


def test_an_object_that_answers_to_every_name_is_no_guard():
    class Endless:
        def __getattr__(self, name):
            return self

    assert detection.guard_in(Endless()) is detection.guard_in(print) is None


def test_the_installed_flashinfer_is_judged_without_an_import(tmp_path, monkeypatch):
    """It may be missing, a mere folder, without metadata, or have a package where others have a file."""
    from importlib import invalidate_caches, metadata  # noqa: F401, while sys.path is whole

    real = folder("0.6.18.post1")

    def judged_at(path):
        monkeypatch.setattr(sys, "path", [str(path)])
        invalidate_caches()
        return installed.read_flashinfer()[0]

    assert judged_at(tmp_path) is None
    (tmp_path / "flashinfer/gemm/gemm_base").mkdir(parents=True)
    assert judged_at(tmp_path) is None
    (tmp_path / "flashinfer/__init__.py").write_text("raise SystemExit")
    verdict = judged_at(tmp_path)
    assert (verdict.state, "of unknown version" in verdict.reason) == ("unsupported", True)
    (tmp_path / "flashinfer/gemm/gemm_base/__init__.py").write_text(SITE, encoding="utf-8-sig")
    assert judged_at(tmp_path).sites == (f"{names.GEMM_BASE}.run",)
    verdict = judged_at(real)
    assert (sorted(verdict.sites), "FlashInfer 0.6.18.post1 " in verdict.reason) == (sorted(TEN), True)


RESIZED = f"""
import sys
from flashinfer_wsfix.detection import resized

def parameter(workspace, size):
    workspace.resize_(size)

def attribute(holder, size):
    holder.buffer.resize_(size)

def anything_else(holder, workspace, size):
    holder[workspace].resize_(size)
    make().resize_(size)

def two_names_at_once(first, second, third):
    print(second, first.resize_(third), first, second.resize_(third), second, third.resize_(first))

def after_the_255th_name(workspace, size):
    {"; ".join(f"name_{number}" for number in range(700))}
    workspace.resize_(size)
    workspace.buffer.resize_(size)

def kept_in_a_closure(workspace, size):
    made = size
    print(lambda: made)
    workspace.resize_(size)

def held_by_a_closure(workspace, size):
    workspace.resize_(size)
    return lambda: workspace

def not_called(workspace):
    workspace.resize_

def not_resized(workspace):
    workspace.numel()

ours = [value for value in vars().values() if getattr(value, "__module__", None) == "__main__"]
print({{function.__name__: resized(function.__code__) for function in ours}})
"""


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_resized_reads_the_bytecode_of_other_pythons(version):
    package = str(Path(detection.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {package!r})\n{RESIZED}"
    ran = subprocess.run([python(version), "-S", "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ast.literal_eval(ran.stdout) == {
        "parameter": ["workspace"],
        "attribute": [".buffer"],
        "anything_else": ["", ""],
        "two_names_at_once": ["first", "second", "third"],
        "after_the_255th_name": ["workspace", ".buffer"],
        "kept_in_a_closure": ["workspace"],
        "held_by_a_closure": [""],
        "not_called": ["workspace"],
        "not_resized": [],
    }


# --- releases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", FACTS)
def test_source_of_a_release(release):
    state, names = FACTS[release]
    verdict = judged(release)
    assert (verdict.state, sorted(verdict.sites)) == (state, sorted(names))
    assert release in verdict.reason


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the file of facts is not here")
@pytest.mark.parametrize("release", FACTS)
def test_source_agrees_with_the_file_of_facts(release):
    """Every site's module, function, parameter and position are those that were read by hand."""
    facts = json.loads(PUBLISHED.read_text())[release]
    verdict = judged(release)
    assert verdict.state == STATES[facts["state"]]
    found = set()
    for module in MODULES:
        if (folder(release) / (module.replace(".", "/") + ".py")).exists():
            for function in detection.source_functions(module, source_of(release, module)):
                for name in detection.resized(function.code):
                    found.add((module, function.name, name, detection.parameters(function.code).index(name)))
    assert found == {(row["module"], row["function"], row["parameter"], row["position"]) for row in facts["sites"]}


@pytest.mark.parametrize("release", [release for release in FACTS if release not in releases.STATIC])
def test_live_and_source_agree(release):
    folder(release)
    live_agrees(release=release)


@fresh.process
def live_agrees(release):
    """Both readings of one release give the same verdict, also once its sites are guarded."""
    fresh.flashinfer(release)
    import flashinfer  # noqa: F401

    def live():
        modules = [sys.modules[name] for name in MODULES if name in sys.modules]
        return detection.judge([f for module in modules for f in detection.live_functions(module)], release)

    from importlib.util import find_spec

    if find_spec(names.SITE_MODULES[1]):
        __import__(names.SITE_MODULES[1])
    activation.deactivate()
    before = live()
    assert before == judged(release)
    activation.activate()
    assert live() == before


# --- the shapes of upstream's fixes -----------------------------------------------------------------------------------

GROWTH = re.compile(r"    if (workspace\w*)\.numel\(\) < workspace_size:\n        \1\.resize_\(workspace_size\)\n")


def call_local(source):
    """Pull request #4553: a buffer of the call's own, zeroed."""
    made = "torch.zeros(workspace_size, dtype=torch.uint8, device=a.device)"
    return GROWTH.sub(rf"    if \1.numel() < workspace_size:\n        \1 = {made}\n", source)


def grow_workspace(source):
    """Pull request #4399: a larger buffer takes the old one's place in the cache, which is kept."""
    helper = """
_retired_cache_buf = []

def _grow_workspace(workspace, workspace_size):
    if workspace.numel() >= workspace_size:
        return workspace
    _retired_cache_buf.append(workspace)
    return torch.zeros(workspace_size, dtype=torch.uint8, device=workspace.device)
"""
    return GROWTH.sub(r"    \1 = _grow_workspace(\1, workspace_size)\n", source) + helper


def at_least(source):
    """Pull request #4666, as it is in 0.7.0."""
    helper = """
def _gemm_workspace_at_least(workspace, workspace_size):
    if workspace.numel() >= workspace_size:
        return workspace
    return torch.empty(workspace_size, dtype=torch.uint8, device=workspace.device)
"""
    return GROWTH.sub(r"    \1 = _gemm_workspace_at_least(\1, workspace_size)\n", source) + helper


FIXED = {"#4553": call_local, "#4399": grow_workspace, "#4666": at_least}
BF16_FP4 = "gemm/gemm_bf16_fp4_cudnn.py"


@pytest.mark.parametrize("request_", FIXED)
def test_source_with_an_upstream_fix(request_):
    functions = []
    for module in MODULES:
        functions += detection.source_functions(module, FIXED[request_](source_of("0.6.14", module)))
    verdict = detection.judge(functions, "0.6.14")
    assert verdict.state == "not-needed"
    assert request_ in verdict.reason


@pytest.mark.parametrize("request_", FIXED)
@fresh.process
def test_upstream_fix_is_left_alone(request_, tmp_path):
    """Nothing is wrapped, and the log says once that the package can be removed."""
    change = FIXED[request_]
    fresh.flashinfer("0.6.14", fresh.copy("0.6.14", tmp_path, {"gemm/gemm_base.py": change, BF16_FP4: change}))
    said = fresh.listen()
    assert untouched() == "not-needed"
    lines = said.getvalue().splitlines()
    assert len(lines) == 1 and lines[0].startswith("INFO ") and "can be removed" in lines[0]


def untouched():
    """Import FlashInfer after us; the state, once it is sure that nothing of it was replaced."""
    import flashinfer_wsfix

    __import__("flashinfer")
    __import__(names.SITE_MODULES[1])
    flashinfer_wsfix.activate()
    from flashinfer_wsfix import guards, workspace

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("flashinfer."):
            assert not [name for name, value in vars(module).items() if guards.is_guarded(value)]
    assert type(sys.modules[names.UTILS]._cache_buf) is not workspace.RetiringCache
    return flashinfer_wsfix.status().targets[0].state


# --- shapes that nobody knows -----------------------------------------------------------------------------------------

FP8 = "execute_cudnn_gemm_fp8_graph"
HEAD = f"def {FP8}("


def in_fp8(source, change):
    """Apply `change` to the source of one site alone."""
    start = source.index(HEAD)
    end = re.compile(r"^(?=\S)(?!\))", re.MULTILINE).search(source, start + 1).start()
    return source[:start] + change(source[start:end]) + source[end:]


def renamed(source):
    return in_fp8(source, lambda text: re.sub(r"\bworkspace\b", "scratchpad", text))


def gone(source):
    def change(text):
        text = re.sub(r"\n    workspace(: [\w.]+)?,(?=\n)", "", text, count=1)
        return text.replace("    workspace_size =", "    workspace = torch.empty(0)\n    workspace_size =", 1)

    return in_fp8(source, change)


def decorated(source):
    decorator = """
def _traced(function):
    @functools.wraps(function)
    def traced(*args, **kwargs):
        return function(*args, **kwargs)
    return traced

@_traced
"""
    return source.replace(HEAD, decorator + HEAD)


def cached(source):
    return source.replace(HEAD, "@functools.lru_cache(maxsize=None)\n" + HEAD)


def resized_by_another(source):
    """The growth moves into a function of its own, which executes no graph."""
    helper = "\ndef _fit(workspace, size):\n    if workspace.numel() < size:\n        workspace.resize_(size)\n"
    return GROWTH.sub(r"    _fit(\1, workspace_size)\n", source) + helper


def nested(source):
    body = "\n    def _fit():\n        workspace.resize_(workspace_size)\n"
    return in_fp8(
        source, lambda text: GROWTH.sub(rf"{body}    if workspace.numel() < workspace_size:\n        _fit()\n", text)
    )


def asynchronous(source):
    return source.replace(HEAD, f"async {HEAD}")


def in_a_class(source):
    return in_fp8(source, lambda text: "class Executor:\n" + re.sub(r"^(?=.)", "    ", text, flags=re.MULTILINE) + "\n")


def twice(source):
    return in_fp8(source, lambda text: GROWTH.sub(lambda found: found[0] * 2, text))


def by_keyword_only(source):
    return in_fp8(source, lambda text: re.sub(r"(\n    workspace\b)", r"\n    *,\1", text, count=1))


def without_runner_names(source):
    return re.sub(r"\brunner_names\b", "names_of_runners", source)


def on_an_attribute(source):
    return in_fp8(source, lambda text: text.replace("workspace.resize_(", "workspace.data.resize_("))


UNKNOWN = [renamed, gone, decorated, cached, resized_by_another, nested, asynchronous, in_a_class, twice]
UNKNOWN += [by_keyword_only, without_runner_names, on_an_attribute]
BY_NAME = {change.__name__: change for change in UNKNOWN}


@pytest.mark.parametrize("shape", BY_NAME)
def test_source_of_an_unknown_shape(shape):
    assert source_of("0.6.14") != BY_NAME[shape](source_of("0.6.14"))
    verdict = judged("0.6.14", BY_NAME[shape])
    assert (verdict.state, verdict.sites) == ("unsupported", ())


@pytest.mark.parametrize("shape", BY_NAME)
@fresh.process
def test_unknown_shape_is_left_alone(shape, tmp_path):
    """One site in an unknown shape: not one of the others is wrapped, and one warning names the consequence."""
    fresh.flashinfer("0.6.14", fresh.copy("0.6.14", tmp_path, {"gemm/gemm_base.py": BY_NAME[shape]}))
    said = fresh.listen()
    assert untouched() == "unsupported"
    lines = said.getvalue().splitlines()
    assert len(lines) == 1 and lines[0].startswith("WARNING ") and "freed memory" in lines[0]


@pytest.mark.parametrize(
    "cache", ["collections.OrderedDict()", "collections.defaultdict(list)", "weakref.WeakValueDictionary()", "None"]
)
@fresh.process
def test_a_cache_of_another_type(cache, tmp_path):
    def change(source):
        return re.sub(r"^_cache_buf\b.*$", f"import collections, weakref\n_cache_buf = {cache}", source, flags=re.M)

    fresh.flashinfer("0.6.14", fresh.copy("0.6.14", tmp_path, {"utils.py": change}))
    said = fresh.listen()
    assert untouched() == "unsupported"
    assert said.getvalue().count("WARNING ") == 1 and said.getvalue().count("\n") == 1


DECORATED = "@functools.lru_cache\ndef execute_cudnn_bf16_fp4_graph("
REPLACED = "\nexecute_cudnn_bf16_fp4_graph = functools.lru_cache(execute_cudnn_bf16_fp4_graph)\n"


@pytest.mark.parametrize("shown", [True, False], ids=["its code shows it", "only its import does"])
@fresh.process
def test_a_late_module_of_an_unknown_shape(shown, tmp_path):
    """gemm_bf16_fp4_cudnn is imported on demand and judged by its code before: the verdict does not change then.

    Where it turns out unknown all the same, the eight others are put back too.
    """

    def change(source):
        if shown:
            source = source.replace("def execute_cudnn_bf16_fp4_graph(", DECORATED)
        return "import functools\n" + source + REPLACED * (not shown)

    fresh.flashinfer("0.6.14", fresh.copy("0.6.14", tmp_path, {BF16_FP4: change}))
    import flashinfer_wsfix

    said = fresh.listen()
    __import__("flashinfer")
    assert flashinfer_wsfix.status().targets[0].state == ("unsupported" if shown else "guarded")
    assert untouched() == "unsupported"
    assert [line.split()[0] for line in said.getvalue().splitlines()] == ["INFO"] * (not shown) + ["WARNING"]


@pytest.mark.parametrize("place", ["gemm/cudnn_sites.py", "gemm/inner/cudnn_sites.py"])
@fresh.process
def test_sites_that_moved_to_a_sibling_are_unsupported(place, tmp_path):
    """Also into a package below: the two late ones are gone, and two others move."""
    copy = fresh.copy("0.6.14", tmp_path, {})
    folder = copy / "flashinfer"
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).parent.joinpath("__init__.py").touch()
    (folder / BF16_FP4).rename(folder / place)
    fresh.flashinfer("0.6.14", copy)
    import flashinfer_wsfix

    __import__("flashinfer")
    target = flashinfer_wsfix.status().targets[0]
    assert (target.state, "is in another module" in target.reason) == ("unsupported", True)


@fresh.process
def test_a_file_that_cannot_be_read_any_more_takes_no_guard_away():
    """By the time that the late module comes, none can be opened any more."""
    fresh.flashinfer("0.6.14")
    import flashinfer_wsfix

    def unreadable(*args):
        raise OSError("too many open files")

    __import__("flashinfer")
    sys.modules["flashinfer_wsfix.guards"].gemm_functions = unreadable
    __import__(names.SITE_MODULES[1])
    assert (flashinfer_wsfix.status().targets[0].state, len(flashinfer_wsfix.status().targets[0].sites)) == (
        "guarded", 10
    )  # fmt: skip


@fresh.process
def test_an_overlay_with_two_stock_sites_is_guarded_from_the_start(tmp_path):
    """#4553's gemm_base over 0.6.14: its two later sites move as before: a verdict, a gate, no all-clear."""
    copy = fresh.copy("0.6.14", tmp_path, {"gemm/gemm_base.py": call_local})
    fresh.flashinfer("0.6.14", copy)
    import flashinfer_wsfix

    said = fresh.listen()
    __import__("flashinfer")
    before = flashinfer_wsfix.status()
    assert (before.targets[0].state, before.targets[0].sites, before.gates) == ("guarded", (), ("fp8", "bf16"))
    __import__(names.SITE_MODULES[1])
    after = flashinfer_wsfix.status().targets[0]
    assert (after[:4], len(after.sites)) == (before.targets[0][:4], 2)
    assert "can be removed" not in said.getvalue() and said.getvalue().count("\n") == 1


def test_source_with_a_syntax_error():
    with pytest.raises(SyntaxError):
        list(detection.source_functions(names.GEMM_BASE, "def f(:\n"))


def test_a_number_of_a_version_decides_nothing():
    """An overlay, new code under an old number and the other way round, is judged by its code."""
    functions = list(detection.source_functions(names.GEMM_BASE, source_of("0.7.4")))
    assert detection.judge(functions, "0.6.14").state == "not-needed"
    functions = list(detection.source_functions(names.GEMM_BASE, source_of("0.6.14")))
    assert detection.judge(functions, "0.7.4").state == "guarded"


# --- other Pythons' bytecode ------------------------------------------------------------------------------------------


def python(version):
    """Find another interpreter: on PATH, or installed beside this one."""
    found = [shutil.which(f"python{version}")]
    found += sorted(map(str, Path(sys.base_prefix).parent.glob(f"{version}*/bin/python{version}")))
    for path in filter(None, found):
        ask = subprocess.run([path, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], stdout=subprocess.PIPE)
        if ask.stdout.decode().strip() == version:
            return path
    pytest.skip(f"there is no Python {version}")


READ = """
import sys
import types
from pathlib import Path
from flashinfer_wsfix import detection, names
for folder in sys.argv[1:]:
    functions = []
    for module in names.SITE_MODULES:
        file = Path(folder, module.replace(".", "/") + ".py")
        if file.exists():
            functions += detection.source_functions(module, file.read_text(encoding="utf-8"))
    print(repr(tuple(detection.judge(functions, Path(folder).name))))
"""


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_bytecode_of_other_pythons(version, tmp_path):
    """Source is judged alike by each Python's bytecode, without torch or wrapt, the unknown shapes too."""
    fetched = [release for release in FACTS if (releases.FOLDER / release).exists()]
    shapes = {name: tmp_path / name for name in BY_NAME}
    for name, changed in shapes.items():
        (changed / "flashinfer/gemm").mkdir(parents=True)
        (changed / "flashinfer/gemm/gemm_base.py").write_text(BY_NAME[name](source_of("0.6.14")))
    folders = [str(releases.FOLDER / release) for release in fetched] + [str(path) for path in shapes.values()]
    package = str(Path(detection.__file__).parents[1])
    ran = subprocess.run(
        [python(version), "-S", "-c", f"import sys; sys.path.insert(0, {package!r})\n{READ}", *folders],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[: len(fetched)] == [repr(tuple(judged(release))) for release in fetched]
    assert [line.split(",")[0] for line in lines[len(fetched) :]] == ["('unsupported'"] * len(shapes)
