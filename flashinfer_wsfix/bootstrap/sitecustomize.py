"""Activate flashinfer-wsfix in this interpreter, then run the sitecustomize that this one shadows.

Whatever inherits the PYTHONPATH that leads here runs this: also an interpreter without flashinfer_wsfix, or one as old
as Python 2.7, which must come up as if this folder were not there. Hence the old syntax and the broad except.
"""

import os
import sys

OTEL_LAUNCHER = "opentelemetry-instrument"


def _activate():
    if sys.version_info < (3, 10):  # noqa: UP036  # it could not read the package
        return
    try:
        from flashinfer_wsfix.activation import activate

        activate("sitecustomize")
    except BaseException:
        _complain("NOT guarded here, because of an error of ours: %r" % sys.exc_info()[1])  # noqa: UP031


def _complain(sentence):
    """Write a line to standard error; where the package is not there, only what matters if FlashInfer is."""
    try:
        from importlib.util import find_spec

        if not getattr(find_spec("flashinfer_wsfix"), "origin", None):
            if not getattr(find_spec("flashinfer"), "origin", None):  # an interpreter that has nothing to do with it
                return
            sentence = "NOT guarded: flashinfer_wsfix is not installed for " + sys.executable
            sentence += ", and the folder that holds it is not on PYTHONPATH"
        sys.stderr.write("flashinfer-wsfix: %s.\n" % sentence)  # noqa: UP031
    except Exception:  # no standard error, or one that takes nothing
        pass


def _look_for_opentelemetry():
    """Its launcher puts a sitecustomize before ours that does not run it. This is that launcher, if it is one."""
    words = [word for word in getattr(sys, "orig_argv", ())[1:] if not word.startswith("-")]
    if os.path.basename("".join(words[:1])) != OTEL_LAUNCHER:
        return
    state = sys.modules.get("flashinfer_wsfix.state")
    if state is not None and "start-up file" not in state.routes:
        _complain(
            OTEL_LAUNCHER + " puts a sitecustomize before ours and does not run it, so the application will NOT be"
            " guarded by this launcher or PYTHONPATH; put it first: " + OTEL_LAUNCHER + " flashinfer-wsfix run CMD"
        )


def _run_shadowed(folder):
    """Import the next sitecustomize in our place. Its errors are site.py's to report, as if we were not there."""
    position = sys.path.index(folder)
    ours = sys.modules.pop("sitecustomize")
    del sys.path[position]
    try:
        import sitecustomize  # noqa: F401
    except ImportError:
        if getattr(sys.exc_info()[1], "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours  # there is none
    finally:
        sys.path.insert(position, folder)


def _stay_first(folder):
    """OpenTelemetry's sitecustomize moves its own folder to the front, and would shadow ours in the children."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder in entries[1:]:
        entries.remove(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder] + entries)  # noqa: RUF005


_activate()
_look_for_opentelemetry()
_folder = os.path.dirname(os.path.abspath(__file__))
if _folder in sys.path and "sitecustomize" in sys.modules:
    _was_first = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] == _folder
    _run_shadowed(_folder)
    if _was_first:
        _stay_first(_folder)
