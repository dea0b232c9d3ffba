"""Run a test in a fresh process that has torch in it and what FlashInfer imports, and nothing of FlashInfer or of ours.

It is a fork of one small server, since an import of torch takes longer than most of the tests.
"""

import atexit
import ctypes
import faulthandler
import functools
import gc
import importlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 240  # after which a test is ended with the stacks of its threads: a deadlock is a failure, not a wait
# Large buffers in large pages: a new generation is 40 MiB, which would be ten thousand page faults.
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
PRELOADED = ("pytest", "torch", "fakes", "releases", "filelock", "jinja2", "packaging.version", "pynvml", "requests")
PRELOADED += ("statistics", "tvm_ffi")


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    command, environment = [sys.executable, __file__], {**os.environ, **LARGE_PAGES}
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.communicate)
    return server


def _ask(module: str, name: str, arguments: dict[str, Any]) -> tuple[int, str]:
    """Have the server run a function that `process` decorates; return its exit code, and what it printed."""
    server = _server()
    assert server.stdin and server.stdout
    with tempfile.NamedTemporaryFile() as output:
        pickle.dump((module, name, arguments, output.name), server.stdin)
        server.stdin.flush()
        ended = int(server.stdout.readline())
        return ended, output.read().decode(errors="replace")


def process(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test: its body runs in a fresh process, where nothing has to be undone."""

    @functools.wraps(test)
    def in_fresh_process(**arguments: Any) -> None:
        ended, printed = _ask(test.__module__, test.__name__, arguments)
        if ended == 0:
            return
        import pytest

        if ended == SKIPPED:
            pytest.skip(printed.strip().splitlines()[-1])
        pytest.fail(f"ended with {ended}:\n{printed}", pytrace=False)

    return in_fresh_process


SKIPPED = 5


def script(code: str, *path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as `python -c` would, with this environment and `path` first on its import path."""
    with tempfile.NamedTemporaryFile() as printed:
        arguments = {"code": code, "path": [*map(str, path)], "environment": environment, "printed": printed.name}
        ended, said = _ask(__name__, "_script", arguments)
        return subprocess.CompletedProcess(code, ended, printed.read().decode(errors="replace"), said)


@process
def _script(code: str, path: list[str], environment: dict[str, str], printed: str) -> None:
    with open(printed, "wb") as file:
        os.dup2(file.fileno(), 1)
    os.environ.clear()
    os.environ.update(environment, **LARGE_PAGES)
    sys.path[:0] = path
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def flashinfer(release: str, folder: Path | None = None) -> None:
    """Let `import flashinfer` find this release, or a changed copy of it in `folder`, on the fakes."""
    import fakes
    import releases

    sys.path.insert(0, str(folder or releases.fetch(release)))
    sys.modules["cudnn"] = fakes.cudnn
    sys.modules["cutlass"] = None  # type: ignore[assignment]


def copy(release: str, folder: Path, changes: dict[str, Callable[[str], str]]) -> Path:
    """Make a copy of a release in which some files, by their path below `flashinfer/`, are changed."""
    import shutil

    import releases

    source = releases.fetch(release) / "flashinfer"
    # With the bytecode, which is good for every file that is not changed: to compile all of FlashInfer takes seconds.
    shutil.copytree(source, folder / "flashinfer", copy_function=os.symlink)
    for name, change in changes.items():
        before = (source / name).read_text()
        after = change(before)
        assert after != before, f"the change to {name} changes nothing"
        file = folder / "flashinfer" / name
        for stale in (file, *file.parent.glob(f"__pycache__/{file.stem}.*")):
            stale.unlink()
        file.write_text(after)
    return folder


def listen() -> io.StringIO:
    """Keep what is written to standard error from now on: our log, where the application has set up none."""
    sys.stderr = io.StringIO()
    return sys.stderr


def has_imported() -> None:
    """Spare a process that has imported torch what takes as long as a test: collections that go through all of it, and
    after Python's own end, which stays the ordinary one, the destructors of its C++.
    """
    gc.freeze()
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


def _serve() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)  # a pool of threads would not outlive the fork
    has_imported()  # else each fork's collections, its last one too, copy the pages that they visit
    while True:
        try:
            module, name, arguments, output = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            _run(module, name, arguments, output)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(module: str, name: str, arguments: dict[str, Any], output: str) -> None:
    """Run one test, and leave through the ordinary end of the interpreter, as the host's processes do."""
    with open(output, "wb") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    import pytest

    try:
        importlib.import_module(module).__dict__[name].__wrapped__(**arguments)
    except pytest.skip.Exception as skipped:
        print(skipped)
        sys.exit(SKIPPED)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        if isinstance(sys.stderr, io.StringIO):
            print("standard error was:", sys.stderr.getvalue(), file=sys.__stderr__)
        sys.exit(1)


if __name__ == "__main__":
    _serve()
