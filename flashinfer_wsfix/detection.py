"""Code objects in, verdict out: what a FlashInfer does with its workspace, read from its functions, not its version.

A site is a function that calls ``resize_`` on one of its parameters. The same reading serves a live module and the code
of one that is not imported, so that the doctor can judge a machine where FlashInfer cannot be imported.
"""

import dis
import sys
from collections.abc import Iterator
from functools import lru_cache
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from .names import GEMM, SITE_MODULES
from .sites import GATES, PARAMETERS, RUNNERS

MARKS_METHODS = sys.version_info >= (3, 12)  # by the lowest bit of LOAD_ATTR's argument
EXTENDED_ARG, LOAD_ATTR, CACHE = (dis.opmap.get(name) for name in ("EXTENDED_ARG", "LOAD_ATTR", "CACHE"))
LOAD_ATTRIBUTE = {LOAD_ATTR, dis.opmap.get("LOAD_METHOD")}
# Each with the bits of its argument that say what is on top of the stack: some load two names in one.
FAST = {name: opcode for name, opcode in dis.opmap.items() if name.startswith("LOAD_FAST")}
LOAD_FAST = {opcode: 15 if name.count("LOAD_FAST") == 2 else -1 for name, opcode in FAST.items()}
MAKES_FUNCTION = {dis.opmap.get("MAKE_FUNCTION"), dis.opmap.get("SET_FUNCTION_ATTRIBUTE")}
NOT_PLAIN = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
EXECUTES = {"execute", "execute_plan_at_index"}
# What each upstream fix leaves behind in the functions that execute a cuDNN graph, and what was there before 0.6.12.
FIXES = {"_gemm_workspace_at_least": "#4666", "_grow_workspace": "#4399", "zeros": "#4553"}
CALL_LOCAL = "empty"
# What moves a tensor's memory as `resize_` does; no known release has any of it where it executes a graph.
OTHER_MEANS = {"set_", "resize_as_"}
RISK = "nothing is guarded, and CUDA graphs may replay against freed memory"


class Verdict(NamedTuple):
    """A state (design: pending, guarded, not-needed, ...), the sentence that every surface prints, and the sites."""

    state: str
    reason: str
    sites: tuple[str, ...] = ()


class Function(NamedTuple):
    """A function as detection sees it. ``direct``: a plain function at module level, neither decorated nor nested."""

    module: str
    name: str
    code: CodeType
    direct: bool


def _layers(value: Any) -> Iterator[Any]:
    """List an object and what it was put around. An object that answers to every name has no end."""
    for _ in range(64):
        yield value
        if not hasattr(value, "__wrapped__"):
            return
        value = value.__wrapped__


def guard_in(value: Any) -> Any:
    """Return the guard of ours that ``value`` is, or that stands somewhere below it, or None."""
    return next((layer for layer in _layers(value) if getattr(type(layer), "is_wsfix_guard", False)), None)


def live_functions(module: ModuleType) -> Iterator[Function]:
    """Read the functions of an imported module, looking through a guard of ours and what was put around it.

    An attribute is asked for on nothing but what can be called: asking another module may be what loads it.
    """
    for name, value in list(vars(module).items()):
        if not callable(value) or getattr(value, "__module__", None) != module.__name__:
            continue
        value = getattr(guard_in(value), "__wrapped__", value)
        if isinstance(value, type):
            for member in vars(value).values():
                yield from _with_nested(module.__name__, name, getattr(member, "__code__", None), False)
            continue
        *_, innermost = _layers(value)  # the code of a decorator says nothing
        direct = type(value) is FunctionType and innermost is value
        yield from _with_nested(module.__name__, name, getattr(innermost, "__code__", None), direct)


def code_functions(module: str, code: CodeType) -> Iterator[Function]:
    """Read the functions of a module from its code, which is not run."""
    direct, before = set(), None
    for opcode, argument in _instructions(code):
        if opcode == dis.opmap["STORE_NAME"] and before in MAKES_FUNCTION:  # else a decorator is called in between
            direct.add(code.co_names[argument])
        before = opcode
    for inner in _nested(code):
        yield from _with_nested(module, inner.co_name, inner, inner.co_name in direct)


def source_functions(module: str, source: str) -> Iterator[Function]:
    """Read the functions of a module from its source, which is compiled but not run. Raises SyntaxError."""
    return code_functions(module, compile(source, module, "exec", dont_inherit=True))


def _nested(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _with_nested(module: str, name: str, code: object, direct: bool) -> Iterator[Function]:
    if isinstance(code, CodeType):
        yield Function(module, name, code, direct)
        for inner in _nested(code):
            yield from _with_nested(module, f"{name}.{inner.co_name}", inner, False)


def _instructions(code: CodeType) -> Iterator[tuple[int, int]]:
    """List the opcodes and their arguments. ``dis.get_instructions`` takes up to a millisecond for each site."""
    argument = 0
    for opcode, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = argument << 8 | low
        if opcode == EXTENDED_ARG:
            continue
        if opcode != CACHE:
            yield opcode, argument
        argument = 0


@lru_cache(maxsize=64)  # a site is asked for when it is judged and when it is wrapped
def resized(code: CodeType) -> list[str]:
    """Name what ``resize_`` is called on: a local name, ``.attribute`` for an attribute, "" for anything else."""
    found, before = [], ""
    for opcode, argument in _instructions(code):
        if opcode in LOAD_ATTRIBUTE:
            attribute = code.co_names[argument >> 1 if opcode == LOAD_ATTR and MARKS_METHODS else argument]
            if attribute == "resize_":
                found.append(before)
            before = f".{attribute}"
        elif opcode in LOAD_FAST:
            index = argument & LOAD_FAST[opcode]
            before = code.co_varnames[index] if index < len(code.co_varnames) else ""
        else:
            before = ""
    return found


def resizes_only(code: CodeType, attribute: str) -> bool:
    """Say whether a method resizes this attribute of its object and sets none: then another can take its place."""
    sets = any(instruction.opname == "STORE_ATTR" for instruction in dis.get_instructions(code))
    return resized(code) == [f".{attribute}"] and not sets


def parameters(code: CodeType) -> tuple[str, ...]:
    """Name the parameters that can be passed by position."""
    return code.co_varnames[: code.co_argcount]


def _problem(site: Function) -> str | None:
    """Say why a site cannot be guarded, or None where it has the known shape."""
    code, names = site.code, resized(site.code)
    name = names[0] if len(names) == 1 else ""
    shape = (
        (site.module in SITE_MODULES, "is in another module than its sites were"),
        (site.direct and not code.co_flags & NOT_PLAIN, "is decorated, nested or asynchronous"),
        (name in parameters(code), "does not resize one of its parameters"),
        (name in PARAMETERS, f"calls its workspace {name!r}"),
        ("numel" in code.co_names, "does not compare sizes itself"),
        (EXECUTES.intersection(code.co_names), "does not execute a cuDNN graph itself"),
    )
    return next((f"{site.module}.{site.name} {problem}" for holds, problem in shape if not holds), None)


def _unknown(function: Function) -> str | None:
    """Say whether a function grows a workspace in a way that is neither a site's nor a known harmless one."""
    names = set(function.code.co_names)
    if not names & EXECUTES or {*PARAMETERS}.isdisjoint(parameters(function.code)):
        return None
    known = "numel" not in names or names & {"resize_", CALL_LOCAL, *FIXES}
    grows = f"{function.module}.{function.name} grows its workspace by other means"
    return None if known and not names & OTHER_MEANS else grows


def judge(functions: list[Function], version: str) -> Verdict:
    """Judge one FlashInfer by the functions of ``flashinfer.gemm``; ``version`` is for the sentence alone."""
    flashinfer = f"FlashInfer {version}"
    sites = [function for function in functions if "resize_" in function.code.co_names]
    problems = [problem for problem in (*map(_problem, sites), *map(_unknown, functions)) if problem]
    for function in functions if sites else ():
        if function[:2] in GATES.values() and not (function.direct and RUNNERS in parameters(function.code)):
            problems.append(f"{function.module}.{function.name} does not take {RUNNERS!r}")
    executors = [names for names in (set(function.code.co_names) for function in functions) if names & EXECUTES]
    if not executors and not sites:
        problems.append(f"nothing in {GEMM} shows how it executes a cuDNN graph")
    if problems:
        unknown = f"{flashinfer} grows its cuDNN workspace in a way that flashinfer-wsfix does not know ({problems[0]})"
        return Verdict("unsupported", f"{unknown}: {RISK}")
    if sites:
        names = tuple(f"{site.module}.{site.name}" for site in sites)
        guarded = f"guarded: all {len(names)} sites of {flashinfer} that move its cuDNN workspace"
        return Verdict("guarded", guarded, names)
    for request in (FIXES[mark] for mark in FIXES if any(mark in names for names in executors)):
        grows = f"{flashinfer} grows its cuDNN workspace without moving it (upstream {request})"
        return Verdict("not-needed", grows)
    return Verdict("not-affected", f"{flashinfer} has no site that moves its cuDNN workspace")
