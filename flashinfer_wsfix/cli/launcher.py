"""The launcher: it leads a command, and every child that inherits its environment, to our ``sitecustomize``."""

import errno
import os
import signal

from . import complain


def bootstrap_folder() -> str:
    """Return the folder that holds nothing but our ``sitecustomize``, for the front of ``PYTHONPATH``."""
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bootstrap")


def launch(argv: list[str]) -> int:
    """Become the command ``argv``, with our ``sitecustomize`` first on ``PYTHONPATH``. Returns only if that fails."""
    if argv[:1] == ["--"]:
        argv = argv[1:]
    if not argv:
        return complain("run needs a command, as in: flashinfer-wsfix run vllm serve MODEL", 2)
    folder = bootstrap_folder()
    before = os.environ.get("PYTHONPATH", "")
    others = [entry for entry in before.split(os.pathsep) if entry != folder] if before else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *others])}
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and the command would inherit it
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        return complain(f"cannot run {argv[0]!r}: {error.strerror}", 127 if error.errno == errno.ENOENT else 126)
