"""Code objects in, verdict out: what a FlashInfer does with its workspace, read from its functions, not its version.

A site is a function that calls ``resize_``. The same reading serves a live module and source that is compiled but never
run, so that the doctor can judge a machine where FlashInfer cannot be imported.
"""

import ast
import dis
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

from .sites import GATES, SITES

PARAMETERS = {site.parameter for site in SITES}
# What each upstream fix leaves behind in the functions that execute a cuDNN graph.
EXECUTES = {"execute", "execute_plan_at_index"}
FIXES = (("_gemm_workspace_at_least", "#4666"), ("_grow_workspace", "#4399"), ("zeros", "#4553"))


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


def live_functions(module: ModuleType) -> Iterator[Function]:
    """Read the functions of an imported module, looking through a guard of ours but through nothing else."""
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if getattr(type(value), "is_wsfix_guard", False):
            value = value.__wrapped__
        direct = type(value) is FunctionType
        if isinstance(value, type):
            for member in vars(value).values():
                yield from _with_nested(module.__name__, name, getattr(member, "__code__", None), False)
            continue
        while not hasattr(value, "__code__") and hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        while hasattr(value, "__wrapped__"):  # functools.wraps: the decorator's own code says nothing
            value, direct = value.__wrapped__, False
        yield from _with_nested(module.__name__, name, getattr(value, "__code__", None), direct)


def source_functions(module: str, source: str) -> Iterator[Function]:
    """Read the functions of a module from its source, which is compiled but not run. Raises SyntaxError."""
    tree = ast.parse(source)
    direct = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.decorator_list}
    for code in _nested(compile(tree, module, "exec")):
        yield from _with_nested(module, code.co_name, code, code.co_name in direct)


def _nested(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _with_nested(module: str, name: str, code: CodeType | None, direct: bool) -> Iterator[Function]:
    if code is None:
        return
    yield Function(module, name, code, direct)
    for inner in _nested(code):
        yield from _with_nested(module, f"{name}.{inner.co_name}", inner, False)


def resized(code: CodeType) -> list[str]:
    """Name what ``resize_`` is called on: a local name, ``.attribute`` for an attribute, "" for anything else."""
    found, before = [], None
    for instruction in dis.get_instructions(code):
        if instruction.argval == "resize_" and instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            if before is None:
                found.append("")
            elif before.opname.startswith("LOAD_FAST"):
                found.append(before.argval[-1] if isinstance(before.argval, tuple) else before.argval)
            else:
                found.append(f".{before.argval}" if before.opname == "LOAD_ATTR" else "")
        before = instruction
    return found


def parameters(code: CodeType) -> tuple[str, ...]:
    """Name the parameters that can be passed by position."""
    return code.co_varnames[: code.co_argcount]


def _problem(site: Function) -> str | None:
    """Say why a site cannot be guarded, or None where it has the known shape."""
    where = f"{site.module}.{site.name}"
    names = resized(site.code)
    if not site.direct:
        return f"{where} is decorated or nested"
    if len(names) != 1 or names[0] not in parameters(site.code):
        return f"{where} does not resize one of its parameters"
    if names[0] not in PARAMETERS:
        return f"{where} calls its workspace {names[0]!r}"
    if "numel" not in site.code.co_names or EXECUTES.isdisjoint(site.code.co_names):
        return f"{where} does not compare sizes and execute a cuDNN graph itself"
    return None


def judge(functions: list[Function], version: str) -> Verdict:
    """Judge one FlashInfer by the functions of the modules that hold sites; ``version`` is for the sentence alone."""
    flashinfer = f"FlashInfer {version}"
    sites = [function for function in functions if "resize_" in function.code.co_names]
    problems = [problem for problem in map(_problem, sites) if problem]
    for gate in GATES:
        for function in functions:
            known = function.direct and gate.parameter in parameters(function.code)
            if (function.module, function.name) == (gate.module, gate.function) and not known:
                problems.append(f"{gate.module}.{gate.function} does not take {gate.parameter!r}")
    if sites and problems:
        return Verdict(
            "unsupported",
            f"{flashinfer} moves its cuDNN workspace in a way that flashinfer-wsfix does not know ({problems[0]}):"
            " nothing is guarded, and CUDA graphs may replay against freed memory",
        )
    if sites:
        names = tuple(f"{site.module}.{site.name}" for site in sites)
        return Verdict("guarded", f"{flashinfer} moves its cuDNN workspace at {len(sites)} sites, all guarded", names)
    executors = [names for names in (set(function.code.co_names) for function in functions) if names & EXECUTES]
    for mark, request in FIXES:
        if any(mark in names for names in executors):
            return Verdict(
                "not-needed", f"{flashinfer} grows its cuDNN workspace without moving it (upstream {request})"
            )
    return Verdict("not-affected", f"{flashinfer} is from before the defect: its cuDNN workspace never moves")
