"""Other tools at the same functions: wrappers before and after ours, pickling, copying, compiling, logging."""

import copy
import functools
import importlib
import inspect
import os
import pickle
import subprocess
import sys
import threading

import pytest

import fresh
from activated import GEMM_BASE, LATE, SITE, UTILS, assert_guarded, guards_on, lines


def start(first="ours"):
    fresh.flashinfer("0.6.14")
    package = importlib.import_module("flashinfer_wsfix") if first == "ours" else None
    importlib.import_module("flashinfer")
    return package


def plain(function, seen):
    @functools.wraps(function)
    def traced(*args, **kwargs):
        seen.append(1)
        return function(*args, **kwargs)

    return traced


def with_wrapt(function, seen):
    import wrapt

    def traced(wrapped, instance, args, kwargs):
        seen.append(1)
        return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(function, traced)


TOOLS = {"functools": plain, "wrapt": with_wrapt}
EACH_TOOL = pytest.mark.parametrize("tool", TOOLS)


@EACH_TOOL
@fresh.process
def test_a_wrapper_put_around_ours(tool):
    """The guard stays, once; activating again and modules that come later change nothing about it."""
    package = start()
    base, seen = sys.modules[GEMM_BASE], []
    ours = vars(base)[SITE]
    theirs = base.__dict__[SITE] = TOOLS[tool](ours, seen)
    package.activate()
    importlib.import_module(LATE)
    assert_guarded(10)
    assert seen and vars(base)[SITE] is theirs and theirs.__wrapped__ is ours


@EACH_TOOL
@pytest.mark.parametrize("first_out", ["theirs", "ours"])
@fresh.process
def test_a_wrapper_around_ours_and_its_removal(tool, first_out):
    """Removed in either order, FlashInfer's own function is back in the end; until then the place is named."""
    said = fresh.listen()
    package = start()
    base = sys.modules[GEMM_BASE]
    ours = vars(base)[SITE]
    stock = ours.__wrapped__
    theirs = base.__dict__[SITE] = TOOLS[tool](ours, [])
    if first_out == "ours":
        (sentence,) = package.deactivate()
        assert f"{GEMM_BASE}.{SITE} stays guarded" in sentence
        assert sentence in said.getvalue()
        assert vars(base)[SITE] is theirs
        package.activate()
        assert_guarded()
        package.deactivate()
        base.__dict__[SITE] = theirs.__wrapped__
    else:
        base.__dict__[SITE] = theirs.__wrapped__
    assert package.deactivate() == ()
    assert vars(base)[SITE] is stock and guards_on("fp8_gemm_sm100") == 0


@EACH_TOOL
@fresh.process
def test_a_wrapper_that_was_there_before_us(tool):
    """A site that another tool decorated is of no known shape: nothing is guarded, and that is said."""
    start("theirs")
    said = fresh.listen()
    base = sys.modules[GEMM_BASE]
    stock = vars(base)[SITE]
    theirs = base.__dict__[SITE] = TOOLS[tool](stock, [])
    package = importlib.import_module("flashinfer_wsfix")
    assert package.status().targets[0].state == "unsupported"
    assert [line.split()[0] for line in lines(said)] == ["WARNING"]
    assert vars(base)[SITE] is theirs and guards_on("fp8_gemm_sm100") == 0
    base.__dict__[SITE] = stock
    package.activate()
    assert_guarded()


@fresh.process
def test_a_guarded_function_looks_like_the_function():
    start("theirs")
    stock = vars(sys.modules[GEMM_BASE])[SITE]
    importlib.import_module("flashinfer_wsfix")
    guarded = vars(sys.modules[GEMM_BASE])[SITE]
    assert guarded is not stock and inspect.unwrap(guarded) is stock
    assert inspect.signature(guarded) == inspect.signature(stock)
    assert inspect.getsource(guarded) == inspect.getsource(stock)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__defaults__"):
        assert getattr(guarded, name) == getattr(stock, name)
    assert inspect.isfunction(guarded) and callable(guarded)


@fresh.process
def test_pickle_and_copy():
    """As the function itself: pickled by name, copied as itself, also inside of other objects."""
    start()
    guarded = vars(sys.modules[GEMM_BASE])[SITE]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps({"site": guarded}, protocol)
        assert pickle.loads(data)["site"] is guarded
        assert b"wsfix" not in data
    assert copy.copy(guarded) is guarded
    assert copy.deepcopy({"site": [guarded]})["site"][0] is guarded


@fresh.process
def test_cloudpickle_of_a_caller():
    cloudpickle = pytest.importorskip("cloudpickle")
    start()
    guarded = vars(sys.modules[GEMM_BASE])[SITE]
    assert cloudpickle.loads(cloudpickle.dumps(guarded)) is guarded
    assert cloudpickle.loads(cloudpickle.dumps(lambda: guarded))() is guarded


def test_a_pickle_is_read_without_us():
    """What a guarded process pickles is FlashInfer's own function to a process that has never heard of us."""
    code = """
import fresh, pickle, sys, test_interplay as interplay
interplay.start()
print(pickle.dumps(vars(sys.modules[interplay.GEMM_BASE])[interplay.SITE]))
"""
    written = fresh.script(code, **os.environ)
    assert written.returncode == 0, written.stderr
    code = f"""
import fresh; fresh.flashinfer("0.6.14")
import pickle, sys; print(type(pickle.loads({written.stdout.strip()})).__name__, "flashinfer_wsfix" in sys.modules)
"""
    ran = fresh.script(code, **os.environ)
    assert ran.stdout == "function False\n", ran.stderr


@fresh.process
def test_api_logging(tmp_path=None):
    """FLASHINFER_LOGLEVEL decorates FlashInfer's public functions, not its sites: both work together."""
    os.environ["FLASHINFER_LOGLEVEL"] = "3"
    os.environ["FLASHINFER_LOGDEST"] = os.devnull
    start()
    assert_guarded()


@fresh.process
def test_flashinfers_command_line():
    pytest.importorskip("click")
    pytest.importorskip("tabulate")
    fresh.flashinfer("0.6.14")
    code = f"""
import sys; sys.path[:0] = {[path for path in sys.path if path]!r}
import fresh; fresh.flashinfer("0.6.14")
import flashinfer_wsfix, runpy
sys.argv = ["flashinfer", "--help"]
runpy.run_module("flashinfer", run_name="__main__")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "ModuleNotFoundError" in ran.stderr:
        pytest.skip(ran.stderr.strip().splitlines()[-1])
    assert ran.returncode == 0 and "show-config" in ran.stdout, ran.stderr
    assert "Traceback" not in ran.stderr


def compiled(guarded):
    """What a compiled caller of a site did: the executes, and whether the caller still runs after growth."""
    import torch

    import arguments
    import fakes

    site = arguments.SITES[4]
    function, graph = site.live(), fakes.Graph(1 << 10, look=False)
    tensors = arguments.tensors(site)
    own = sys.modules[UTILS]._get_cache_buf("bmm_fp8_workspace", 1 << 20, torch.device("cpu"))

    def caller(x):
        function(graph, *tensors, own)
        return x + 1

    with fakes.install(sys.modules["flashinfer"]):
        compiled_caller = torch.compile(caller, backend="eager")
        results = []
        for size in (1 << 10, 2 << 20, 1 << 10):
            graph.workspace_bytes = size
            results.append(compiled_caller(torch.ones(2)).tolist())
    return results, [execution.kind for execution in graph.executions]


@fresh.process
def test_torch_compile_around_a_caller():
    """With the eager back end a compiled caller of a guarded site runs as one of the stock site does."""
    start("theirs")
    import torch

    stock = compiled(guarded=False)
    torch._dynamo.reset()
    importlib.import_module("flashinfer_wsfix")
    assert guards_on(SITE) == 1
    assert compiled(guarded=True) == stock
    assert len(stock[1]) == 3


@fresh.process
def test_a_generation_is_made_with_none_of_the_callers_modes():
    """Memory pool, stream and modes are per thread in torch: a generation is made in a thread of its own.

    What vLLM's sleep mode allocates in its pool is unmapped later; only that it is another thread can be seen on a CPU.
    """
    package = start()
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    import arguments
    import fakes

    made = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.zeros:
                made.append("function mode")
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "zeros" in str(func):
                made.append("dispatch mode")
            return func(*args, **(kwargs or {}))

    zeros = torch.zeros

    def spy(*args, **kwargs):
        made.append(threading.current_thread() is threading.main_thread())
        return zeros(*args, **kwargs)

    site, graph = arguments.SITES[4], fakes.Graph(look=False)
    inputs = arguments.tensors(site)
    call = site.live()
    torch.set_default_device("meta")
    torch.zeros = spy
    with fakes.install(sys.modules["flashinfer"]), Functions(), Dispatch(), torch.inference_mode():
        own = sys.modules[UTILS]._get_cache_buf("bmm_fp8_workspace", 1 << 20, torch.device("cpu"))
        for size in (1 << 10, (40 << 20) + 1):
            graph.workspace_bytes = size
            call(graph, *inputs, own)
    torch.zeros = zeros
    torch.set_default_device(None)
    assert made == [False, False]
    for execution in graph.executions:
        assert execution.workspace.device.type == "cpu" and not execution.workspace.is_inference()
        assert type(execution.workspace) is torch.Tensor
    assert package.status().lanes[0].generation == 2


@pytest.mark.parametrize("version", ["1.14.1", "2.1.*", ""], ids=["1.14.1", "2.1", "newest"])
def test_wrapt(version, tmp_path):
    """The oldest wrapt that we allow, one between, and the newest."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, f"wrapt=={version}" if version else "wrapt"], check=True, capture_output=True)
    code = """
import fresh, importlib, sys
import activated, wrapt
assert wrapt.__file__.startswith(sys.path[0]), wrapt.__file__
fresh.flashinfer("0.6.14")
import flashinfer_wsfix, flashinfer
activated.assert_guarded()
import copy, pickle
site = vars(sys.modules[activated.GEMM_BASE])[activated.SITE]
assert copy.deepcopy(site) is site and pickle.loads(pickle.dumps(site)) is site
assert flashinfer_wsfix.deactivate() == ()
activated.assert_stock()
"""
    ran = fresh.script(code, tmp_path, **os.environ)
    assert ran.returncode == 0, ran.stderr
