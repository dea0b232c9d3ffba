"""Activate flashinfer-wsfix in this interpreter, then run the sitecustomize that this one shadows.

Whatever inherits the PYTHONPATH that leads here runs this: also an interpreter without flashinfer_wsfix, or one as old
as Python 2.7, which must come up as if this folder were not there. Hence the old syntax and the broad except.
"""

import os
import sys


def _activate():
    try:
        from flashinfer_wsfix.activation import activate

        activate("sitecustomize")
    except BaseException:
        pass


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
_folder = os.path.dirname(os.path.abspath(__file__))
if _folder in sys.path and "sitecustomize" in sys.modules:
    _was_first = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] == _folder
    _run_shadowed(_folder)
    if _was_first:
        _stay_first(_folder)
