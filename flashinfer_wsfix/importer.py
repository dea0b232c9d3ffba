"""The import hook: "call this when one of these modules has been executed". It knows no host and imports only ``sys``.

wrapt's own post-import hooks are no use here: importing wrapt alone costs tens of milliseconds in a bare interpreter,
its hooks break the user's import when they raise, do not fire again after a reload, and fire on a half-built module.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any


def spec_of(module: object) -> "Any":
    """Return a module's spec, or None. Not by ``getattr``, which would load a lazy module."""
    return namespace(module).get("__spec__")


def namespace(module: object) -> "dict[str, Any]":
    """Return a module's names as they are now; none for what is no module. It loads no lazy module."""
    try:
        found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found


def is_lazy(module: object) -> bool:
    """Say whether importlib.util.LazyLoader has only made this module ready. ``type`` does not load it."""
    return type(module).__name__ == "_LazyModule"


def is_complete(name: str) -> bool:
    """Say whether a module has been executed to its end: not half-imported, nor prepared by a lazy loader."""
    module = sys.modules.get(name)
    if module is None or is_lazy(module):
        return False
    spec = spec_of(module)
    return not getattr(spec, "_initializing", False) or getattr(spec, "executed_wsfix", False)


class Finder:
    """Stands first on ``sys.meta_path``, lets the others find, and has the loader say when a module was executed.

    ``loaded(name)`` is called then; ``failed(name, error)`` where an error of ours prevents that.
    """

    def __init__(self, names: "Collection[str]", loaded: "Callable[..., None]", failed: "Callable[..., None]") -> None:
        self.names, self.loaded, self.failed = names, loaded, failed

    def install(self) -> None:
        """Take the first place, and wait for the modules that another thread is importing right now."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        # Their packages stand for the moment between a finder's answer and a module's own place in sys.modules.
        for name in {*self.names, *(name.partition(".")[0] for name in self.names)}:
            spec = spec_of(sys.modules.get(name))
            if getattr(spec, "_initializing", False):
                self._watch(spec)

    def remove(self) -> None:
        """Leave ``sys.meta_path``. What was found before is told no more."""
        while self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in self.names:
            return None
        finders = list(sys.meta_path)
        # Only those after us: one that was put before us may itself ask all that come after it.
        for finder in finders[finders.index(self) + 1 :] if self in finders else ():
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(name, path, target) if find_spec and finder is not self else None
            if spec is not None:
                self._tell(spec, name)
                return spec
        return None

    def _tell(self, spec: "Any", name: str) -> None:
        """Have ``loaded`` called when the module of this spec has been executed."""
        try:
            self._ask(spec)
        except Exception as error:
            self.failed(name, error)

    def _ask(self, spec: "Any") -> None:
        """Replace ``exec_module`` of the spec's loader.

        An attribute of the instance, not a proxy around it: ``inspect``, ``importlib.resources`` and ``pkgutil`` go on
        seeing the loader that they know. A loader of several modules (a zip file's) is asked only once.
        """
        execute = getattr(spec.loader, "exec_module", None)
        if execute is None:  # of a namespace package, or as old as load_module
            return self._watch(spec)
        if getattr(spec, "tells_wsfix", False) or getattr(execute, "tells_wsfix", False):
            return

        def wsfix_exec_module(module: "Any") -> None:
            execute(module)  # theirs: not guarded by us
            spec = spec_of(module)
            name: str = getattr(spec, "name", "")
            if name in self.names and is_lazy(module):  # only made ready: another loader executes it when it is used
                self._tell(spec, name)
            elif name in self.names:
                if hasattr(spec, "__dict__"):
                    spec.executed_wsfix = True  # importlib says so only after the call
                self.loaded(name)

        wsfix_exec_module.tells_wsfix = True  # type: ignore[attr-defined]
        try:
            # Not setattr(): a loader that is a proxy (wrapt's) would hand it on to the loader that it stands around.
            object.__setattr__(spec.loader, "exec_module", wsfix_exec_module)
            spec.tells_wsfix = True  # whatever loader another finder puts around this one
        except (AttributeError, TypeError):  # it takes no attributes
            self._watch(spec)

    def _watch(self, spec: "Any") -> None:
        """Be told when a module whose loader we cannot ask is done, such as one that another thread is executing.

        What is left then is that importlib sets ``spec._initializing`` to False at the end, in the importing thread and
        under the module's lock: nobody sees the module between that and our guard.
        """
        plain, finder = type(spec), self
        if getattr(plain, "tells_wsfix", False):
            return

        class WatchedSpec(plain):  # type: ignore[misc, valid-type]
            tells_wsfix = True

            def __setattr__(self, name: str, value: object) -> None:
                super().__setattr__(name, value)
                if name == "_initializing" and not value:
                    self.__class__ = plain
                    if self.name in sys.modules:
                        finder.loaded(self.name)

        spec.__class__ = WatchedSpec
