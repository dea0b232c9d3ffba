"""What the doctor tries in children, each with a time limit: programs, and Python in fresh interpreters."""

import json
import subprocess
import sys
from typing import Any

from ...hook import GEMM_BF16_FP4

NAME = "flashinfer_wsfix"  # of the package and of its entry points

_MARK = "flashinfer-wsfix:"  # before the answer: a sitecustomize may print as well

# An expression, so that a spawned process can evaluate it: is our hook there, and who put it there?
_ACTIVE = (
    "(any(type(finder).__module__ == 'flashinfer_wsfix.hook' for finder in __import__('sys').meta_path),"
    " list(getattr(__import__('sys').modules.get('flashinfer_wsfix.hook'), 'routes', ())))"
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
print("{_MARK}" + json.dumps(dict(found, importable=importable, installed=installed)))
"""

SPAWNED = f"""
import json, multiprocessing
with multiprocessing.get_context("spawn").Pool(1) as pool:
    active, routes = pool.apply(eval, ({_ACTIVE!r},))
print("{_MARK}" + json.dumps(dict(active=active, routes=routes)))
"""

# The real thing. Where nothing activates us at start-up, by our plugin, as a worker of the server would. FlashInfer
# itself imports the module of its last two sites late.
IMPORT = f"""
import contextlib, importlib, json, sys
if not {_ACTIVE}[0]:
    from importlib.metadata import entry_points
    for entry in entry_points(group=sys.argv[1], name="{NAME}"):
        entry.load()()
import flashinfer.gemm
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("{GEMM_BF16_FP4}")
target = sys.modules["{NAME}.report"].status().targets[0]
print("{_MARK}" + json.dumps(dict(state=target.state, reason=target.reason, sites=target.sites)))
"""

# For containers whose cuDNN did not come from a wheel.
CUDNN = f"""
import ctypes
print("{_MARK}%d" % ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())
"""


class NoAnswer(Exception):
    """A child did not do what it was asked; the message says why, in one line."""


def run(command: list[str], seconds: float = 30) -> str:
    """Run a command and return its output. Raises NoAnswer where it does not end well in time."""
    try:
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer within {seconds:.0f} s") from None
    except OSError as error:
        raise NoAnswer(str(error)) from None
    if ran.returncode:
        raise NoAnswer([f"exit status {ran.returncode}", *ran.stderr.strip().splitlines()][-1])
    return ran.stdout


def python(code: str, *arguments: str, seconds: float = 30) -> Any:
    """Run code in a fresh interpreter and return what it printed after the mark. Raises NoAnswer."""
    for line in run([sys.executable, "-c", code, *arguments], seconds).splitlines():
        if line.startswith(_MARK):
            return json.loads(line[len(_MARK) :])
    raise NoAnswer("it printed nothing")
