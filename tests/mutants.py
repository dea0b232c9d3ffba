"""Mutate detection and the guard (or the lanes) with cosmic-ray, in copies, and list the mutants that no test notices.

cosmic-ray changes operators, numbers, conditions, loops and handlers; texts, `in` and calls it leaves alone.

``python tests/mutants.py [detection] [guards] [workspace]``: ten minutes each, the first two by default. Exits with 1
where a mutant survives that EXPLAINED does not know. Some show in one Python's bytecode alone, and survive where 3.10,
3.12 and 3.13 are not beside this one.
"""

import ast
import queue
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.testing import run_tests
from cosmic_ray.util import restore_contents
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).parents[1]
WORKERS = 2
SECONDS = 120  # for the tests of one mutant: some wait for ever

# The tests that a mutant of a module must make fail: of the ten sites few, and of detection what runs no FlashInfer.
REAL = "--flashinfer 0.6.18.post1 " + " ".join(
    f"tests/real/test_{name}.py"
    for name in ("addresses", "generations", "captured", "calls", "threads", "errors", "presize")
)
FEW = "-k 'not fp4 and not mxfp8 and not bias and not shape and not 5000 and not forked'"
SOURCES = "-k 'not test_bytecode and not agree and not alone and not guard_back and not type'"
TESTS = {
    "detection": f"tests/test_detection.py {SOURCES}",
    "guards": f"{REAL} tests/real/test_gate.py tests/test_interplay.py::test_torch_compile_around_a_caller {FEW}",
    "workspace": f"{REAL} tests/test_settings.py {FEW}",
}

# Of cosmic-ray's eleven replacements for an operator, and six for a comparison, those that are nearest to it.
OPERATORS = [
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul")),
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in ("RShift_LShift", "LShift_RShift")),
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in ("BitOr_BitAnd", "BitAnd_BitOr")),
    *(f"core/ReplaceComparisonOperator_{pair}" for pair in ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")),
    *(f"core/ReplaceComparisonOperator_{pair}" for pair in ("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt")),
    *(f"core/ReplaceComparisonOperator_{pair}" for pair in ("Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt")),
    *(f"core/Replace{name}" for name in ("TrueWithFalse", "FalseWithTrue", "AndWithOr", "OrWithAnd")),
    *(f"core/Replace{name}" for name in ("BreakWithContinue", "ContinueWithBreak")),
    *(f"core/ReplaceUnaryOperator_Delete_{name}" for name in ("Not", "USub", "Invert")),
    *(f"core/{name}" for name in ("AddNot", "ExceptionReplacer", "NumberReplacer", "RemoveDecorator")),
    "core/ZeroIterationForLoop",
]

# Why a mutant changes nothing that a test could see -> its changed lines.
EXPLAINED = {
    "sys.version_info has five items: it never equals two": (
        "MARKS_METHODS = sys.version_info > (3, 12)  # by the lowest bit of LOAD_ATTR's argument",
    ),
    "any bound ends what has no end": ("for _ in range( 63):", "for _ in range( 65):"),
    "a cache only saves time": (
        "def resized(code: CodeType) -> list[str]:",
        "@lru_cache(maxsize= 63)  # a site is asked for when it is judged and when it is wrapped",
        "@lru_cache(maxsize= 65)  # a site is asked for when it is judged and when it is wrapped",
    ),
    "bytecode has an even number of bytes": (
        "for opcode, low in zip(code.co_code[::2], code.co_code[1::2], strict=False):",
    ),
    "the first item is the last one: there is one": ('name = names[ -1] if len(names) == 1 else ""',),
}


class Mutant(NamedTuple):
    """The changed line, and how cosmic-ray finds the change."""

    module: str
    line: int
    text: str
    operator: str
    occurrence: int
    start: tuple[int, int]
    end: tuple[int, int]


OPPOSITES = {ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
OPPOSITES |= {other: one for one, other in OPPOSITES.items()}


class _Plain(ast.NodeTransformer):
    """Takes annotations, which are never looked at, and negations of a negation or comparison out of a module."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("annotation", "returns"):
            if hasattr(node, field):
                setattr(node, field, None)
        return super().generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        match self.generic_visit(node):
            case ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), inner)):
                return inner
            case ast.UnaryOp(ast.Not(), ast.Compare(left, [operator], right)) if type(operator) in OPPOSITES:
                return ast.Compare(left, [OPPOSITES[type(operator)]()], right)
        return node


def meaning(source: str) -> str:
    return ast.dump(_Plain().visit(ast.parse(source)))


def mutants(module: str, source: str) -> list[Mutant]:
    """List the mutants of a module that differ from it and from each other."""
    nodes = list(ast_nodes(get_ast(source)))
    found, seen = [], {meaning(source)}
    for name in OPERATORS:
        operator = get_operator(name)()
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(positions):
            mutated = mutate_code(source, operator, occurrence)
            pairs = zip(source.splitlines(), mutated.splitlines(), strict=False)
            line, text = next((n, new.strip()) for n, (old, new) in enumerate(pairs, 1) if old != new)
            if meaning(mutated) not in seen:
                seen.add(meaning(mutated))
                found.append(Mutant(module, line, text, name, occurrence, start, end))
    return sorted(found)


def make_copy(folder: Path) -> Path:
    skipped = shutil.ignore_patterns("__pycache__", ".releases", ".hosts")
    for name in ("flashinfer_wsfix", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    for name in ("tests/.releases", "tests/.hosts"):  # what is fetched for one copy is there for all
        (ROOT / name).mkdir(exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "setup.cfg", folder)
    return folder


def command(module: str, copy: Path) -> str:
    where = f"env -C {copy} PYTHONPATH={copy}"
    return f"{where} {sys.executable} -m pytest -x -q -p no:cacheprovider {TESTS[module]}"


def check(module: str, copy: Path) -> None:
    """Make sure that the tests pass, and that it is the copy's module that they test."""
    outcome, output = run_tests(command(module, copy), SECONDS)
    if outcome != TestOutcome.SURVIVED:
        sys.exit(f"{output}\nfailed without a mutant: {command(module, copy)}")
    path = copy / "flashinfer_wsfix" / f"{module}.py"
    with restore_contents(path):
        path.write_text("1 / 0\n")
        if run_tests(command(module, copy), SECONDS)[0] != TestOutcome.KILLED:
            sys.exit(f"these tests do not import {path}: {command(module, copy)}")


def main(modules: list[str]) -> int:
    copies: queue.Queue[Path] = queue.Queue()
    reasons = {line: why for why, lines in EXPLAINED.items() for line in lines}
    unexplained = 0

    def survives(mutant: Mutant) -> bool:
        copy = copies.get()
        try:
            spec = MutationSpec(copy / "flashinfer_wsfix" / f"{mutant.module}.py", *mutant[3:])
            return mutate_and_test([spec], command(mutant.module, copy), SECONDS).test_outcome != TestOutcome.KILLED
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        for number in range(WORKERS):
            copies.put(make_copy(Path(folder, str(number))))
        for module in modules:
            start, survivors = time.monotonic(), 0
            check(module, Path(folder, "0"))
            every = mutants(module, Path(folder, "0", "flashinfer_wsfix", f"{module}.py").read_text())
            for mutant, survived in zip(every, pool.map(survives, every), strict=True):
                if survived:
                    survivors += 1
                    unexplained += mutant.text not in reasons
                    print(f"  {module}.py:{mutant.line}: {mutant.text}")
                    print(f"    {reasons.get(mutant.text, 'NOT EXPLAINED')}", flush=True)
            minutes = (time.monotonic() - start) / 60
            killed = len(every) - survivors
            print(f"{module}: {len(every)} mutants, {killed} killed, {survivors} survive; {minutes:.0f} minutes")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["detection", "guards"]))
