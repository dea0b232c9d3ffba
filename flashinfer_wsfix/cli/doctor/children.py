"""What the doctor tries in children, each with a time limit: programs, and Python in fresh interpreters."""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

NAME = "flashinfer_wsfix"  # of the package and of its entry points

HUNG = "no answer within"  # so begins the complaint about a program that does not end

_MARK = "flashinfer-wsfix:"  # before the answer: a sitecustomize may print as well

# An expression, so that a spawned process can evaluate it: is our hook there, and who put it there?
_ACTIVE = (
    "(any(type(finder).__module__ == 'flashinfer_wsfix.importer' for finder in __import__('sys').meta_path),"
    " list(getattr(__import__('sys').modules.get('flashinfer_wsfix.state'), 'routes', ())))"
)

# What a server sees that is started here: sys.path without the working directory, which `-c` puts first. ``installed``
# asks without PYTHONPATH as well, which need not be set where the server starts.
FRESH = f"""
import json, os, site, sys
from importlib import metadata, util
active, routes = {_ACTIVE}
path = sys.path[:] = [entry for entry in sys.path if entry]
declared = [entry.group for entry in metadata.entry_points(name="{NAME}")]
importable = util.find_spec("{NAME}") is not None
added = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
sys.path[:] = [entry for entry in path if os.path.abspath(entry) not in added]
installed = util.find_spec("{NAME}") is not None
folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
found = dict(active=active, routes=routes, path=path, declared=declared, folders=folders)
found.update(importable=importable, installed=installed, error=getattr(sys, "{NAME}_error", None))
print("{_MARK}" + json.dumps(found))
"""

PLAIN = f"""
import json
active, routes = {_ACTIVE}
print("{_MARK}" + json.dumps(dict(active=active, routes=routes)))
"""

SPAWNED = f"""
import json, multiprocessing
with multiprocessing.get_context("spawn").Pool(1) as pool:
    active, routes = pool.apply(eval, ({_ACTIVE!r},))
print("{_MARK}" + json.dumps(dict(active=active, routes=routes)))
"""

# The real thing, with what a server imports and no more: what a module that FlashInfer imports late would change must
# not count. Where nothing activates us at start-up, by our plugin, as a worker of the server would.
IMPORT = f"""
import json, sys
if not {_ACTIVE}[0]:
    from importlib.metadata import entry_points
    for entry in entry_points(group=sys.argv[1], name="{NAME}"):
        entry.load()()
import flashinfer.gemm
from {NAME}.report import status
target = status().targets[0]
print("{_MARK}" + json.dumps(dict(state=target.state, reason=target.reason, sites=target.sites)))
"""

# As FlashInfer gets it: torch comes first and may bring one, then cuDNN's frontend loads the one it finds first.
CUDNN = f"""
import contextlib, json
with contextlib.suppress(Exception):
    import torch
import cudnn
print("{_MARK}" + json.dumps(cudnn.backend_version()))
"""

# For containers without the frontend, whose cuDNN did not come from a wheel.
LIBCUDNN = f"""
import ctypes
print("{_MARK}%d" % ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())
"""


class NoAnswer(Exception):
    """A child did not do what it was asked; the message says why in one line. ``missing``: there is no such program."""

    def __init__(self, why: str, missing: bool = False) -> None:
        super().__init__(why)
        self.missing = missing


def run(command: list[str], seconds: float = 30, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Raises NoAnswer where it does not end well in time.

    One that hangs is killed and not waited for: a driver that is stuck may never let it go.
    """
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            errors="replace",
        )
    except OSError as error:
        raise NoAnswer(str(error), isinstance(error, FileNotFoundError)) from None
    try:
        output, complaint = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(1)
        for stream in filter(None, (child.stdout, child.stderr)):
            stream.close()
        raise NoAnswer(f"{HUNG} {seconds:.0f} s") from None
    if child.returncode:
        # A traceback ends with the reason; what fails on its standard output, as nvidia-smi does, begins with it.
        said = complaint.strip().splitlines()[-1:] or output.strip().splitlines()[:1]
        raise NoAnswer("".join(said) or f"exit status {child.returncode}")
    return output


def python(code: str, *arguments: str, seconds: float = 30, environment: Mapping[str, str] | None = None) -> Any:
    """Run code in a fresh interpreter and return what it printed after the mark. Raises NoAnswer.

    With this interpreter's own flags, as multiprocessing starts its children: -I, -E and -S decide what comes up.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    for line in run([sys.executable, *flags, "-c", code, *arguments], seconds, environment).splitlines():
        if line.startswith(_MARK):
            return json.loads(line[len(_MARK) :])
    raise NoAnswer("it printed nothing")
