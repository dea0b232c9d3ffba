"""The layout of the package: imports point one way, and what a server runs knows nothing of what an operator runs.

``python tests/test_house.py`` prints the lines of code of each part, without docstrings and comments.
"""

import ast
import io
import tokenize
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flashinfer_wsfix"
OPERATORS = "cli"
LIMIT = 320  # lines of a module
READ_BY_EVERYONE = 1310  # lines of code of what a server runs
START = ("", "activation", "importer", "names", "state")  # what every interpreter of an environment runs
# Imported where they are needed and not before: a process that never imports FlashInfer must not pay for them.
LATE = {("activation", "patching"), ("activation", "report")}


def modules() -> dict[str, Path]:
    """Each module by its name below the package; a package by its own. The bootstrap folder's is no module of it."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        *folders, name = path.relative_to(PACKAGE).with_suffix("").parts
        if folders[:1] != ["bootstrap"]:
            found[".".join(folders if name == "__init__" else [*folders, name])] = path
    return found


def arrows() -> set[tuple[str, str]]:
    """Who imports whom, at the top of a module or inside a function of it."""
    known = modules()
    found = set()
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package.split(".") if package else []
                base = base[: len(base) - node.level + 1] + (node.module.split(".") if node.module else [])
                for alias in node.names:
                    inner, outer = ".".join([*base, alias.name]), ".".join(base)
                    found.add((name, inner if inner in known else outer))
    return {(source, target) for source, target in found if source != target}


def test_imports_form_no_circle():
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for source, target in arrows() - LATE:
        graph[source].add(target)
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_what_is_imported_late_is_still_imported_there():
    assert arrows() >= LATE


def test_the_servers_part_imports_nothing_of_the_operators():
    ours = {(source, target) for source, target in arrows() if target.split(".")[0] == OPERATORS}
    assert {source for source, _ in ours if source.split(".")[0] not in (OPERATORS, "__main__")} == set()


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_is_read_in_one_sitting(name):
    assert len(modules()[name].read_text().splitlines()) <= LIMIT


def lines_of_code(path: Path) -> int:
    """Count the lines of a module that hold more than a docstring or a comment."""
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def parts() -> dict[str, int]:
    """Add up the lines of code of what a server runs, of the start-up path in it, and of what an operator runs."""
    counts = {name: lines_of_code(path) for name, path in modules().items()}
    operators = sum(count for name, count in counts.items() if name.split(".")[0] in (OPERATORS, "__main__"))
    start = sum(counts[name] for name in START)
    return {"server": sum(counts.values()) - operators, "start-up path of it": start, "operator": operators}


def test_what_a_server_runs_does_not_grow():
    assert parts()["server"] <= READ_BY_EVERYONE


if __name__ == "__main__":
    for part, count in parts().items():
        print(f"{count:6,} {part}")
