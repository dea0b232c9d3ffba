"""In a running vLLM, every worker is guarded by the route expected, and the doctor's word is what the workers show."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import serving

from startup.environments import ROOT, Environment, run

EXTENSION = ("--worker-extension-cls", "extension.Sites")
MIB = 1 << 20
FLAT = 32 * MIB + 256  # what cuDNN's cuBLASLt-backed plan asks for, whatever the shape
SITES = 8  # of FlashInfer 0.6.18.post1, before it imports the module of the last two
GROWN = 96 * MIB
ALL: dict[str, str] = {}
NO_PLUGIN = {"VLLM_PLUGINS": ""}
OFF = {"FLASHINFER_WSFIX": "0"}
TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # a core for each of two workers


class SetUp(NamedTuple):
    """What is done before the start ("", "enable", "run" or "uninstall"), with which variables, and what comes of it.

    ``routes``: None where nothing of ours is to be in the workers.
    """

    done: str
    variables: dict[str, str]
    routes: list[str] | None
    guarded: bool
    workers: int = 1


SET_UPS = {
    "the plugin alone": SetUp("", ALL, ["vLLM plugin"], True),
    "the plugin, -tp 2": SetUp("", TWO, ["vLLM plugin"], True, workers=2),
    "enable, plugin kept out": SetUp("enable", NO_PLUGIN, ["start-up file"], True),
    "the launcher, plugin kept out": SetUp("run", NO_PLUGIN, ["sitecustomize"], True),
    "nothing, plugin kept out": SetUp("", NO_PLUGIN, None, False),
    "switched off": SetUp("", OFF, ["vLLM plugin"], False),
    "uninstalled without disable": SetUp("uninstall", ALL, None, False),
}


def prepare(folder: Path, wheel: Path, done: str) -> tuple[Environment, list[Path | str]]:
    """Make the environment of a set-up; return it, and what stands before its commands."""
    where = serving.make_environment(folder, wheel)
    if done in ("enable", "uninstall"):
        enabled = where.cli("enable")
        assert enabled.returncode == 0, enabled.stderr
    if done == "uninstall":
        pip = [sys.executable, "-m", "pip", "--python", where.python, "--disable-pip-version-check"]
        gone = run([*pip, "uninstall", "-q", "-y", "flashinfer-wsfix"])
        assert gone.returncode == 0, gone.stderr
        assert (where.site / "flashinfer_wsfix.pth").is_file()
    return where, [where.folder / "bin/flashinfer-wsfix", "run"] if done == "run" else []


def doctor(where: Environment, before: Sequence[Path | str], set_up: SetUp) -> dict[str, Any]:
    """What the doctor says in the environment of the server: where it is uninstalled, the repository's, from there."""
    ran = subprocess.run(
        [*before, where.python, "-m", "flashinfer_wsfix", "doctor", "--json"],
        cwd=ROOT if set_up.done == "uninstall" else "/",
        env=serving.settings(where, **set_up.variables),
        capture_output=True,
        text=True,
    )
    assert ran.returncode in (0, 1), ran.stderr
    said: dict[str, Any] = json.loads(ran.stdout)
    assert said["problem"] == bool(ran.returncode)
    return said


@pytest.mark.parametrize("name", SET_UPS)
def test_a_running_server(tmp_path, wheel, model, name):
    """Each worker is asked, a completion is served, and the doctor comes to the same judgement as the workers."""
    set_up = SET_UPS[name]
    where, before = prepare(tmp_path / "environment", wheel, set_up.done)
    options = [*EXTENSION, "-tp", str(set_up.workers)]
    with serving.serve(where, model, *options, before=before, **set_up.variables) as server:
        states = server.workers("wsfix_state")
        calls = server.workers("wsfix_calls", [MIB, FLAT, GROWN])
        assert server.complete("Hello", 4)
        log = server.log

    assert len({state.pop("pid") for state in states}) == set_up.workers
    guarded = {"guarded": SITES if set_up.guarded else 0, "warm-up": set_up.guarded}
    assert states == [{"sites": SITES, "routes": set_up.routes, **guarded}] * set_up.workers
    for called in calls:
        small, flat, grown = called["addresses"]
        if set_up.guarded:
            assert small == flat != grown, "what fits keeps its address"
            assert called["mapped"] == [True] * 3, "a lane that grew keeps what graphs may hold"
            assert len(set(called["own"])) == 1, "FlashInfer's own buffer stays as it is"
        else:
            assert small != flat and not called["mapped"][0], "stock moves, and frees what graphs may hold"
            assert called["own"] == [small, small, flat, grown]
    if set_up.guarded:
        line = f"(activated by {', '.join(set_up.routes)})"
        assert len(re.findall(r"flashinfer-wsfix\[\d+\]: .*" + re.escape(line), log)) >= set_up.workers
    if set_up.routes is None:
        assert "flashinfer-wsfix" not in log and "flashinfer_wsfix" not in log, "nothing of ours ran"
    assert "Traceback" not in log

    said = doctor(where, before, set_up)
    print(f"{name}: {said['sentence']}")
    defects = {defect["name"]: defect for defect in said["defects"]}
    assert said["problem"] is not set_up.guarded
    assert (defects["D1"]["state"], defects["D1"]["guarded"]) == ("applies", set_up.guarded)
    assert defects["D2"]["guarded"] is set_up.guarded
    if set_up.guarded:
        told = {route for row in said["activation"] for route in row["routes"]}
        assert {route.removeprefix("vLLM ") for route in set_up.routes} <= told, "by the same routes"
    if set_up.done == "uninstall":
        assert "orphaned start-up file" in {finding["name"] for finding in said["findings"]}
