"""Stock and guarded side by side: a real site's calls and a graph's replay in the worker while completions are served.

The replay is a write through the captured address. On the stock server it meets memory that went back to the system.
"""

import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import serving

from startup.environments import Environment

COMPLETIONS = 2_708  # of the production soak
TOKENS = 4
CLIENTS = 16
SECONDS = 900  # in which they must be served


def soak(where: Environment, model: Path) -> dict[str, Any]:
    """Serve completions, until one has failed or all are served, and return what was seen."""
    with serving.serve(where, model, "--worker-extension-cls", "extension.Sites") as server:
        server.workers("wsfix_soak")
        began = time.monotonic()
        answers: list[bool] = []

        def complete(number: int) -> None:
            if all(answers) and time.monotonic() - began < SECONDS:
                answers.append(server.complete(f"Request {number}:", TOKENS))

        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(complete, range(COMPLETIONS)))
        seen = {"served": sum(answers), "failed": answers.count(False), "seconds": round(time.monotonic() - began)}
        if all(answers):
            seen |= server.workers("wsfix_soaked")[0] | {"ended": "lives"}
        else:
            try:
                seen["ended"] = f"exit status {server.wait_for_end(60)}"
            except subprocess.TimeoutExpired:
                seen["ended"] = "hangs"
        return seen | {"log": server.log}


def test_the_stock_server_dies_and_the_guarded_one_serves_them_all(tmp_path, wheel, model):
    """The stock one has no package at all; the guarded one has it by the plugin."""
    stock = soak(serving.make_environment(tmp_path / "stock"), model)
    guarded = soak(serving.make_environment(tmp_path / "guarded", wheel), model)
    for name, seen in (("stock", stock), ("guarded", guarded)):
        log = seen.pop("log")
        print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in seen.items()))
        print("\n".join(re.findall(r"soak: .*", log)))
        crashed = "Segmentation fault" in log
        print("\n".join(re.findall(r"Fatal Python error.*|File .*extension.py.*", log)))
        assert crashed == (name == "stock"), log[-6000:]
    assert stock["failed"] and stock["served"] < COMPLETIONS and stock["ended"].startswith("exit status")
    assert (guarded["served"], guarded["failed"], guarded["ended"]) == (COMPLETIONS, 0, "lives")
