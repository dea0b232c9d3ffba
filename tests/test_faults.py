"""Whatever we call outside of this package raises in turn; the host's import and its calls work each time."""

import gc
import importlib
import os
import re
import sys
import traceback
from types import BuiltinFunctionType, FrameType

import pytest

import fresh

GEMM, UTILS = "flashinfer.gemm", "flashinfer.utils"
# Calls that are the host's own, passed on: their errors are the host's, and come out as they are.
THEIRS = ("exec_module", "find_spec", "load_module")
PLAIN = (str, bytes, int, list, dict, tuple, set, frozenset)  # their methods do not fail


class Injected(Exception):
    """An error that nobody expects."""


class Fault:
    """Raises at the n-th call that a function of ours makes to anything outside of the package; n = 0 only counts.

    A call in a loop counts once, except for `setattr`: each of our patches fails in turn.
    """

    def __init__(self, n):
        self.n, self.count, self.where, self.seen = n, 0, "", set()

    def __call__(self, frame: FrameType, event: str, callee: object) -> None:
        if event == "c_call" and self.ours(frame):
            assert isinstance(callee, BuiltinFunctionType) or callable(callee)
            caller, name = frame, getattr(callee, "__qualname__", repr(callee))
            owner = getattr(callee, "__self__", None)
            if callee is not setattr and (
                owner is sys.modules["builtins"] or isinstance(owner, PLAIN) or isinstance(callee, type(str.join))
            ):
                return
        elif event == "call" and frame.f_back is not None and self.ours(frame.f_back):
            caller, name = frame.f_back, frame.f_code.co_name
            if self.ours(frame) or name in THEIRS or name.startswith("execute_cudnn_"):
                return
        else:
            return
        if name in ("parent", "_handle_fromlist") and "flashinfer_wsfix.patching" in sys.modules:
            return  # `from . import patching`, once it is loaded, is a look into a dictionary
        call = (caller.f_code, caller.f_lineno, name, self.count if callee is setattr else None)
        if call in self.seen:
            return
        self.seen.add(call)
        self.count += 1
        if self.count == self.n:
            self.where = f"{name}, called from {caller.f_code.co_name}:{caller.f_lineno}"
            raise Injected(self.where)

    @staticmethod
    def ours(frame):
        return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "flashinfer_wsfix"

    def __enter__(self):
        import threading

        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *error):
        import threading

        sys.setprofile(None)
        threading.setprofile(None)


def sites_work():
    """Call every site, by position and by keyword; all of FlashInfer's half is wrapped, or nothing."""
    import torch
    from flashinfer_wsfix import guards

    import arguments
    import fakes

    for number, site in enumerate(arguments.SITES[:8]):
        own = sys.modules[UTILS]._get_cache_buf(f"{site}", 1 << 20, torch.device("cpu"))
        for style in ("positional", "keyword"):
            graph = fakes.Graph(1 << 10, look=False)
            arguments.call(site, graph, own, style)
            assert len(graph.executions) == 1, number
    guarded = sum(guards.is_guarded(site.live()) for site in arguments.SITES[:8])
    base = sys.modules["flashinfer.gemm.gemm_base"]
    gates = guards.is_guarded(base.fp8_gemm_sm100) + guards.is_guarded(base.bf16_gemm_sm100)
    cache = "Retiring" in type(sys.modules[UTILS]._cache_buf).__name__
    assert (guarded, gates, cache) in [(0, 0, False), (8, 2, True)], "half a patch"
    state = sys.modules["flashinfer_wsfix"].status().targets[0].state
    assert (state == "guarded") == (guarded == 8), state


def each_fault(attempt, prepare=lambda: None):
    """Run `attempt` once for each call that it makes us make, each in a fork; list what went wrong."""
    wrong, n, total = [], 0, None
    gc.freeze()  # else each fork copies the pages of all that is there by collecting
    while total is None or n <= total:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = fresh.listen()
            fault = Fault(n)
            problem = ""
            try:
                prepare()
                with fault:
                    attempt()
                sites_work()
                # One line each; what is written where even the log could not be had starts with our name.
                if len(re.findall("^(?:WARNING|flashinfer-wsfix)", said.getvalue(), re.MULTILINE)) > 1:
                    problem = f"more than one warning:\n{said.getvalue()}"
                if n == 0:
                    problem = str(fault.count)
                elif not fault.where:
                    problem = "end"
            except BaseException:
                problem = traceback.format_exc() + said.getvalue()
            os.write(
                write, (f"{fault.where}\n{problem}" if problem not in ("", "end") and n else problem).encode()[:60000]
            )
            os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            answer = pipe.read().decode()
        os.waitpid(child, 0)
        if n == 0:
            assert answer.isdecimal() and int(answer) > 3, answer
            total = int(answer)
        elif answer == "end":
            break
        elif answer:
            wrong.append(f"--- call {n} of {total}: {answer}")
        n += 1
    print(f"{n - 1} calls failed in turn")
    assert not wrong, f"{len(wrong)} of {total}\n" + "\n".join(wrong)


def without_gemm():
    """A process where FlashInfer is imported except for its GEMM package, and the device is fake."""
    import fakes

    os.environ["FLASHINFER_WSFIX_WORKSPACE_MIB"] = "2"  # for speed
    fresh.flashinfer("0.6.14")
    flashinfer = importlib.import_module("flashinfer")
    undo = fakes.install(flashinfer)
    for name in [name for name in sys.modules if name.startswith(GEMM)]:
        del sys.modules[name]
    return undo


@pytest.mark.parametrize("loaded", [False, True], ids=["first-import", "our-modules-loaded"])
@fresh.process
def test_activation_on_import(loaded):
    """The import hook: our own modules, wrapt, the reading of FlashInfer, the patches, the log."""
    importlib.import_module("wrapt")
    with without_gemm():
        if loaded:
            importlib.import_module("flashinfer_wsfix.patching")
            sys.modules["flashinfer_wsfix"].deactivate()

        def attempt():
            importlib.import_module("flashinfer_wsfix").activate("test")
            importlib.import_module(GEMM)

        if not loaded:  # what stands before our own guard is the user's own import statement
            importlib.import_module("flashinfer_wsfix")
        each_fault(attempt)


@fresh.process
def test_activation_after_import():
    with without_gemm():
        importlib.import_module(GEMM)
        importlib.import_module("flashinfer_wsfix.patching")
        sys.modules["flashinfer_wsfix"].deactivate()
        each_fault(lambda: sys.modules["flashinfer_wsfix"].activate("test"))


@fresh.process
def test_reload_while_guarded():
    """The second look, at a reload: the guard that a fault costs is said to be lost."""
    with without_gemm():
        importlib.import_module("flashinfer_wsfix")
        importlib.import_module(GEMM)
        each_fault(lambda: importlib.reload(sys.modules["flashinfer.gemm.gemm_base"]))


@pytest.mark.parametrize("style", ["positional", "keyword"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@fresh.process
def test_calls_of_a_site(style, captured):
    """The first call of a lane, an ordinary one, one that grows it, and one after that."""
    import torch

    import arguments
    import fakes

    with without_gemm():
        importlib.import_module("flashinfer_wsfix")
        importlib.import_module(GEMM)
        site = arguments.SITES[4]

        def attempt():
            own = sys.modules[UTILS]._cache_buf["bmm_fp8_workspace", torch.device("cpu")]
            graph = fakes.Graph(look=False)
            for number, size in enumerate((1 << 10, 1 << 10, (2 << 20) + 256, 1 << 10), 1):
                graph.workspace_bytes = size
                if captured:
                    with fakes.capturing():
                        arguments.call(site, graph, own, style)
                else:
                    arguments.call(site, graph, own, style)
                assert len(graph.executions) == number

        def prepare():
            sys.modules[UTILS]._get_cache_buf("bmm_fp8_workspace", 1 << 20, torch.device("cpu"))

        each_fault(attempt, prepare)


def test_a_call_while_the_interpreter_ends(tmp_path):
    """From an exit handler, and later on, when a thread that is started would never run."""
    last_calls(folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atexit", "finalizing"]


@fresh.process
def last_calls(folder):
    import atexit
    import faulthandler
    from pathlib import Path

    import torch

    import arguments
    import fakes

    without_gemm()
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module(GEMM)
    faulthandler.dump_traceback_later(30, exit=True)

    site, inputs = arguments.SITES[4].live(), arguments.tensors(arguments.SITES[4])
    own = {
        when: sys.modules[UTILS]._get_cache_buf(when, 1 << 20, torch.device("cpu")) for when in ("atexit", "finalizing")
    }

    def call(when):
        assert sys.is_finalizing() == (when == "finalizing")
        for size in (1 << 10, 3 << 20):  # FlashInfer's own buffer does for one, and not for the other
            graph = fakes.Graph(size)
            site(graph, *inputs, own[when])
            assert len(graph.executions) == 1 and graph.last.zeroed
        Path(folder, when).touch()

    class Last:
        def __del__(self):
            call("finalizing")

    atexit.register(call, "atexit")
    sys.last_value = Last()  # among the first that the interpreter clears
