"""Ray: its workers run our function before any task, in a real local cluster. Skipped where ray is not installed."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("ray")

DRIVER = """
import sys
import ray

@ray.remote
def routes():
    state = sys.modules.get("flashinfer_wsfix.state")
    hooked = any(type(finder).__module__ == "flashinfer_wsfix.importer" for finder in sys.meta_path)
    return state and (state.routes, hooked, "torch" in sys.modules, "wrapt" in sys.modules)

@ray.remote
class Actor:
    def routes(self):
        state = sys.modules.get("flashinfer_wsfix.state")
        hooked = any(type(finder).__module__ == "flashinfer_wsfix.importer" for finder in sys.meta_path)
        return state and (state.routes, hooked, "torch" in sys.modules, "wrapt" in sys.modules)

ray.init(num_cpus=1, include_dashboard=False, runtime_env=RUNTIME_ENV)
print(ray.get(routes.remote()), ray.get(Actor.remote().routes.remote()), "flashinfer_wsfix" in sys.modules)
"""


def driver(tmp_path, runtime_env):
    """What a driver with this runtime environment prints of a task's worker, of an actor's, and of itself."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.replace("RUNTIME_ENV", repr(runtime_env)))
    # A driver's working directory is on the path of its workers: not the repository, for once.
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


def test_a_worker_is_activated_before_its_first_task(tmp_path):
    """Tasks and actors, while the driver is not."""
    worker = (["Ray"], True, False, False)
    hook = {"worker_process_setup_hook": "flashinfer_wsfix.startup.ray_worker"}
    assert driver(tmp_path, hook) == f"{worker} {worker} False"


def test_without_the_hook_a_worker_is_not(tmp_path):
    """What the other test sees is the hook's doing."""
    assert driver(tmp_path, None) == "None None False"
