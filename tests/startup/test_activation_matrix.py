"""Each route of activation in each kind of process, order of import, interpreter flag and Python.

First on FlashInfer itself: whether the functions that run the GEMM are guarded in the very process. Then, where torch
need not be, whether the hook is in.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import (
    BOOTSTRAP,
    PROBE,
    TESTS,
    Environment,
    has_distribution_sitecustomize,
    interpreters,
    output,
    run,
)

import releases
from hosts import SGLANG_RELEASES, VLLM_RELEASES

RELEASE = "0.6.18.post1"
SITES = 10
PROCESSES = ("main", "fork", "spawn", "forkserver", "subprocess")
VERSION = "{}.{}".format(*sys.version_info)
OWN = "import flashinfer_wsfix\n"  # the documented line for people's own sitecustomize

# The routes, and how to have a server.py take each: what it does itself, and what leads there.
PLUGINS = {"vLLM-plugin": f"vllm-{VLLM_RELEASES[1]}", "SGLang-plugin": f"sglang-{SGLANG_RELEASES[1]}"}
BY_ITSELF = {"import": "import", **PLUGINS}
ON_THE_WAY = ("launcher", "start-up-file", "PYTHONPATH", "own-sitecustomize")
NAMES = {"PYTHONPATH": "sitecustomize", "launcher": "sitecustomize", "own-sitecustomize": "import"}


def name(route: str) -> str:
    """The word under which a route is recorded."""
    return NAMES.get(route, route.replace("-plugin", " plugin").replace("start-up-file", "start-up file"))


@pytest.fixture(scope="session")
def environments(tmp_path_factory):
    """Return an environment of a version of Python that is prepared for a route."""

    @functools.cache
    def prepare(version: str, kind: str) -> Environment:
        made = Environment(tmp_path_factory.mktemp("environment"), interpreters()[version]).copy_package()
        if version == VERSION:
            made.see_host()
        if kind == "start-up-file":
            assert made.cli("enable").returncode == 0
        if kind == "own-sitecustomize":
            (made.site / "sitecustomize.py").write_text(OWN)
        return made

    prepared = ("start-up-file", "own-sitecustomize")
    return lambda version, route: prepare(version, route if route in prepared else "plain")


def lead(environment: Environment, route: str) -> tuple[list[object], dict[str, str]]:
    """What to put before a command, and what to set, so that it goes by a route."""
    if route == "launcher":
        return [environment.python, "-m", "flashinfer_wsfix", "run"], {}
    if route == "PYTHONPATH":
        return [], {"PYTHONPATH": str(environment.site / BOOTSTRAP)}
    return [], {}


@pytest.fixture(scope="session")
def server(environments):
    """Return the states of a server's processes, which starts by a route."""

    @functools.cache
    def start(route: str, order: str, *settings: str, again: str = "-") -> subprocess.CompletedProcess[str]:
        environment = environments(VERSION, route)
        before, variables = lead(environment, route)
        paths = [variables.get("PYTHONPATH"), str(TESTS), str(releases.fetch(RELEASE))]
        itself = BY_ITSELF.get(route, again)
        command = [*before, environment.python, Path(__file__).with_name("server.py"), order, itself, *settings]
        return run(command, **{**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))})

    def states(*words: str, **again: str) -> dict[str, dict[str, object]]:
        ran = start(*words, **again)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    return states


CELLS = [(route, order) for route in BY_ITSELF for order in ("before", "after")]
CELLS += [(route, "before") for route in ON_THE_WAY]


def needs_own_sitecustomize(route: str, python: object = sys.executable) -> None:
    if route == "own-sitecustomize" and has_distribution_sitecustomize(python):
        pytest.skip("the sitecustomize of this distribution wins over one in site-packages")


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize(("route", "order"), CELLS)
def test_the_process_that_runs_the_gemm_is_guarded(server, route, order, process):
    """All sites once, also under a name that a module copied before we came."""
    needs_own_sitecustomize(route)
    assert server(route, order)[process] == {
        "routes": [name(route)],
        "state": "guarded",
        "guarded": SITES,
        "unguarded": 0,
        "twice": 0,
        "copied": True,
        "gates": ["fp8", "bf16"],
        "torch": True,
    }


@pytest.mark.parametrize("process", PROCESSES)
def test_without_a_route_nothing_is(server, process):
    """What the other tests see is a route's doing."""
    state = server("-", "before")[process]
    assert (state["routes"], state["guarded"], state["unguarded"]) == (None, 0, SITES)


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("route", ["vLLM-plugin", "launcher", "start-up-file"])
def test_off_in_the_script_before_flashinfer_is_imported_counts(server, route, process):
    state = server(route, "before", "FLASHINFER_WSFIX=0")[process]
    assert (state["state"], state["guarded"], state["unguarded"], state["copied"]) == ("disabled", 0, SITES, False)


@pytest.mark.parametrize("process", PROCESSES)
def test_the_other_settings_count_just_the_same(server, process):
    state = server("launcher", "before", "FLASHINFER_WSFIX_GATE=bf16")[process]
    assert (state["state"], state["guarded"], state["gates"]) == ("guarded", SITES, ["bf16"])


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize(("first", "order"), [("launcher", "before"), ("start-up-file", "after")])
def test_activated_twice_by_different_routes_it_is_guarded_once(server, first, order, process):
    state = server(first, order, again=PLUGINS["vLLM-plugin"])[process]
    assert state["routes"] == [name(first), "vLLM plugin"]
    assert (state["state"], state["guarded"], state["twice"], state["copied"]) == ("guarded", SITES, 0, True)


def test_activated_three_times_by_different_routes_the_hook_is_in_once(environments):
    """The start-up file, then the launcher's sitecustomize, then an import."""
    python = environments(VERSION, "start-up-file").python
    command = [python, "-m", "flashinfer_wsfix", "run", python, "-c", OWN + PROBE]
    assert output(command) == "['start-up file', 'sitecustomize']"


# --- flags and other Pythons: whether the hook is in -----------------------------------------------------------------

LOAD_PLUGIN = """
from importlib.metadata import entry_points
for point in entry_points(group="{}", name="flashinfer_wsfix"):
    point.load()()
"""
FIRST = {
    "import": OWN,
    "vLLM-plugin": LOAD_PLUGIN.format("vllm.general_plugins"),
    "SGLang-plugin": LOAD_PLUGIN.format("sglang.srt.plugins"),
}
# -S: no site-packages at all; -I and -E: no PYTHONPATH.
LOST = {"-S": {*BY_ITSELF, *ON_THE_WAY}, "-I": {"launcher", "PYTHONPATH"}, "-E": {"launcher", "PYTHONPATH"}}


@pytest.mark.parametrize("flag", ["no-flag", "-I", "-E", "-S", "-s", "-P"])
@pytest.mark.parametrize("route", [*BY_ITSELF, *ON_THE_WAY])
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_a_fresh_interpreter_is_activated(environments, version, route, flag):
    """By every route but those that a flag closes. A venv reads each line of a start-up file twice: it counts once."""
    if version not in interpreters():
        pytest.skip(f"there is no Python {version} here")
    if flag == "-P" and version == "3.10":
        pytest.skip("Python 3.11 was the first to have -P")
    needs_own_sitecustomize(route, interpreters()[version])
    environment = environments(version, route)
    before, variables = lead(environment, route)
    if flag == "-S" and route in FIRST:
        ran = run([environment.python, flag, "-c", FIRST[route] + PROBE])
        assert ran.stdout.strip() == "None" or "No module named 'flashinfer_wsfix'" in ran.stderr
        return
    flags = [flag] if flag != "no-flag" else []
    command = [*before, environment.python, *flags, "-c", FIRST.get(route, "") + PROBE]
    assert output(command, **variables) == ("None" if route in LOST.get(flag, ()) else f"['{name(route)}']")
