"""The only ``setattr`` on foreign code: all of a target's patches or none, and the way back."""

import logging
import sys
from collections.abc import Iterator

from . import guards, report, settings, state, vllm, workspace
from .detection import Verdict
from .guards import Patch
from .importer import namespace

# Packages that never import FlashInfer, and hold most of the names that there are: not worth five milliseconds.
BELOW = {"numpy", "torch"} | sys.stdlib_module_names

_applied: dict[str, list[Patch]] = {"flashinfer": [], "vllm": []}
_modes: dict[str, str] = {}


def refresh(target: str) -> None:
    """Judge a target as it is imported now, and bring its patches up to date: after an import, a reload, or a call.

    Settings are read here. An error leaves nothing of the target wrapped, and is the caller's to report: after a reload
    that we could not look at, some of what was wrapped is gone.
    """
    try:
        _refresh(target)
    except BaseException:
        with state.lock:
            undo(target)
        raise


def _refresh(target: str) -> None:
    config, complaints = settings.read()
    for complaint in complaints:
        report.once(logging.WARNING, complaint, f"{complaint}.")
    with state.lock:
        if not state.routes:  # deactivated meanwhile
            return
        if _modes.setdefault(target, config.mode) != config.mode:
            undo(target)
            _modes[target] = config.mode
        plan = guards.plan if target == "flashinfer" else vllm.plan
        off = Verdict("disabled", f"{settings.PREFIX} is off: nothing is guarded")
        verdict, patches, version = plan(config) if config.mode != "off" else (off, [], None)
        if verdict.state in ("guarded", "observing"):
            _apply(target, patches)
        else:  # also where a module that came later has a site of an unknown shape: never half a patch
            undo(target)
        if target == "flashinfer":
            state.first_bytes = config.workspace_bytes
            state.gates = config.gate if verdict.state == "guarded" else ()
    report.record(target, verdict, version)


def _apply(target: str, patches: list[Patch]) -> None:
    """Set every patch, and every copy of what it replaces that other modules made by name."""
    for patch in [*patches, *_copies(patches)]:
        _applied[target].append(patch)
        setattr(patch.owner, patch.name, patch.replacement)
        if isinstance(patch.replacement, workspace.RetiringCache):
            patch.replacement.take(patch.original)


def _copies(patches: list[Patch]) -> Iterator[Patch]:
    """Find the names in other modules that are bound to an object which a patch replaces."""
    replaced = {id(patch.original): patch for patch in patches}
    places = {(id(patch.owner), patch.name) for patch in patches}
    for module_name, module in list(sys.modules.items()) if replaced else ():
        if module_name.partition(".")[0] in BELOW:
            continue
        names = namespace(module)
        if replaced.keys().isdisjoint(map(id, list(names.values()))):
            continue
        for name, value in list(names.items()):
            patch = replaced.get(id(value))
            if patch is not None and (id(module), name) not in places:
                yield patch._replace(owner=module, name=name)


def undo(target: str) -> list[str]:
    """Put the very objects back where ours is still outermost, and return a sentence for each place where it is not."""
    kept, left = [], []
    for patch in reversed(_applied[target]):
        current = vars(patch.owner).get(patch.name)
        if isinstance(patch.replacement, workspace.RetiringCache) and current is not patch.original:
            patch.replacement.give_back(patch.original)
        if current is patch.replacement:
            setattr(patch.owner, patch.name, patch.original)
        elif guards.is_guarded(current):
            left.append(patch)  # for the next time: by then the other tool may be gone
            where = f"{getattr(patch.owner, '__name__', patch.owner)}.{patch.name}"
            kept.append(f"{where} stays guarded: {type(current).__name__!r} of another tool was put around it since")
    _applied[target] = left[::-1]
    return kept


def undo_all() -> tuple[str, ...]:
    """Undo every target. No buffer is freed: graphs may hold their addresses."""
    workspace.look()
    with state.lock:
        guarded = any(_applied.values())
        kept = tuple(sentence for target in _applied for sentence in undo(target))
        state.verdicts.clear()
        state.errors.clear()
        state.gates = ()
        _modes.clear()
    if guarded:
        report.log(logging.INFO, f"{report.INACTIVE.reason}.")
    for sentence in kept:
        report.once(logging.WARNING, sentence, f"{sentence}.")
    return kept
