"""The ways into a server's processes: plugin functions, the launcher, the start-up file, Ray's hook.

vLLM, SGLang and Ray import this in processes that may never import FlashInfer: beyond ``os`` and ``sys``, which every
interpreter has, whatever is needed is imported inside the functions.
"""

import os
import sys

from .hook import activate

START_UP_FILE = "flashinfer_wsfix.pth"
OTEL_LAUNCHER = "opentelemetry-instrument"

_MARK = '# Written by "flashinfer-wsfix enable".'
_COMMENT = f'{_MARK} "flashinfer-wsfix disable" removes it; deleting it by hand is as good.\n'

# A line of a .pth file cannot hold a try statement, so it is in a string. SystemExit would end every interpreter of the
# environment, and after `pip uninstall` an ImportError would print a traceback in each.
_PTH = (
    _COMMENT
    + r"""import sys; exec("try:\n from flashinfer_wsfix.hook import activate; activate('start-up file')"""
    + r"""\nexcept BaseException: pass")"""
    + "\n"
)

# Python 3.15 (PEP 829) takes an entry point instead, and prints a traceback where it cannot be imported. So it names a
# module that stays behind when the package is uninstalled.
_START = _COMMENT + "_flashinfer_wsfix_start:start\n"
_START_MODULE = (
    _COMMENT
    + """\
def start():
    try:
        from flashinfer_wsfix.hook import activate

        activate("start-up file")
    except BaseException:
        pass
"""
)
_START_MODULE_FILE = "_flashinfer_wsfix_start.py"

# Run in a fresh interpreter: ends well where the start-up file has activated it and it can guard, else says why not.
_CHECK = """
import sys
hook = sys.modules.get("flashinfer_wsfix.hook")
try:
    import flashinfer_wsfix, wrapt
except ImportError as error:
    sys.exit("%s is not installed there: pip install it first" % (error.name or error))
except BaseException as error:
    sys.exit("%s: %s" % (type(error).__name__, error))
if hook is None or "start-up file" not in hook.routes:
    sys.exit("it does not read start-up files there")
"""


def vllm_plugin() -> None:
    """Activate from vLLM's plugin loader, which calls this bare in each of its processes, some more than once."""
    activate("vLLM plugin")


def sglang_plugin() -> None:
    """Activate from SGLang's plugin loader, which its scheduler runs after it has imported FlashInfer."""
    activate("SGLang plugin")


def ray_worker() -> None:
    """Activate in a Ray worker, with ``{"worker_process_setup_hook": "flashinfer_wsfix.startup.ray_worker"}``."""
    activate("Ray")


def bootstrap_folder() -> str:
    """Return the folder that holds nothing but our ``sitecustomize``, for the front of ``PYTHONPATH``."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")


def launch(argv: "list[str]") -> int:
    """Become the command ``argv``, with our ``sitecustomize`` first on ``PYTHONPATH``. Returns only if that fails."""
    import errno
    import signal

    if argv[:1] == ["--"]:
        argv = argv[1:]
    if not argv:
        return _complain("run needs a command, as in: flashinfer-wsfix run vllm serve MODEL", 2)
    if OTEL_LAUNCHER in map(os.path.basename, argv):
        _complain(
            f"{OTEL_LAUNCHER} puts a sitecustomize before ours and does not run it, so the application will NOT be"
            f" guarded by this launcher; put it first: {OTEL_LAUNCHER} flashinfer-wsfix run CMD",
            0,
        )
    folder = bootstrap_folder()
    before = os.environ.get("PYTHONPATH", "")
    others = [entry for entry in before.split(os.pathsep) if entry != folder] if before else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *others])}
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and the command would inherit it
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        return _complain(f"cannot run {argv[0]!r}: {error.strerror}", 127 if error.errno == errno.ENOENT else 126)


def enable() -> int:
    """Write the start-up file of this environment, and keep it only if a fresh interpreter comes up activated."""
    folder = _target()
    files = {os.path.join(folder, name): text for name, text in _files(sys.version_info[:2]).items()}
    path = os.path.join(folder, START_UP_FILE)
    for taken in filter(os.path.lexists, files):
        if not _is_ours(taken):
            return _complain(f"{taken} is there already and not of our making: nothing was done", 1)
    written = []
    try:
        for name, text in files.items():
            _write(name, text)
            written.append(name)
    except OSError as error:
        for name in written:
            _remove(name)
        return _complain(f"cannot write {path}: {error.strerror}; nothing was changed", 1)
    reason = _check()
    if reason:
        for name in written:
            _remove(name)
        return _complain(f"{path} was removed again: a fresh {sys.executable} is not activated by it ({reason})", 1)
    print(f"{path} is written, and a fresh {sys.executable} comes up activated by it.")
    return 0


def disable() -> int:
    """Remove what ``enable`` wrote in this environment, and nothing else."""
    import site

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
                    _complain(f"{path} is not of our making and stays", 0)
            except OSError as error:
                return _complain(f"cannot remove {path}: {error.strerror}", 1)
    print(f"Removed {', '.join(removed)}." if removed else f"There is no start-up file in {' or '.join(folders)}.")
    return 0


def _files(version: "tuple[int, ...]") -> "dict[str, str]":
    """Return the name and text of each start-up file for this version of Python, in the order to write them."""
    files = {START_UP_FILE: _PTH}
    if version >= (3, 15):  # read there before the .pth file, whose `import` line it switches off
        files = {_START_MODULE_FILE: _START_MODULE, "flashinfer_wsfix.start": _START, **files}
    return files


def _purelib() -> str:
    import sysconfig

    return sysconfig.get_path("purelib")


def _target() -> str:
    """Return the user's site-packages where this package was installed there, else that of this environment."""
    import site
    from importlib.metadata import distributions

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
    import subprocess

    # -E: what PYTHONPATH adds here need not be there where the server starts.
    child = [sys.executable, "-E", "-c", _CHECK]
    done = subprocess.run(child, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, errors="replace")
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[-1] if done.returncode else ""


def _complain(sentence: str, code: int) -> int:
    sys.stderr.write(f"flashinfer-wsfix: {sentence}.\n")
    return code
