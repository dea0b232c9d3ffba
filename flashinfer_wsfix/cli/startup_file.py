"""The start-up file: what it says, and the commands that write and remove it."""

import os
import site
import subprocess
import sys
import sysconfig
import textwrap
from importlib.metadata import distributions
from importlib.util import find_spec

from . import complain, say

START_UP_FILE = "flashinfer_wsfix.pth"

_MARK = '# Written by "flashinfer-wsfix enable".'
_COMMENT = f'{_MARK} "flashinfer-wsfix disable" removes it; deleting it by hand is as good.\n'

# SystemExit would end every interpreter of the environment, and an ImportError would print a traceback in each. So
# nothing gets out: silence where the package is gone, one line where it is there and fails, also under STRICT. Once,
# since a venv runs a line of a .pth file twice.
_ACTIVATE = """\
try:
 from flashinfer_wsfix.activation import activate; activate('start-up file')
except BaseException as error:
 try:
  from importlib.util import find_spec
  if getattr(find_spec('flashinfer_wsfix'), 'origin', None) and not hasattr(sys, 'flashinfer_wsfix_error'):
   sys.flashinfer_wsfix_error = repr(error)
   sys.stderr.write('flashinfer-wsfix: NOT guarded here, its start-up file failed: %r\\n' % error)
 except Exception: pass
"""

# A line of a .pth file cannot hold a try statement, so it is in a string.
_PTH = _COMMENT + f"import sys; exec({_ACTIVATE!r})\n"

# Python 3.15 (PEP 829) takes an entry point instead, and prints a traceback where it cannot be imported. So it names a
# module that stays behind when the package is uninstalled.
_START = _COMMENT + "_flashinfer_wsfix_start:start\n"
_START_MODULE = _COMMENT + "import sys\n\n\ndef start():\n" + textwrap.indent(_ACTIVATE, " ")
_START_MODULE_FILE = "_flashinfer_wsfix_start.py"

# Run in a fresh interpreter: ends well where the start-up file has activated it and it can guard, else says why not.
_CHECK = """
import sys
state = sys.modules.get("flashinfer_wsfix.state")
try:
    import flashinfer_wsfix, wrapt
except ImportError as error:
    sys.exit("%s is not installed there: pip install it first" % (error.name or error))
except BaseException as error:
    sys.exit("%s: %s" % (type(error).__name__, error))
if "start-up file" not in getattr(state, "routes", ()):
    sys.exit(getattr(sys, "flashinfer_wsfix_error", "it does not read start-up files there"))
"""


def enable() -> int:
    """Write the start-up file of this environment, and keep it only if a fresh interpreter comes up activated."""
    folder = _target()
    files = {os.path.join(folder, name): text for name, text in _files(sys.version_info[:2]).items()}
    path = os.path.join(folder, START_UP_FILE)
    before = {}
    for taken in filter(os.path.lexists, files):
        if not _is_ours(taken):
            return complain(f"{taken} is there already and not of our making: nothing was done", 1)
        with open(taken, encoding="utf-8") as file:
            before[taken] = file.read()
    written = []
    try:
        for name, text in files.items():
            _write(name, text)
            written.append(name)
    except OSError as error:
        _take_back(written, before)
        return complain(f"cannot write {path}: {error.strerror}; nothing was changed. {_without_it()}", 1)
    reason = _check()
    if reason:
        _take_back(written, before)
        done = "is again what it was before" if before else "was removed again"
        return complain(f"{path} {done}: a fresh {sys.executable} is not activated by it ({reason})", 1)
    say(f"{path} is written, and a fresh {sys.executable} comes up activated by it.")
    say("Restart the server. Undo: flashinfer-wsfix disable")
    if not getattr(find_spec("flashinfer"), "origin", None):  # a mere folder has no origin
        say(
            f"No FlashInfer is installed for {sys.executable}: if the server uses another Python, run enable with that"
            " one."
        )
    return 0


def _take_back(written: list[str], before: dict[str, str]) -> None:
    """Leave the folder as it was before ``written``. Raises OSError."""
    for name in written:
        if name in before:
            _write(name, before[name])
        else:
            _remove(name)


def _without_it() -> str:
    """Say what else guards where the start-up file cannot be written."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    installed = [_purelib(), sysconfig.get_path("platlib"), *site.getsitepackages(), site.getusersitepackages()]
    if os.path.realpath(package) in map(os.path.realpath, installed):
        does = "`flashinfer-wsfix path` prints a folder for PYTHONPATH that does the same"
        return f"Without it: `flashinfer-wsfix run CMD` guards what it starts, and {does}"
    folder = os.path.join(package, "flashinfer_wsfix", "bootstrap")  # as after `pip install --target`: it takes both
    return f"Without it: set PYTHONPATH={folder}{os.pathsep}{package} for the server, which guards all that inherits it"


def disable() -> int:
    """Remove what ``enable`` wrote in this environment, and nothing else."""
    folders = [_purelib()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    removed = []
    for folder in folders:
        for name in _files((3, 15)):
            path = os.path.join(folder, name)
            try:
                if _remove(path):
                    removed.append(path)
                elif os.path.lexists(path):
                    complain(f"{path} is not of our making and stays", 0)
            except OSError as error:
                return complain(f"cannot remove {path}: {error.strerror}", 1)
    none = f"There is no start-up file of ours in {' or '.join(folders)}."
    say(f"Removed {', '.join(removed)}." if removed else none)
    return 0


def _files(version: tuple[int, ...]) -> dict[str, str]:
    """Return the name and text of each start-up file for this version of Python, in the order to write them."""
    files = {START_UP_FILE: _PTH}
    if version >= (3, 15):  # read there before the .pth file, whose `import` line it switches off
        files = {_START_MODULE_FILE: _START_MODULE, "flashinfer_wsfix.start": _START, **files}
    return files


def _purelib() -> str:
    return sysconfig.get_path("purelib")


def _target() -> str:
    """Return the user's site-packages where this package was installed there, else that of this environment."""
    for distribution in distributions(name="flashinfer-wsfix"):
        # The folder of the metadata, not of the code: an editable install has its code elsewhere.
        folder = os.path.realpath(str(distribution.locate_file("")))
        if site.ENABLE_USER_SITE and folder == os.path.realpath(site.getusersitepackages()):
            return site.getusersitepackages()
        if folder == os.path.realpath(_purelib()):
            break
    return _purelib()


def _is_ours(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().startswith(_MARK)
    except (OSError, UnicodeDecodeError):
        return False


def _write(path: str, text: str) -> None:
    """Write in one step: an interpreter that starts meanwhile reads all of it or nothing. Raises OSError."""
    scratch = f"{path}.{os.getpid()}"  # its ending is none that Python looks for
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)
    except BaseException:
        if os.path.exists(scratch):
            os.unlink(scratch)
        raise


def _remove(path: str) -> bool:
    """Remove a file that ``enable`` wrote, and say whether it was one. Raises OSError."""
    if not _is_ours(path):
        return False
    os.unlink(path)
    folder, name = os.path.split(path)
    cache, (stem, ending) = os.path.join(folder, "__pycache__"), os.path.splitext(name)
    if ending == ".py" and os.path.isdir(cache):
        for compiled in os.listdir(cache):
            if compiled.startswith(f"{stem}."):
                os.unlink(os.path.join(cache, compiled))
    return True


def _check() -> str:
    """Return why a fresh interpreter is not activated by the start-up file, or "" where it is."""
    # -E: what PYTHONPATH adds here need not be there where the server starts.
    child = [sys.executable, "-E", "-c", _CHECK]
    done = subprocess.run(child, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, errors="replace")
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[-1] if done.returncode else ""
